"""The points of a sweep: settings and options of each combination, and the key under which its figures are stored.

A value that no point can have (unknown key, not a number, unknown policy) is an error before anything runs. If only
some combinations are invalid, those points fail, and the others run.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lorrery
from lorrery.loadgen import option_rules
from lorrery.loadgen.options import LoadOptions
from lorrery.scheduler.plugins import search_here
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.names import cut
from lorrery.service.settings.cluster import Settings, load
from lorrery.service.settings.reading import key_of, known_settings, nearest_setting
from lorrery.simulator.cluster import check_adapters, check_routers
from lorrery.simulator.options import SimulationOptions
from lorrery.simulator.sweep.axes import MOST_POINTS, Axis, Value, combinations
from lorrery.simulator.sweep.flags import CONFIG, SweptFlags
from lorrery.simulator.sweep.inputs import Inputs, named_files, plugin_files
from lorrery.worker.build import deployment_of

__all__ = ["SEED", "Asked", "Point", "code_digest", "make_points"]

ROOMS_OF_A_SIMULATION = (
    "loadgen",
    "router",
    "scheduler",
    "service",
    "simulator",
    "vocabulary",
    "worker",
)
"""Packages whose code or catalogues a simulation uses."""
_NO_MATTER: dict[str, bool | set[str]] = {
    "log": True,
    "server_tls": True,
    "client_tls": True,
    "cluster_token": True,
    "router": {"keys", "http_tls"},
    "scheduler": {"journal", "adapters_file"},
}
"""Settings that a simulation does not read, including files that a running cluster writes."""
_OF_DEVICE = {"catalogue", "model", "worker", "workers", "adapters"}
"""Settings that `deployment_of` reads."""


SEED = "seed"
DRAWS = 3
"""Seeds of a point whose requests are drawn, if their number is not asked for."""

Asked = tuple[Path | None, tuple[str, ...], LoadOptions, SimulationOptions]
"""Base of every point from the command line: settings file, `--set`s, options. The sweep's values change it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a simulation needs; sent to the process that runs it."""

    settings: Settings
    options: LoadOptions
    simulation: SimulationOptions


@dataclass(frozen=True, slots=True)
class Point:
    """One combination.

    Attributes:
        values: of the swept keys, in their order.
        seed: if several points with these values are one row of the table.
        key: a hash of all that determines its figures; empty if it cannot be run.
        run: None if it cannot be run.
        refused: why it cannot.
        determined_by: the content hashed by the key.
        inputs: the files in that content; None if it cannot be run.
    """

    values: dict[str, Value]
    key: str = ""
    run: Run | None = None
    refused: str = ""
    determined_by: Mapping[str, Any] | None = None
    inputs: Inputs | None = None
    seed: int | None = None

    @property
    def has_plug_in(self) -> bool:
        """Whether it runs code from outside the tree."""
        return self.inputs is not None and bool(self.inputs.modules)

    @property
    def title(self) -> str:
        """The swept keys and their values."""
        return " ".join(f"{key}={value}" for key, value in self.own_values.items())

    @property
    def own_values(self) -> dict[str, Value]:
        """The values, and the seed where that is not swept."""
        return self.values if self.seed is None else {**self.values, SEED: self.seed}


