"""`lorrery.counterfactual`: the recorded traffic of a live cluster under other settings, compared request by request.

The journal of a scheduler has its settings, its workers and its requests (`replay.traffic`); what is asked for changes
the settings or the workers. Where nothing changes, the journal is replayed instead, to the picosecond. The command
`lorrery simulate --journal` prepares its runs here too. docs/simulator.md says what follows the traffic.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TextIO

from lorrery.loadgen.options import GIVEN, LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.report import LoadReport, make_report
from lorrery.loadgen.report_files import write_report
from lorrery.loadgen.source import BuiltWorkload
from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole
from lorrery.service.installed import VERSION
from lorrery.service.options import arguments_of, part_of
from lorrery.service.settings.cluster import Settings, changed
from lorrery.simulator.arguments import read_overrides, read_path, read_table
from lorrery.simulator.interface import checked_observers
from lorrery.simulator.options import Observers, Overrides, SimulationOptions
from lorrery.simulator.paired import PairedDifference, paired, write_differences, write_paired
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.simulator.replay.traffic import Traffic, read_traffic
from lorrery.simulator.result import SimulationResult
from lorrery.simulator.run import SHOWN_SETTINGS, SimulatedRun
from lorrery.vocabulary.files import DIFFERENCES_FILE, PAIRED_FILE, RECORDED_FOLDER, count_kinds
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = ["Counterfactual", "Prepared", "counterfactual", "prepare_counterfactual"]


@dataclass(frozen=True)
class AskedOf(SimulationOptions, Observers):
    """A journal, and what is to be different; without a difference it is replayed."""

    journal: Annotated[str | Path, "Of a live scheduler (`scheduler.journal`)."]
    _: KW_ONLY
    overrides: Annotated[Overrides, "Single settings, which override the journal's."] = ()


@arguments_of(AskedOf)
def counterfactual(asked: AskedOf) -> "Counterfactual":
    """Play the recorded traffic of a live cluster under other settings.

    `workers` counts workers, with a GPU or a tensor-parallel group each; unset: those of the journal, which come and go
    as they did.

    Raises:
        LorreryError: an unreadable journal, invalid settings or options, or a journal that does not replay though
            nothing was changed.
    """
    prepared = prepare_counterfactual(asked)
    if prepared.run is None:
        if differences := prepared.replay().differences:
            raise LorreryError("{}:{}: {}".format(prepared.path, *differences[0]))
        return prepared.unchanged()
    prepared.run.observers = checked_observers(part_of(Observers, asked))
    return prepared.result(prepared.run.run())


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """Recorded traffic, and what other settings would have made of it.

    Attributes:
        recorded: the live run as its scheduler saw it, without the network.
        simulated: the same requests, in the same order.
        request_ids: of each.
    """

    recorded: SimulationResult
    simulated: SimulationResult
    request_ids: tuple[str, ...]

    @cached_property
    def differences(self) -> tuple[PairedDifference, ...]:
        """Mean differences of TTFT, TPOT and E2E: of all requests, and by tenant and by adapter."""
        return paired(self.recorded.report.outcomes, self.simulated.report.outcomes)

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the simulation's files, `paired.csv`, `differences.csv`, and the recorded run's files to `recorded`.

        Raises:
            LorreryError: they cannot be written.
        """
        folder = read_path("folder", folder)
        return (*write_report(self.simulated.report, folder), *self.write_beside(folder))

    def write_beside(self, folder: Path) -> tuple[Path, ...]:
        """Write all but the simulation's own files.

        Raises:
            LorreryError: as `write`.
        """
        live, simulated = self.recorded.report.outcomes, self.simulated.report.outcomes
        written = list(write_report(self.recorded.report, folder / RECORDED_FOLDER))
        for name, write in (
            (PAIRED_FILE, lambda file: write_paired(live, simulated, self.request_ids, file)),
            (DIFFERENCES_FILE, lambda file: write_differences(self.differences, file)),
        ):
            written.append(folder / name)
            _write(written[-1], write)
        return tuple(written)


def _write(path: Path, write: Callable[[TextIO], None]) -> None:
    text = io.StringIO()
    write(text)
    try:
        write_whole(path, text.getvalue().encode())
    except OSError as error:
        raise LorreryError(f"report: {path}: {error.strerror}") from None


