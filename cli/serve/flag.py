"""A row of the table of flags, and its conversion to a typer option."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

_METAVARS = {str: "NAME", int: "N", float: "X", bool: None, list[str]: "NAME"}

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, which may have several names.

    Attributes:
        names: as on the command line, this command's own name first; `--a/--no-a` where it can be turned off.
        kind: of its value; `list[str]` takes several after one flag, as vLLM does.
        panel: of the help.
        help: one sentence.
        sets: the setting, or a description of what `settings.py` derives from it.
        plain: whether the value is assigned to the setting unchanged.
        least: lowest value.
        metavar: of the value in the help.
        variable: environment variable that can set it.
        only: the one value that is taken, without effect; None: there are others.
        why: why other values are refused, and what to do instead.
    """

    names: tuple[str, ...]
    kind: type[Any]
    panel: str
    help: str
    sets: str
    plain: bool = True
    least: float | None = None
    metavar: str | None = None
    variable: str | None = None
    only: str | int | None = None
    why: str = ""

    @property
    def key(self) -> str:
        """Parameter name."""
        return self.names[0].partition("/")[0].removeprefix("--").replace("-", "_")


def takes_flags(flags: Iterable[Flag]) -> Callable[[_F], _F]:
    """Return a decorator that gives a function of `**given` the parameters of these flags, for typer."""
    parameters = [
        Parameter(flag.key, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag)) for flag in flags
    ]

    def give(command: _F) -> _F:
        own = [one for one in Signature.from_callable(command).parameters.values() if one.kind != Parameter.VAR_KEYWORD]
        signature = Signature([*own, *parameters])
        setattr(command, "__signature__", signature)  # noqa: B010  what inspect, and so typer, goes by
        return command

    return give


def _annotation(flag: Flag) -> Any:  # noqa: ANN401  what typer reads
    option = typer.Option(
        *flag.names,
        help=flag.help,
        metavar=flag.metavar or _METAVARS[flag.kind],
        rich_help_panel=flag.panel,
        min=flag.least,
        envvar=flag.variable,
        show_envvar=False,
        show_default=False,
    )
    return Annotated[flag.kind | None, option]
