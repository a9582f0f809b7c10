"""The report of a run: its figures, the table of its requests, and the conditions of the measurement.

`report_files` writes it.
"""

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from typing import Any

import numpy as np

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.source import BuiltWorkload
from lorrery.loadgen.workload import arrivals
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK, OutcomeTable
from lorrery.loadgen.workload.slora import SloraSummary, slora_summary
from lorrery.loadgen.workload.summary import Summary, summarise
from lorrery.service.linux import run_queue_delay_seconds
from lorrery.vocabulary.adapters import AdapterFigures, FiguresByAdapter

BUSY_SHARE = 0.8
"""CPU share of a core above which latencies are as much the client's as the cluster's."""

_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """The load generator's own load over a run: a client that is short of CPU measures itself.

    CPU share is process time (all threads, so above 1 is possible) / wall time. Run-queue delay is the time the event
    loop's thread was ready but had no core (`/proc/self/schedstat`, second field, nanoseconds; Linux only).

    Attributes:
        cpu_share: cores used, mean over the run.
        peak_cpu_share: the largest over any window of about a second; the mean if there was no such window.
        run_queue_delay_ratio: share of the wall time spent waiting for a core; None if the kernel does not report it.
    """

    wall_seconds: float
    cpu_share: float
    peak_cpu_share: float
    run_queue_delay_ratio: float | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks that the figures must be read with."""
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used {self.cpu_share:.0%} of a core: these latencies are partly its own;"
                " lower the rate, or split the load over several processes"
            )
        elif self.peak_cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used up to {self.peak_cpu_share:.0%} of a core in a second: the tail of these"
                " latencies may be its own"
            )
        if self.run_queue_delay_ratio is not None and self.run_queue_delay_ratio > 0.1:
            found.append(
                f"the load generator waited for a core {self.run_queue_delay_ratio:.0%} of the time: this machine is"
                " too busy to measure on"
            )
        return tuple(found)


class OwnLoadMeter:
    """Measures from its creation or `restart`; call `sample` now and then, from the event loop's thread."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start measuring anew from now."""
        self._wall = self._window_wall = time.monotonic()
        self._cpu = self._window_cpu = time.process_time()
        self._delay = run_queue_delay_seconds()
        self._peak = 0.0

    def sample(self) -> None:
        """Close the current window if it is a second old."""
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._window_wall >= _WINDOW_SECONDS:
            self._peak = max(self._peak, (cpu - self._window_cpu) / (wall - self._window_wall))
            self._window_wall, self._window_cpu = wall, cpu

    def read(self) -> OwnLoad:
        """Return the load since the start."""
        self.sample()
        wall = max(time.monotonic() - self._wall, 1e-9)
        share = (time.process_time() - self._cpu) / wall
        delay = run_queue_delay_seconds()
        ratio = None if delay is None or self._delay is None else (delay - self._delay) / wall
        return OwnLoad(wall, share, max(self._peak, share), ratio)


