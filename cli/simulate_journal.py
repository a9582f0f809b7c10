"""`lorrery simulate --journal FILE`: replay what a live scheduler noted; does the simulator arrive at the same?"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from lorrery.chassis.errors import FormatError, SettingsError
from lorrery.chassis.settings import Settings
from lorrery.chassis.version import VERSION
from lorrery.scheduler.core.record import Record
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.simulator.journal import Journal, read_journal
from lorrery.simulator.replay import Replayed, ReplayParts, replay
from lorrery.worker.build import device_of, length_model_of, slow_spells_of
from lorrery.worker.device.gpu import MockGpu

EQUAL, DIFFERENT = 0, 1


def replay_journal(path: Path, console: Console) -> int:
    """Replay a journal and print what was compared; return the exit code: 0 if all is equal, 1 if not.

    Raises:
        FormatError: it cannot be read, or is no journal.
        SettingsError: its settings cannot be met here, such as a file they name that is not there.
    """
    journal = read_journal(path)
    result = replay(journal, parts_of(journal, path))
    _print(path, journal, result, console)
    return DIFFERENT if result.differences else EQUAL


def parts_of(journal: Journal, path: Path) -> ReplayParts:
    """Build what a replay needs from the journal's settings.

    Raises:
        FormatError: they are none that this version knows.
        SettingsError: they cannot be met here.
    """
    settings = _settings(journal.settings, path)
    factory = ReplicaFactory(settings)
    adapters = {name: factory.adapter(name, rank) for name, rank in settings.adapters.expand()}

    def make_replica(hello: Record, faults_from_ps: int) -> Replica:
        factory.begin_faults(faults_from_ps)
        return factory.replica(factory.replica_settings(WorkerHello(**hello)))

    def make_gpu(hello: Record) -> MockGpu:
        announced = {
            "gpu": hello["gpu"],
            "tensor_parallel": hello["tensor_parallel"],
            "step_time": hello["step_time_model"],
        }
        own = _settings(journal.settings | {"worker": journal.settings["worker"] | announced}, path)
        device = device_of(own)
        if device.pool_tokens != hello["max_total_token_num"]:
            raise SettingsError(
                f"{path}: worker {hello['worker_id']} announced {hello['max_total_token_num']} KV tokens, and has"
                f" {device.pool_tokens} by the scheduler's settings: it ran with others (worker.weight_dtype, ...)"
            )
        return MockGpu(device.step_time)

    output = settings.worker.output
    return ReplayParts(
        make_replica=make_replica,
        make_gpu=make_gpu,
        slow_spells=lambda hello, from_ps: slow_spells_of(settings, hello["worker_id"], from_ps),
        make_adapter=factory.adapter,
        adapters=adapters,
        model=device_of(settings).deployment.model.name,
        length_model=length_model_of(output),
        echo=output.mode == "echo",
    )


def _settings(content: dict[str, Any], path: Path) -> Settings:
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{path}: the journal's settings: {key}: {first['msg']}") from None


def _print(path: Path, journal: Journal, result: Replayed, console: Console) -> None:
    if journal.version != VERSION:
        console.print(f"{path} was written by lorrery {journal.version}; this is {VERSION}", highlight=False)
    if journal.cut_line is not None:
        console.print(f"{path}:{journal.cut_line}: the line is cut off and is left out", highlight=False)
    if not journal.complete:
        console.print(
            f"{path} has no end: the scheduler runs, or was killed; compared is what it had flushed", highlight=False
        )
    console.print(
        f"compared {result.num_requests} requests, {result.num_plans} plans, {result.num_steps} steps and"
        f" {result.num_tokens} tokens on {result.num_workers} workers",
        highlight=False,
    )
    console.print(
        f"given: {result.num_requests} arrivals, {result.num_cancels} cancels, {result.num_late} of them late;"
        f" {result.num_gaps} gaps; {result.num_lost} workers that left",
        highlight=False,
    )
    if not result.differences:
        console.print("equal: every batch, every time and every token", highlight=False)
    for line, what in result.differences:
        console.print(f"{path}:{line}: {what}", style="red", highlight=False, markup=False)
