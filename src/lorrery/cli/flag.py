"""A row of a table of flags that set settings, and its conversion to a typer option."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from lorrery.service.commands import command_option, takes

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
        sets: the setting, or a description of what the command derives from it.
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


def takes_flags(flags: Iterable[Flag], before: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` these flags; `before`: as for `takes`."""
    options = [
        command_option(
            flag.key,
            flag.kind | None,
            None,
            *flag.names,
            help=flag.help,
            metavar=flag.metavar or _METAVARS[flag.kind],
            rich_help_panel=flag.panel,
            min=flag.least,
            envvar=flag.variable,
            show_envvar=False,
            show_default=False,
        )
        for flag in flags
    ]
    return takes(options, before)