_COLUMNS = (
    "seconds",
    "ready",
    "starting",
    "draining",
    "desired",
    "recommended",
    "num_requests_waiting",
    "num_requests_running",
    "kv_cache_usage_perc",
)


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One decision with the state that it was based on; a row of the timeline.

    Attributes:
        seconds: since the start.
        group: group of workers; empty: there is only one.
        desired: replicas wanted from now on.
        recommended: by the metrics alone.
        values: of the metrics of all rules, in order; None: no value yet, or not a metric of this group's rule.
    """

    seconds: float
    ready: int
    starting: int
    draining: int
    desired: int
    recommended: int
    num_requests_waiting: int
    num_requests_running: int
    kv_cache_usage_perc: float
    values: tuple[float | None, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class ScalingSummary:
    """Summary of a whole run.

    Attributes:
        gpu_hours: device hours times GPUs, from each worker's start until it is gone, including its start-up and the
            end of its requests.
        replicas_mean: serving replicas, over time; `replicas_min` and `replicas_max` likewise.
        num_scale_ups: number of decisions for more workers.
        start_up_seconds: from a worker's start to its first plan; the longest of all groups.
        ttft_seconds: service level: time to the first token.
        tpot_seconds: service level: mean time per further token.
        good_ratio: share of all requests that met both; failed requests did not.
    """

    gpu_hours: float
    replicas_min: int
    replicas_mean: float
    replicas_max: int
    num_scale_ups: int
    num_scale_downs: int
    start_up_seconds: float
    ttft_seconds: float
    tpot_seconds: float
    good_ratio: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """An autoscaled run.

    Attributes:
        metrics: of the rule, in its order; with several groups' rules, each metric once.
        timeline: one row per decision.
    """

    summary: ScalingSummary
    metrics: tuple[str, ...]
    timeline: Sequence[ScalingRow]


def scaling_csv(scaling: Scaling) -> str:
    """Return the timeline, one line per decision; the rule's metrics follow as `metric:NAME`, per worker process.

    With several groups of workers, `group` comes last.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    groups = ("group",) * any(row.group for row in scaling.timeline)
    writer.writerow((*_COLUMNS, *(f"metric:{metric}" for metric in scaling.metrics), *groups))
    for row in scaling.timeline:
        figures = (getattr(row, name) for name in _COLUMNS)
        values = ("" if value is None else value for value in row.values)
        group = (getattr(row, name) for name in groups)
        writer.writerow([f"{one:.6g}" if isinstance(one, float) else one for one in (*figures, *values, *group)])
    return text.getvalue()


def scaling_lines(scaling: Scaling) -> list[tuple[str, str]]:
    """Return the most important figures, each with its label."""
    own = scaling.summary
    changes = f"{own.num_scale_ups:,} times up, {own.num_scale_downs:,} times down"
    used = (
        f"{own.gpu_hours:,.2f} GPU hours of workers that start, serve or drain; {own.replicas_min} to"
        f" {own.replicas_max} worker processes serve, {own.replicas_mean:.2f} on average; {changes}; a start takes"
        f" {own.start_up_seconds:.1f} s"
    )
    level = f"TTFT up to {own.ttft_seconds:g} s and TPOT up to {own.tpot_seconds * 1e3:g} ms"
    return [("scaling", used), ("", f"service level: {own.good_ratio:.2%} of requests with {level}")]


EXIT_OK, EXIT_FAILURES, EXIT_INTERRUPTED = 0, 1, 130
"""Exit codes of a run: every request completed, some failed, a signal ended it."""
_FIRST_FAILURES = 3
_MOST_DETAIL = 200
"""Characters of a failed request's message."""
UNSENT = "{} later turns were not sent, because a turn before them failed"
"""Notice for a run of sessions."""