def make_points(asked: Asked, axes: Sequence[Axis], flags: SweptFlags, num_seeds: int | None = 1) -> list[Point]:
    """Build the points, in order: the last axis varies fastest, then the seed.

    Args:
        asked: base of every point.
        axes: swept.
        flags: that can be swept.
        num_seeds: of each combination; None: `DRAWS` if its requests are drawn. 1 if the seed is swept.

    Raises:
        SettingsError: an unknown key, or a value that no point can have; names the key.
    """
    for axis in axes:
        head = axis.key.partition(".")[0]
        if flags.name_of(axis.key) is None and head not in Settings.model_fields:
            why = "no such setting, nor an option of a workload or a simulation"
            settings = known_settings(Settings)
            near = nearest_setting(flags.parameter_of(axis.key).split("."), settings)
            hint = f"; did you mean {near}?" if near and tuple(near.split(".")) in settings else ""
            raise SettingsError(f"--sweep {cut(axis.key)}: {why}{hint}")
    if any(flags.name_of(axis.key) == SEED for axis in axes):
        if num_seeds not in (None, 1):
            raise SettingsError(f"--seeds {num_seeds} and --sweep {SEED} both say which seeds there are; give one")
        num_seeds = 1
    _check_given_once(axes, asked[1], flags)
    maker = _RunMaker(asked, flags)
    points: list[Point] = []
    possible: set[tuple[str, str]] = set()
    errors: dict[tuple[str, str], str] = {}
    for indices in combinations(axes):
        chosen = [(axis.key, axis.texts[index]) for axis, index in zip(axes, indices, strict=True)]
        values = {axis.key: axis.values[index] for axis, index in zip(axes, indices, strict=True)}
        try:
            run = maker.make(chosen)
        except LorreryError as refusal:
            points.append(Point(values, refused=str(refusal)))
            for choice in chosen:
                errors.setdefault(choice, str(refusal))
        else:
            inputs = Inputs.of(_files(run), _plugins(run.settings))
            draws = (DRAWS if run.options.is_drawn else 1) if num_seeds is None else num_seeds
            for seed in range(run.options.seed, run.options.seed + draws):
                one = replace(run, options=replace(run.options, seed=seed))
                determined_by = _determined_by(one, inputs)
                point = Point(values, _hash(determined_by), one, determined_by=determined_by, inputs=inputs)
                points.append(point if draws == 1 else replace(point, seed=seed))
            possible.update(chosen)
            if len(points) > MOST_POINTS:
                raise SettingsError(f"--seeds {draws}: more than {MOST_POINTS:,} runs; sweep less, or take fewer seeds")
    _check_autoscaler(axes, points)
    impossible = {choice: error for choice, error in errors.items() if choice not in possible}
    if impossible:
        raise _blame(impossible, maker)
    return points


def _check_given_once(axes: Sequence[Axis], overrides: Sequence[str], flags: SweptFlags) -> None:
    """Refuse an option or `--set` that no point has, because a swept key replaces it."""
    swept: set[str] = set()
    for axis in axes:
        name = flags.name_of(axis.key)
        if (key := name or axis.key) in swept:
            raise SettingsError(f"--sweep {cut(axis.key)}: given twice; list all its values in one")
        swept.add(key)
        if name is None:
            given = next((f"--set {cut(one)}" for one in overrides if key_of(one) == key), None)
        else:
            given = flags.given(name)
        if given is not None:
            raise SettingsError(f"{given} and --sweep {cut(axis.key)} both say what {cut(key)} is; give one")


def _check_autoscaler(axes: Sequence[Axis], points: Sequence[Point]) -> None:
    """Refuse to sweep an autoscaler rule without any autoscaled point: it would draw a flat line."""
    runs = [point.run for point in points if point.run is not None]
    swept = next((axis.key for axis in axes if "autoscaler" in axis.key.split(".")[:-1]), None)
    if swept is not None and runs and not any(run.settings.is_autoscaled for run in runs):
        raise SettingsError(f"--sweep {cut(swept)} needs an autoscaler: add --autoscale")


class _RunMaker:
    """Applies a point's values to the base of all points."""

    def __init__(self, asked: Asked, flags: SweptFlags) -> None:
        self._config, self._overrides, self._options, self._simulation = asked
        self._flags = flags
        self._read_flag = cache(flags.read)
        self._read_settings = cache(self._settings)  # points that differ in options share their settings
        self._known_devices: set[str] = set()

    def make(self, chosen: Iterable[tuple[str, str]]) -> Run:
        """Build the run with some keys' values; the others are from the base.

        Raises:
            SettingsError: an invalid combination.
        """
        config, overrides = self._config, list(self._overrides)
        of_load: dict[str, Any] = {}
        of_simulation: dict[str, Any] = {}
        for key, text in chosen:
            name = self._flags.name_of(key)
            if name is None:
                overrides.append(f"{key}={text}")
                continue
            field, value = self._read_flag(name, text)
            if name == CONFIG:
                config = value
            elif self._flags.is_of_load(name):
                of_load[field] = value
            else:
                repeatable = isinstance(value, tuple)
                of_simulation[field] = (*getattr(self._simulation, field), *value) if repeatable else value
        options = replace(self._options, **of_load)
        option_rules.check(options)
        simulation = replace(self._simulation, **of_simulation)
        settings = self._read_settings(config, tuple(overrides))
        check_adapters(settings, options)
        check_routers(simulation.routers, simulation.shards or len(settings.router.schedulers))
        count = settings.num_worker_processes(simulation.workers)
        return Run(settings, options, replace(simulation, workers=count))

    def _settings(self, config: Path | None, overrides: tuple[str, ...]) -> Settings:
        settings = load(config, overrides)
        device = settings.model_dump_json(include=_OF_DEVICE)
        if device not in self._known_devices:
            for kind, _ in settings.kinds(1):
                deployment_of(kind)  # refuses names missing from the catalogue
            self._known_devices.add(device)
        return settings


