"""What a simulation takes beside settings and workload: options of the cluster, and who observes the run.

`lorrery.simulate`, `lorrery.VirtualCluster`, the command `lorrery simulate` and its sweeps get their options from these
tables (`service.options`); a new option is one field, and the code that it changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.workload.arrays import Requests
from lorrery.scheduler.core.facts import Subscriber
from lorrery.service.faults.kinds import Fault, parse_fault
from lorrery.service.options import Option
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.arguments import read_faults
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.files import MAX_FRAMES, RECORD_FILE

__all__ = [
    "Observed",
    "Observers",
    "Overrides",
    "Progress",
    "Scenario",
    "SettingsLike",
    "SimulationOptions",
    "Watch",
    "WorkloadLike",
]

SettingsLike = Settings | Mapping[str, Any] | str | Path | None
"""A cluster: settings, the tables of a settings file, a file's path, or None: `$LORRERY_CONFIG`, else the defaults."""

Overrides = Mapping[str, object] | Iterable[str]
"""Single settings that override all: `{"scheduler.policy": "fcfs"}`, or `["scheduler.policy=fcfs"]` as for `--set`."""

WorkloadLike = LoadOptions | Mapping[str, Any] | Requests | None
"""What to play: the options of `lorrery load` (None: its defaults), or your own requests."""

_SIMULATION, _OUTPUT = "Simulation", "Output"


@dataclass(slots=True)
class Progress:
    """Progress of a run."""

    num_requests: int
    num_ended: int = 0
    simulated_seconds: float = 0.0


Watch = Callable[[Progress], None]
"""Called now and then with a run's progress."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation apart from settings and workload, all of which can be swept.

    The GPUs of the n-th worker process belong to scheduler n modulo the number of schedulers.
    """

    workers: Annotated[
        int | None,
        Option(
            "Number of worker processes, over all schedulers. Unset: as in [\\[workers]], else 2, or 1 if an"
            " engine is named or a process hosts several GPUs.",
            _SIMULATION,
            least=1,
        ),
    ] = None
    shards: Annotated[
        int | None, Option("Number of schedulers; unset: as many as in router.schedulers.", _SIMULATION, least=1)
    ] = None
    routers: Annotated[
        int,
        Option(
            "Number of routers, each choosing among several schedulers by its own view of them.", _SIMULATION, least=1
        ),
    ] = 1
    faults: Annotated[
        Iterable[str | Fault],
        Option(
            "Fault to inject, and when; repeatable. See below.",
            _SIMULATION,
            "FAULT",
            ("--fault",),
            parse=parse_fault,
            read=read_faults,
            repeatable=True,
            in_python="To inject, as for `--fault`: `worker_loss,at=30,worker=worker-1,for=10`.",
        ),
    ] = ()
    one_step: Annotated[
        bool,
        Option(
            "Decide before every step instead of skipping ahead: slower, same result.",
            _SIMULATION,
            names=("--one-step",),
        ),
    ] = False

    @property
    def injected(self) -> tuple[Fault, ...]:
        """The faults, read.

        Raises:
            SettingsError: an invalid one.
        """
        return read_faults("faults", self.faults)


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who observes a run, and where its record goes."""

    subscribers: Annotated[
        Sequence[Subscriber], "Of the run's facts, each called in the order of `scheduler.core.facts.Facts`."
    ] = ()
    on_end: Annotated[Callable[[SimulatedRequest], None] | None, "Called with each request as it ends."] = None
    watch: Annotated[Watch | None, "Called now and then with the run's progress."] = None
    record: Annotated[
        str | Path | None,
        Option(
            f"Record the frames that lorrery web shows; without FILE to DIR/{RECORD_FILE}.",
            _OUTPUT,
            "[FILE]",
            parse=str,
            in_python="A file for `lorrery web` to show; its frames are what a watcher would have seen.",
        ),
    ] = None
    metrics: Annotated[
        str | Path | None,
        Option(
            "Write the series of a scheduler's /metrics, as they are when the run ends.",
            _OUTPUT,
            "FILE",
            parse=str,
            in_python="A file for the series of a scheduler's `/metrics`, as they are when the run ends.",
        ),
    ] = None
    record_every: Annotated[
        float | None,
        Option(
            "Device seconds between two frames of the record, at least 0.001. Unset: at most"
            f" {MAX_FRAMES:,} frames in all.",
            _OUTPUT,
            "SECONDS",
        ),
    ] = None


@dataclass(frozen=True)
class Scenario(SimulationOptions):
    """A cluster and what it has to serve."""

    settings: Annotated[SettingsLike, "Of the cluster: an object, tables of a settings file, or a file's path."] = None
    workload: Annotated[WorkloadLike, "What to play, and how."] = None
    _: KW_ONLY
    requests: Annotated[
        Requests | None,
        "Your own; the options of `workload` (adapters, speed-up, concurrency, timeout, ...) apply to them.",
    ] = None
    overrides: Annotated[Overrides, "Single settings, which override `settings`."] = ()
    seed: Annotated[int | None, "Of every draw, from 0 to 2**32 - 1; None: the workload's."] = None


@dataclass(frozen=True)
class Observed(Scenario, Observers):
    """A scenario and who observes it: what `lorrery.simulate` takes."""