@dataclass(frozen=True, slots=True)
class SimulationCost:
    """The cost of a simulated run.

    Attributes:
        cpu_seconds: of the simulation itself, without workload and report.
        simulated_seconds: device time from the first arrival to the last end.
        num_steps: steps of all workers.
        num_plans: plans that these steps belong to.
        num_workers: all of them.
        events: injected faults, in words.
    """

    cpu_seconds: float
    simulated_seconds: float
    num_steps: int
    num_plans: int
    num_workers: int
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A finished run, live or simulated.

    Attributes:
        started_at: UTC.
        own_load: for a live run.
        simulation: for a simulated one.
        wall_seconds: from the first send to the last end, wall time; for a simulated run as it would be live.
        num_skipped: requests dropped because the cluster's limits would refuse them.
        num_warmup_failed: warm-up requests that failed; they are in no figure.
        settings: of a simulated cluster, by section; None: unknown.
        notices: further remarks for the reader of the figures.
        scaling: of a simulated cluster with a varying number of workers; None: it was fixed.
        adapters: loads, evictions and stays during the run by adapter, those with any; None: unknown, or no adapters.
    """

    options: LoadOptions
    workload: BuiltWorkload
    cluster: ClusterView
    outcomes: OutcomeTable
    summary: Summary
    slora: SloraSummary
    own_load: OwnLoad | None
    simulation: SimulationCost | None
    started_at: datetime
    wall_seconds: float
    interrupted: bool
    num_skipped: int
    num_warmup_failed: int
    settings: Mapping[str, Any] | None = None
    notices: tuple[str, ...] = ()
    scaling: Scaling | None = None
    adapters: FiguresByAdapter | None = None

    @property
    def adapter_total(self) -> AdapterFigures:
        """The figures of all adapters together."""
        return AdapterFigures.total((self.adapters or {}).values())

    @property
    def exit_code(self) -> int:
        """Exit code of the command that made the run."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILURES if self.summary.num_failed else EXIT_OK

    @property
    def failures(self) -> tuple[str, ...]:
        """The most frequent failure statuses, each with the first message that came with it."""
        found = []
        counts = {status: count for status, count in self.summary.by_status.items() if status not in (OK, INTERRUPTED)}
        for status, count in sorted(counts.items(), key=lambda entry: -entry[1])[:_FIRST_FAILURES]:
            row = self.outcomes.status.index(status)
            detail = self.outcomes.detail.get(row, "")
            detail = f", request {self.outcomes.index[row]}: {detail[:_MOST_DETAIL]}" if detail else ""
            found.append(f"{count:,} x {status}{detail}")
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks that the figures must be read with."""
        found = list(self.own_load.warnings) if self.own_load is not None else []
        if self.interrupted:
            found.append(f"interrupted: {self.summary.num_interrupted} open requests were cut off")
        if self.num_skipped:
            found.append(f"{self.num_skipped} requests are longer than the cluster's limits and were left out")
        if self.num_warmup_failed:
            found.append(f"{self.num_warmup_failed} warm-up requests failed")
        if (too_long := self._too_long()) is not None:
            found.append(too_long)
        return (*found, *self.notices)

    def _too_long(self) -> str | None:
        """Describe how many sent requests exceed the cluster's limits, and what to do about it."""
        input_len, total_len = self.cluster.max_req_input_len, self.cluster.max_req_total_len
        if input_len is None or total_len is None or not self.summary.num_failed:
            return None
        requests = self.workload.requests
        num_too_long = len(requests) - len(arrivals.fitting(requests, input_len, total_len))
        if not num_too_long:
            return None
        longest_input = max(request.prompt_tokens for request in requests)
        longest_total = max(request.prompt_tokens + request.output_tokens for request in requests)
        return (
            f"{num_too_long} of {len(requests)} requests are longer than the cluster takes"
            f" (scheduler.max_req_input_len {input_len}, max_req_total_len {total_len}): leave them out with"
            f" --skip-too-long, or raise these and batch_max_tokens; the longest prompt has {longest_input} tokens,"
            f" the longest request {longest_total}"
        )


def make_report(
    options: LoadOptions,
    workload: BuiltWorkload,
    cluster: ClusterView,
    outcomes: OutcomeTable,
    *,
    own_load: OwnLoad | None = None,
    simulation: SimulationCost | None = None,
    started_at: datetime,
    interrupted: bool = False,
    num_skipped: int = 0,
    num_warmup_failed: int = 0,
    settings: Mapping[str, Any] | None = None,
    notices: tuple[str, ...] = (),
    scaling: Scaling | None = None,
    adapters: FiguresByAdapter | None = None,
) -> LoadReport:
    """Compute the figures of a run."""
    summary = summarise(outcomes)
    return LoadReport(
        options=options,
        workload=workload,
        cluster=cluster,
        outcomes=outcomes,
        summary=summary,
        slora=_slora_figures(outcomes, summary.duration_seconds),
        own_load=own_load,
        simulation=simulation,
        started_at=started_at,
        wall_seconds=summary.duration_seconds * cluster.time_scale,
        interrupted=interrupted,
        num_skipped=num_skipped,
        num_warmup_failed=num_warmup_failed,
        settings=settings,
        notices=notices,
        scaling=scaling,
        adapters=adapters,
    )


def _slora_figures(table: OutcomeTable, duration_seconds: float) -> SloraSummary:
    # S-LoRA's clock starts at the real send, and its rate is the offered one.
    firsts = np.where(table.ok, table.first_token_seconds - table.sent_seconds, np.nan)
    rows = np.column_stack((table.prompt_tokens, table.output_tokens, table.end_seconds - table.sent_seconds, firsts))
    span = float(table.intended_seconds.max(initial=0.0))
    return slora_summary(rows, duration_seconds, req_rate=len(table) / span if span > 0 else 0.0)
