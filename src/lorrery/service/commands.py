"""One help format for all commands.

A docstring consists of prose paragraphs, which are wrapped to the terminal, and indented blocks, which are kept as they
are: examples under a line `Examples:`, files, formulas.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from lorrery.service.names import quoted
from lorrery.service.options import Option, options_of

__all__ = ["ApiKey", "Command", "command_app", "command_option", "command_options", "takes"]

_F = TypeVar("_F", bound=Callable[..., Any])


API_KEY_VARIABLE = "LORRERY_API_KEY"
"""Variable with a client's API key."""


def _can_be_shown(key: str) -> str:
    wrong = next((index for index, char in enumerate(key) if not "!" <= char <= "~"), None)
    if wrong is not None:  # never the key itself
        raise typer.BadParameter(
            f"character {wrong + 1} of {len(key)} is not visible ASCII; give the key as `lorrery keys new` printed it"
        )
    return key


ApiKey = Annotated[
    str,
    typer.Option(
        callback=_can_be_shown,
        envvar=API_KEY_VARIABLE,
        show_envvar=False,
        show_default=False,
        metavar="KEY",
        help=f"API key to send; better in ${API_KEY_VARIABLE}, which process listings do not show.",
    ),
]
"""Option of every command that calls a router."""


class Command(TyperCommand):
    """Shows its docstring as described above; brackets in it are text, not markup. Rejects empty paths."""

    def __init__(self, *arguments: Any, help: str | None = None, **given: Any) -> None:  # noqa: A002, ANN401  click's
        super().__init__(*arguments, help=None if help is None else _wrapped(help), **given)

    # Which module click's Context is in differs between versions of typer.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Parse; errors show the wrong value, as for settings, and an empty path is refused.

        To pathlib the empty path is the current directory; in a script it is a variable that is not set.
        """
        given: dict[str, Any] = self.make_parser(ctx).parse_args(args=list(args))[0]
        paths = set(self._paths())
        parameter: Any  # its class differs between versions of typer
        for parameter in self.params:
            value = given.get(parameter.name or "")
            if parameter.name in paths and (value == "" or (isinstance(value, list | tuple) and "" in value)):
                raise typer.BadParameter("the path is empty; name one, or leave it out", ctx=ctx, param=parameter)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            errors = getattr(error.__cause__, "errors", None)
            if isinstance(error.__cause__, ValueError) and errors is not None:  # pydantic's
                error.message += f", got {quoted(str(errors()[0]['input']))}"
            raise

    def _paths(self) -> Iterator[str | None]:
        """Yield the names of the parameters that are paths, by their type or by what the help calls their value."""
        for name, kind in get_type_hints(self.callback).items():
            if any(Path in (one, *get_args(one)) for one in (kind, *get_args(kind))):
                yield name
        yield from (parameter.name for parameter in self.params if parameter.metavar in ("FILE", "DIR", "PATH"))


def command_app(text: str | None = None, *, no_args_is_help: bool = False) -> typer.Typer:
    """Make a typer application. Register its commands with `cls=Command`, or a class derived from it.

    Args:
        text: what the help says of a group of commands.
        no_args_is_help: show the help where nothing is asked for.
    """
    return typer.Typer(
        help=text,
        add_completion=False,
        no_args_is_help=no_args_is_help,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command_option(name: str, kind: Any, default: object, *flags: str, **more: Any) -> Parameter:  # noqa: ANN401
    """Return a parameter of a command, made from a row of a table of options.

    Args:
        name: of the parameter.
        kind: its type.
        default: None: unset.
        flags: on the command line; none: derived from the name.
        more: as for `typer.Option`.
    """
    annotation = Annotated[kind, typer.Option(*flags, **more)]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def command_options(table: type[Any], names: Iterable[str] | None = None) -> list[Parameter]:
    """Return a command's parameters for the options of a table (`service.options`).

    A value that has a parser arrives as text, and one that is unset, or whose default no text stands for, as None.

    Args:
        table: a dataclass.
        names: of the options; None: all.
    """
    hints = get_type_hints(table)
    defaults = {one.name: one.default for one in fields(table)}
    return [
        _table_option(name, option, hints[name], defaults[name])
        for name, option in options_of(table).items()
        if names is None or name in names
    ]


def _table_option(name: str, option: Option, hint: Any, default: object) -> Parameter:  # noqa: ANN401  a type
    as_text = option.derived or option.parse not in (None, Path)
    text = list[str] | None if option.repeatable else str | None
    return command_option(
        name,
        text if as_text else hint,
        None if option.derived or isinstance(default, tuple) else default,
        *option.names,
        help=option.help,
        metavar=option.metavar,
        rich_help_panel=option.panel,
        min=None if as_text else option.least if option.least_typed is None else option.least_typed,
        max=option.most_typed,
    )


def takes(options: Iterable[Parameter], before: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` the options of a table.

    Args:
        options: from `command_option`.
        before: the command's parameter that they precede, in the help too; None: they are last.
    """
    table = list(options)

    def give(command: _F) -> _F:
        own = [one for one in Signature.from_callable(command).parameters.values() if one.kind != Parameter.VAR_KEYWORD]
        place = len(own) if before is None else [one.name for one in own].index(before)
        signature = Signature([*own[:place], *table, *own[place:]])
        setattr(command, "__signature__", signature)  # noqa: B010  what inspect, and so typer, goes by
        return command

    return give


def _wrapped(text: str) -> str:
    """Join the lines of each paragraph, so that the terminal wraps them; keep those of blocks that are indented."""
    paragraphs = re.split(r"\n\s*\n", cleandoc(text))
    joined = (part if re.search(r"^ ", part, re.MULTILINE) else part.replace("\n", " ") for part in paragraphs)
    return escape("\n\n".join(joined))
