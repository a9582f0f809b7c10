"""`lorrery.simulate`: a simulation from Python. docs/simulator.md shows its use.

The command `lorrery simulate` makes its run here too, so both give the same requests, byte for byte.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorrery.loadgen import option_rules
from lorrery.loadgen.option_texts import DEFAULT_WORKLOAD
from lorrery.loadgen.options import GIVEN, OF_TARGET, OPTIONS, PARSERS, LoadOptions, workload_of
from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import check_writable
from lorrery.service.options import arguments_of, part_of
from lorrery.service.settings.cluster import Settings, changed, load
from lorrery.service.settings.reading import key_of
from lorrery.simulator.arguments import (
    check_callable,
    read_options,
    read_overrides,
    read_path,
    read_positive,
    read_table,
    read_texts,
    read_whole,
    shown,
)
from lorrery.simulator.options import Observed, Observers, Overrides, Scenario, SettingsLike, SimulationOptions
from lorrery.simulator.result import SimulationResult
from lorrery.simulator.run import SimulatedRun
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = ["checked_observers", "prepare", "read_settings", "simulate"]

LEAST_EVERY_SECONDS = 0.001
"""Least device seconds between two frames of a record: each frame stays in memory until the run ends."""


@arguments_of(Observed)
def simulate(asked: Observed) -> SimulationResult:
    """Run a cluster under a virtual clock.

    Raises:
        LorreryError: invalid settings or options, an unreadable trace, or a file that cannot be written.
    """
    run = prepare(asked)
    run.observers = checked_observers(part_of(Observers, asked))
    return SimulationResult(run.run())


def prepare(scenario: Scenario) -> SimulatedRun:
    """Prepare a run without starting it, for a caller that watches and stops it.

    Raises:
        LorreryError: invalid settings or options.
    """
    simulation = read_table(part_of(SimulationOptions, scenario))
    seed = None if scenario.seed is None else read_whole("seed", scenario.seed, 0)
    workload, requests = scenario.workload, scenario.requests
    if isinstance(workload, Requests):
        if requests is not None:
            raise SettingsError("requests are given twice: as workload and as requests")
        workload, requests = None, workload
    options = workload if isinstance(workload, LoadOptions) else _options({} if workload is None else workload)
    if requests is not None:
        if not isinstance(requests, Requests):
            raise SettingsError(f"requests is {shown(requests)}; it must be lorrery.Requests(...)")
        if options.workload != DEFAULT_WORKLOAD or options.trace is not None:
            raise SettingsError(f"your own requests do not go with the workload {options.workload!r}")
        options = replace(options, workload=GIVEN)
    if seed is not None:
        options = replace(options, seed=seed)
    options = read_options(options)
    option_rules.check(options)
    overrides = read_overrides(scenario.overrides)
    read = read_settings(scenario.settings, overrides)
    return SimulatedRun(read, options, simulation, requests, notices=_in_vain(read, overrides))


def checked_observers(observers: Observers) -> Observers:
    """Check callbacks, where files go, and the interval of a record's frames.

    Raises:
        SettingsError: none that can be called, a file that cannot be written there, or too short an interval.
    """
    check_callable("on_end", observers.on_end)
    check_callable("watch", observers.watch)
    subscribers, record, every_seconds = observers.subscribers, observers.record, observers.record_every
    if isinstance(subscribers, str) or not isinstance(subscribers, Iterable):
        raise SettingsError(f"subscribers is {shown(subscribers)}; expected a list of them")
    if every_seconds is not None:
        every_seconds = read_positive("record_every", every_seconds)
        if not LEAST_EVERY_SECONDS <= every_seconds <= LAST_SECONDS:
            raise SettingsError(
                f"record_every is {every_seconds:g} s; it must be {LEAST_EVERY_SECONDS:g} to {LAST_SECONDS:,} s; leave"
                " it out for as many frames as a page can use"
            )
        if record is None:
            raise SettingsError("record_every without record: name the file to write")
    if record is not None:
        record = read_path("record", record)
        check_writable("record", record)
    metrics = observers.metrics
    if metrics is not None:
        metrics = read_path("metrics", metrics)
        check_writable("metrics", metrics)
    return replace(
        observers, subscribers=tuple(subscribers), record=record, record_every=every_seconds, metrics=metrics
    )


def read_settings(settings: SettingsLike = None, overrides: Overrides = ()) -> Settings:
    """Return the effective settings; a file is read as commands read it, environment included.

    Raises:
        SettingsError: an unreadable file, an unknown key or an invalid value.
    """
    overrides = read_overrides(overrides)
    if isinstance(settings, Settings | Mapping):
        return changed(settings, overrides)
    if settings is not None and not isinstance(settings, str | Path):
        raise SettingsError(f"settings is {shown(settings)}; expected Settings, tables, the path of a file, or None")
    path = Path(settings) if settings is not None else _default_path()
    if isinstance(overrides, Mapping):
        return changed(load(path), overrides)
    return load(path, overrides)


def _in_vain(settings: Settings, overrides: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """Return a notice if an override sets the limit on running requests that is not in force."""
    keys = set(map(key_of, overrides))
    own = settings.scheduler
    other = {"running_max_req_size": "max_num_seqs", "max_num_seqs": "running_max_req_size"}[own.max_running_setting]
    if f"scheduler.{other}" not in keys:
        return ()
    whose = "limits" if own.limits is not None else "policy"
    family, name = ("vllm", "vLLM") if other == "max_num_seqs" else ("slora", "S-LoRA")
    told = (
        f"scheduler.{other} = {getattr(own, other)} plays no part: it is {name}'s limit, and under"
        f" scheduler.{whose} = {getattr(own, whose)!r} it is scheduler.{own.max_running_setting} ="
        f" {own.max_running} that counts; set that one, or scheduler.limits = {family!r}"
    )
    return (told,)


def _default_path() -> Path:
    named = os.environ.get("LORRERY_CONFIG")
    return Path(named) if named else DEFAULT_SETTINGS


def _options(given: Mapping[str, Any]) -> LoadOptions:
    """Read options by name, with values as on the command line or as in `LoadOptions`."""
    if not isinstance(given, Mapping):
        raise SettingsError(f"workload is {shown(given)}; expected options by name, LoadOptions, Requests, or None")
    values = {"workload": workload_of(given.get("trace")), **given}
    for name in values:
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS.keys() - set(OF_TARGET)))
            raise SettingsError(f"workload: no option {name!r}; there are {known}")
    read_texts(values)
    for name, parse in PARSERS.items():
        value = values.get(name)
        if isinstance(value, str | int):
            values[name] = parse(str(value))
        elif isinstance(value, Sequence):
            values[name] = tuple(value)
    return LoadOptions(**values)