@dataclass(frozen=True)
class Prepared:
    """A counterfactual that has not run.

    Attributes:
        path: of the journal.
        run: under the changed settings; None: nothing is changed.
    """

    path: Path
    traffic: Traffic
    run: SimulatedRun | None

    def replay(self) -> Replayed:
        """Replay the journal.

        Raises:
            LorreryError: it cannot be, such as one whose files are gone.
        """
        journal = read_journal(self.path)
        return replay(journal, parts_of(journal, self.path))

    def unchanged(self) -> Counterfactual:
        """Return the result of a replay without a difference: the recorded run is the simulated one."""
        recorded = self._recorded()
        return Counterfactual(SimulationResult(recorded), SimulationResult(recorded), self._request_ids)

    def result(self, report: LoadReport) -> Counterfactual:
        """Return the result of the run, whose report this is."""
        recorded = self._recorded()
        workload = replace(report.workload, notes=recorded.workload.notes)
        simulated = replace(report, workload=workload)
        return Counterfactual(SimulationResult(recorded), SimulationResult(simulated), self._request_ids)

    @property
    def _request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.traffic.requests)

    def _recorded(self) -> LoadReport:
        traffic = self.traffic
        own = traffic.settings.scheduler
        view = ClusterView(
            model=traffic.settings.model,
            time_scale=traffic.settings.time_scale,
            num_shards=1,
            num_connected_shards=1,
            max_req_input_len=own.max_req_input_len,
            max_req_total_len=own.max_req_total_len,
            workers=count_kinds((kind["gpu"], kind["tensor_parallel"]) for kind in traffic.kinds),
        )
        rows = traffic.workload().rows()
        workload = BuiltWorkload(rows, "", (f"{self.path.name}: the journal of a live scheduler",))
        settings = traffic.settings.model_dump(mode="json", include=SHOWN_SETTINGS)
        return make_report(
            _options(traffic), workload, view, traffic.outcomes(), started_at=datetime.now(UTC), settings=settings
        )


def _options(traffic: Traffic) -> LoadOptions:
    return LoadOptions(workload=GIVEN, timeout=LAST_SECONDS * traffic.settings.time_scale)


def prepare_counterfactual(asked: AskedOf) -> Prepared:
    """Read a journal and change what is asked for.

    Raises:
        LorreryError: an unreadable journal, or invalid settings or options.
    """
    path = read_path("journal", asked.journal)
    options = read_table(part_of(SimulationOptions, asked))
    overrides = read_overrides(asked.overrides)
    traffic = read_traffic(path)
    tables = _cluster(traffic)
    live = changed(tables)
    settings = changed(tables, overrides)
    num_workers = len(traffic.kinds)
    same_workers = options.workers in (None, num_workers) and options.shards in (None, 1) and not settings.is_autoscaled
    same_workers = same_workers and (settings.workers, settings.worker.gpus) == (live.workers, live.worker.gpus)
    if same_workers and settings == live and not options.injected:
        return Prepared(path, traffic, None)
    notices = _notices(traffic, settings)
    if not same_workers:
        traffic.changes = []
        num_workers = traffic.num_at_first
    if options.workers is None and not settings.workers:
        options = replace(options, workers=num_workers)
    run = SimulatedRun(settings, _options(traffic), options, traffic.workload(), notices=notices, player=traffic.play)
    return Prepared(path, traffic, run)


def _cluster(traffic: Traffic) -> dict[str, Any]:
    """Return the tables of the journal's cluster, with its workers and the adapters loaded at run time."""
    content = traffic.content
    worker = {**content["worker"], "gpus": 1, **traffic.kinds[0]}
    groups: list[dict[str, Any]] = []
    for kind in traffic.kinds:
        own = {key: value for key, value in kind.items() if value != worker.get(key)}
        if groups and own == {key: value for key, value in groups[-1].items() if key != "count"}:
            groups[-1]["count"] += 1
        else:
            groups.append({"count": 1, **own})
    known = {name for name, _ in traffic.settings.adapters.expand()}
    loaded = [{"id": name, "rank": rank} for name, rank in traffic.adapters.items() if name not in known]
    registry = [*content["adapters"]["registry"], *loaded]
    return {
        **content,
        "worker": worker,
        "adapters": {**content["adapters"], "registry": registry},
        **({"workers": groups} if len(groups) > 1 else {}),
    }


def _notices(traffic: Traffic, settings: Settings) -> tuple[str, ...]:
    return tuple(_found(traffic, settings))


def _found(traffic: Traffic, settings: Settings) -> Iterable[str]:
    journal, left_out = traffic.journal, traffic.left_out
    if journal.version != VERSION:
        yield f"the journal was written by lorrery {journal.version}; this is {VERSION}"
    if not journal.complete:
        yield "the journal has no end: the scheduler runs, or was killed; played is what it had flushed"
    if left_out["refused"]:
        yield (
            f"left out: {left_out['refused']:,} requests that were refused on arrival, whose lengths no journal has;"
            " limits that would have accepted them are not charged for them"
        )
    if left_out["faults"]:
        yield f"left out: {left_out['faults']:,} changes of faults by an operator; --fault injects them again"
    if left_out["load"]:
        yield f"left out: {left_out['load']:,} loads of adapters by an operator"
    if settings.scheduler.prefix_cache.kind != "none" and not traffic.has_prompts:
        yield ("the journal has no prompts, since its scheduler had no prefix cache: no prompt is found in the cache")
