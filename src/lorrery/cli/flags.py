"""Options that several commands have: `--version`, `--config`, and a table of those that define a worker.

Each of the latter sets one setting, as `--set` would: engine, model, GPU and so on.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lorrery.service.commands import command_option, takes
from lorrery.service.errors import SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.names import cut

__all__ = [
    "CONFIG_HELP",
    "ConfigOption",
    "Flag",
    "SetOption",
    "VersionOption",
    "takes_deployment",
    "takes_flags",
    "with_deployment",
]


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {VERSION}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
"""Type of a parameter `version`, which the command itself can ignore."""

CONFIG_HELP = "Settings file; default: $LORRERY_CONFIG, else the shipped one, which lorrery init copies."

ConfigOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE", envvar="LORRERY_CONFIG", show_envvar=False, show_default=False, help=CONFIG_HELP, dir_okay=False
    ),
]
"""Type of a parameter `config`; its default is `DEFAULT_SETTINGS`."""

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable; highest precedence."),
]
"""Type of a parameter `overrides`; its default is None."""

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


def _flag(names: str, kind: type[str] | type[int], metavar: str, sets: str, text: str) -> Flag:
    least = 1 if kind is int else None
    return Flag(tuple(names.split()), kind, "Deployment", text, sets, least=least, metavar=metavar)


_FLAGS = (
    _flag(
        "--engine",
        str,
        "NAME[-VERSION]",
        "engine",
        "Inference engine whose defaults apply: vllm, sglang, trtllm. Overrides the file; --set overrides it.",
    ),
    _flag("--model", str, "NAME", "model", "Base model."),
    _flag("--gpu", str, "NAME", "worker.gpu", "GPU."),
    _flag("--tensor-parallel --tp", int, "N", "worker.tensor_parallel", "GPUs per worker."),
    _flag("--gpus", int, "N", "worker.gpus", "Workers per process, one GPU each."),
    _flag("--weight-dtype", str, "TYPE", "worker.weight_dtype", "Number format of the weights."),
    _flag("--kv-dtype", str, "TYPE", "worker.kv_dtype", "Number format of the KV cache."),
)


def takes_deployment(*names: str, before: str) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` these options.

    Args:
        names: of their parameters; none: all.
        before: the command's parameter that they precede.
    """
    return takes_flags((flag for flag in _FLAGS if not names or flag.key in names), before)


def with_deployment(given: Mapping[str, Any], overrides: Iterable[str] | None) -> list[str]:
    """Return the overrides that the options above stand for, followed by those of `--set`.

    Args:
        given: the options' values by parameter; other entries are ignored.
        overrides: the values of `--set`.

    Raises:
        SettingsError: an option and a `--set` set the same key.
    """
    from lorrery.service.settings.reading import key_of, override_of  # while a fork server imports the services

    overrides = list(overrides or ())
    found: list[str] = []
    for flag in _FLAGS:
        if (value := given.get(flag.key)) is None:
            continue
        option, key = f"{flag.names[0]} {cut(str(value))}", flag.sets
        if same := next((one for one in overrides if key_of(one) == key), None):
            raise SettingsError(f"{option} and --set {cut(same)} both say what {key} is; give one")
        found.append(override_of(key, value))
    return [*found, *overrides]
