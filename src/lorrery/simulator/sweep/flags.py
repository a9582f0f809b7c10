"""The options of `lorrery simulate` that make it a sweep, and the options that can be swept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from lorrery.loadgen.options import OPTIONS
from lorrery.service.errors import SettingsError
from lorrery.service.options import Option, flag_of, options_of
from lorrery.simulator.options import SimulationOptions

_PANEL = "Sweep"

Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUES",
        help="One run for each value, given as a,b,c or 1..8; repeatable: all combinations. KEY is a setting, as for"
        " --set, or the name of an option, such as rate.",
        rich_help_panel=_PANEL,
    ),
]


PROCESSES = "processes"


@dataclass(frozen=True, slots=True)
class Where:
    """How a sweep runs: with how many seeds, and where."""

    seeds: Annotated[
        int | None,
        Option(
            "Runs of each point, with seeds from --seed on; its row is their mean. Unset: 3 if its requests are drawn,"
            " else 1; 1 if seed is swept.",
            _PANEL,
            "N",
            least=1,
            most_typed=1_000,
        ),
    ] = None
    jobs: Annotated[
        int | None,
        Option("Number of runs at a time; unset: all cores.", _PANEL, "N", names=("--jobs", "-j"), least=1),
    ] = None
    backend: Annotated[
        str, Option(f"Backend for the runs: {PROCESSES} (on this machine), dask, ray.", _PANEL, "NAME")
    ] = PROCESSES
    backend_address: Annotated[
        str | None, Option("dask, ray: address of the cluster; unset: one on this machine.", _PANEL, "ADDRESS")
    ] = None


_OF_SIMULATION = {
    flag_of(name, option).removeprefix("--"): name for name, option in options_of(SimulationOptions).items()
}
_OF_LOAD = {name.replace("_", "-"): name for name, option in OPTIONS.items() if not option.live_only}
CONFIG = "config"
UNSET = "none"
"""Value that stands for an optional option not given."""


class SweptFlags:
    """The options that can be swept, parsed as on the command line."""

    def __init__(self, context: typer.Context) -> None:
        sweepable = {CONFIG, *_OF_SIMULATION, *_OF_LOAD}
        self._context = context
        self._options: dict[str, TyperOption] = {}
        for parameter in context.command.params:
            for name in (name.removeprefix("--") for name in parameter.opts):
                if name in sweepable:
                    assert isinstance(parameter, TyperOption)
                    self._options[name] = parameter

    def name_of(self, key: str) -> str | None:
        """Return the option that a swept key names; None: it is a setting."""
        name = key.removeprefix("--").replace("_", "-")
        return name if name in self._options else None

    def parameter_of(self, key: str) -> str:
        """Return the name of the command's parameter for an option, swept or not: `tp` is `tensor_parallel`."""
        option = f"--{key.removeprefix('--').replace('_', '-')}"
        found = (parameter.name for parameter in self._context.command.params if option in parameter.opts)
        return next(found, None) or key

    def read(self, name: str, text: str) -> tuple[str, Any]:
        """Parse a value; return the field of `LoadOptions` or `SimulationOptions`, and the field's value.

        Raises:
            SettingsError: a value that the command line would refuse.
        """
        option, field = self._options[name], self._field(name)
        row = OPTIONS[field] if name in _OF_LOAD else options_of(SimulationOptions).get(field)
        if text == UNSET and option.default is None:
            return field, () if option.multiple else None
        try:
            value: Any = option.process_value(self._context, [text] if option.multiple else text)
        except typer.BadParameter as error:
            raise SettingsError(error.message) from None
        if row is None:
            return field, Path(value)
        if row.parse is not None:
            value = tuple(map(row.parse, value)) if row.repeatable else row.parse(value)
        return field, value

    def given(self, name: str) -> str | None:
        """Return an option that the command line has itself and a sweep of it replaces; None: it does not have it.

        A sweep of an option that is repeatable replaces none.
        """
        option = self._options[name]
        source = None if option.name is None else self._context.get_parameter_source(option.name)
        return f"--{name}" if not option.multiple and source is not None and source.name == "COMMANDLINE" else None

    def command_line(self) -> list[str]:
        """Return the options of every point as the command line gives them, without those of the sweep itself."""
        own = {"sweeps", "out", "report", *options_of(Where)}
        found: list[str] = []
        for option in self._context.command.params:
            name = option.name or ""
            source = self._context.get_parameter_source(name)
            if name in own or source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
                continue
            value: Any = self._context.params[name]
            flag = max(option.opts, key=len)
            if isinstance(value, bool):
                found.append(flag if value else max(option.secondary_opts, key=len, default=flag))
            else:
                values: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
                found += [text for one in values for text in (flag, f"{one:g}" if isinstance(one, float) else str(one))]
        return found

    @staticmethod
    def is_of_load(name: str) -> bool:
        """Return whether it is an option of the workload, not of the simulation."""
        return name in _OF_LOAD

    @staticmethod
    def _field(name: str) -> str:
        return CONFIG if name == CONFIG else _OF_LOAD.get(name) or _OF_SIMULATION[name]
