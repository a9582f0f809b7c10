"""`lorrery.simulate`: a simulation from Python. docs/python.md shows its use.

The command `lorrery simulate` makes its run here too, so both give the same requests, byte for byte.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorrery.loadgen import option_rules
from lorrery.loadgen.option_texts import DEFAULT_WORKLOAD
from lorrery.loadgen.options import GIVEN, OF_TARGET, OPTIONS, PARSERS, LoadOptions, workload_of
from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import Fault
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import check_writable
from lorrery.service.settings.cluster import Settings, changed, load
from lorrery.service.settings.reading import key_of
from lorrery.simulator.arguments import (
    check_callable,
    read_faults,
    read_flag,
    read_options,
    read_overrides,
    read_path,
    read_positive,
    read_texts,
    read_whole,
    shown,
)
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.result import SimulationResult
from lorrery.simulator.run import SimulatedRun, SimulationOptions, Watch
from lorrery.simulator.step_span import Observer
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = ["Overrides", "SettingsLike", "WorkloadLike", "prepare", "read_settings", "simulate"]

SettingsLike = Settings | Mapping[str, Any] | str | Path | None
"""A cluster: settings, the tables of a settings file, a file's path, or None: `$LORRERY_CONFIG`, else the defaults."""

Overrides = Mapping[str, object] | Iterable[str]
"""Single settings that override all: `{"scheduler.policy": "fcfs"}`, or `["scheduler.policy=fcfs"]` as for `--set`."""

LEAST_EVERY_SECONDS = 0.001
"""Least device seconds between two frames of a record: each frame stays in memory until the run ends."""

WorkloadLike = LoadOptions | Mapping[str, Any] | Requests | None
"""What to play: the options of `lorrery load` (None: its defaults), or your own requests."""


def simulate(
    settings: SettingsLike = None,
    workload: WorkloadLike = None,
    *,
    requests: Requests | None = None,
    overrides: Overrides = (),
    workers: int | None = None,
    shards: int | None = None,
    routers: int = 1,
    faults: Iterable[str | Fault] = (),
    seed: int | None = None,
    one_step: bool = False,
    observers: Sequence[Observer] = (),
    on_end: Callable[[SimulatedRequest], None] | None = None,
    watch: Watch | None = None,
    record: str | Path | None = None,
    record_every: float | None = None,
) -> SimulationResult:
    """Run a cluster under a virtual clock.

    Args:
        settings: of the cluster.
        workload: what to play, and how.
        requests: your own; the options of `workload` (adapters, speed-up, concurrency, timeout, ...) apply to them.
        overrides: single settings, which override `settings`.
        workers: worker processes of all schedulers together; None: as the settings' `[[workers]]` say, else 2, or 1
            where the settings name an engine.
        shards: schedulers; None: as many as `router.schedulers` names.
        routers: routers that choose among several schedulers, each by its own view.
        faults: as for `--fault`: `worker_loss,at=30,worker=worker-1,for=10`.
        seed: of every draw, from 0 to 2**32 - 1; None: the workload's.
        one_step: plan before every step instead of jumping: slow, same result.
        observers: receive the steps that run.
        on_end: called with each request as it ends.
        watch: called now and then with the run's progress.
        record: a file for `lorrery web` to show; its frames are what a watcher would have seen.
        record_every: device seconds between two frames, at least 0.001; None: an interval that gives at most 2,000.

    Raises:
        LorreryError: invalid settings or options, an unreadable trace, or a record that cannot be written.
    """
    run = prepare(
        settings,
        workload,
        requests=requests,
        overrides=overrides,
        workers=workers,
        shards=shards,
        routers=routers,
        faults=faults,
        seed=seed,
        one_step=one_step,
    )
    check_callable("on_end", on_end)
    check_callable("watch", watch)
    if isinstance(observers, str) or not isinstance(observers, Iterable):
        raise SettingsError(f"observers is {shown(observers)}; expected a list of them")
    run.observers, run.on_end, run.watch = tuple(observers), on_end, watch
    run.record, run.record_every = checked_record(record, record_every)
    return SimulationResult(run.run())


def prepare(
    settings: SettingsLike = None,
    workload: WorkloadLike = None,
    *,
    requests: Requests | None = None,
    overrides: Overrides = (),
    workers: int | None = None,
    shards: int | None = None,
    routers: int = 1,
    faults: Iterable[str | Fault] = (),
    seed: int | None = None,
    one_step: bool = False,
) -> SimulatedRun:
    """Prepare a run without starting it, for a caller that watches and stops it; the arguments are those of `simulate`.

    Raises:
        LorreryError: invalid settings or options.
    """
    workers = None if workers is None else read_whole("workers", workers, 1)
    shards = None if shards is None else read_whole("shards", shards, 1)
    seed = None if seed is None else read_whole("seed", seed, 0)
    routers = read_whole("routers", routers, 1)
    parsed = read_faults(faults)
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
    one_step = read_flag("one_step", one_step)
    simulation = SimulationOptions(workers, shards, routers, parsed, one_step)
    overrides = read_overrides(overrides)
    read = read_settings(settings, overrides)
    return SimulatedRun(read, options, simulation, requests, notices=_in_vain(read, overrides))


def checked_record(record: str | Path | None, every_seconds: float | None) -> tuple[Path | None, float | None]:
    """Check where a record goes and the interval of its frames; return both.

    Raises:
        SettingsError: it cannot be written there, or the interval is too short.
    """
    if every_seconds is not None:
        every_seconds = read_positive("record_every", every_seconds)
        if not LEAST_EVERY_SECONDS <= every_seconds <= LAST_SECONDS:
            raise SettingsError(
                f"record_every is {every_seconds:g} s; it must be {LEAST_EVERY_SECONDS:g} to {LAST_SECONDS:,} s; leave"
                " it out for as many frames as a page can use"
            )
    if record is None:
        if every_seconds is not None:
            raise SettingsError("record_every without record: name the file to write")
        return None, None
    path = read_path("record", record)
    check_writable("record", path)
    return path, every_seconds


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