def _blame(impossible: Mapping[tuple[str, str], str], maker: _RunMaker) -> SettingsError:
    """Return the error for the values that no point can have, naming one that is invalid alone if there is one."""
    (key, text), error = next(iter(impossible.items()))
    if set(impossible.values()) == {error}:
        try:
            maker.make([])
        except LorreryError as refusal:
            if str(refusal) == error:  # the base is invalid, whatever is swept
                return SettingsError(error)
    for choice in impossible:
        try:
            maker.make([choice])
        except LorreryError as refusal:
            (key, text), error = choice, str(refusal)
            break
    return SettingsError(f"--sweep {cut(key)}={cut(text)}: {error.removesuffix(' (--set)')}")


@cache
def code_digest() -> str:
    """Return a hash of the simulating program: another version may give other figures."""
    digest = hashlib.sha256(VERSION.encode())
    for room in ROOMS_OF_A_SIMULATION:
        folder = Path(lorrery.__path__[0]) / room
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(run: Run) -> Iterator[Path]:
    """Yield the files that settings and options name, including those in a plug-in's options."""
    own = run.settings.scheduler
    yield from _paths(run.settings.model_dump(exclude=_NO_MATTER))
    yield from _paths([getattr(run.options, field.name) for field in fields(run.options)])
    yield from named_files([own.policy_options, own.batching_options, own.placement_options])


def _paths(value: object) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _paths(part)


def _determined_by(run: Run, inputs: Inputs) -> dict[str, Any]:
    own = run.settings.scheduler
    in_options = named_files([own.policy_options, own.batching_options, own.placement_options])
    simulation = {field.name: getattr(run.simulation, field.name) for field in fields(run.simulation)}
    found: dict[str, Any] = _plain(
        {
            "lorrery_version": VERSION,
            "code_sha256": code_digest(),
            "plugins": {name: {"sha256": code} for name, (code, _) in inputs.modules.items()},
            "files_of_plugins": [inputs.files[str(path)] for path in in_options],
            "settings": run.settings.model_dump(exclude=_NO_MATTER),
            "options": {field.name: getattr(run.options, field.name) for field in fields(run.options)},
            "simulation": simulation | {"faults": [fault.text for fault in run.simulation.injected]},
        },
        inputs.files,
    )
    return found


def _plugins(settings: Settings) -> dict[str, Path | None]:
    """Return the files of plug-ins named in the settings, by dotted name; None: not found.

    The modules are imported, so that all processes forked from this one run the code that points are identified by,
    even if it is edited meanwhile.
    """
    own = settings.scheduler
    search_here()
    found: dict[str, Path | None] = {}
    for name in (own.policy, own.batching, own.placement):
        if isinstance(name, str) and ":" in name:
            module = name.partition(":")[0]
            with suppress(Exception):  # a point that needs it will report the error
                import_module(module)
            found |= plugin_files(module)
    return found


def _plain(value: object, digests: Mapping[str, str | None]) -> Any:  # noqa: ANN401  JSON's
    """Convert to JSON's types; a file is represented by its content, wherever it lies."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part, digests) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, digests) for part in value]
    if isinstance(value, Path):
        content = digests.get(str(value))
        return str(value) if content is None else {"sha256": content}  # the point reports that it is missing
    return value


def _hash(determined_by: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode()).hexdigest()[:32]
