"""Counts finished steps in the metrics, in batches.

Counting a step updates several counters and histograms and evaluates the step-time formula again. While a worker sleeps
until the next step ends, other processes evict its cache lines, so the first step counted after a sleep costs several
times what the second one does. Each finished step is therefore kept as one record, and records are counted together
when nothing is urgent: after `COUNT_AFTER` of them, at a heartbeat, and at the end of a plan. The metrics may lag
behind what the scheduler knows by that much.

Most steps decode the same sequences as the step before. Such a run is counted at little more than the cost of one step:
if the durations of its steps grow evenly, so does each part of them, and the first and the last step give the sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lorrery.service.faults.kinds import SLOW_WORKER
from lorrery.worker.device.batch import Batch, PrefillWork, StepOutcome
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.steptime import Spells
from lorrery.worker.metrics import WorkerMetrics

COUNT_AFTER = 64
"""Steps kept before they are counted, about one second's worth."""


class StepRecord(NamedTuple):
    """A finished step.

    Attributes:
        batch: what the step computed.
        prefills: prefill chunks of its plan; the batch of a later step has none of them.
        outcome: tokens and finishes of the step.
        gap_ps: time between the previous boundary and the start of the step.
        start_ps: start of the step.
        end_ps: end of the step.
        actual_ps: duration by the wall clock, in device time.
        lag_seconds: wall seconds between the end of the step and the moment the worker noticed it.
    """

    batch: Batch
    prefills: tuple[PrefillWork, ...]
    outcome: StepOutcome
    gap_ps: int
    start_ps: int
    end_ps: int
    actual_ps: int
    lag_seconds: float


class StepAccounts:
    """Steps of one GPU that are not counted yet.

    Args:
        gpu: the GPU that runs the steps.
        metrics: where steps are counted.
        spells: times at which steps take longer; count all finished steps before replacing it.

    Attributes:
        due: whether enough steps are recorded to count them.
    """

    def __init__(self, gpu: MockGpu, metrics: WorkerMetrics, spells: Spells) -> None:
        self._gpu, self._metrics = gpu, metrics
        self.spells = spells
        self._records: list[StepRecord] = []
        self.due = False

    def ended(self, record: StepRecord, *, last: bool) -> None:
        """Record a finished step; the last step of a plan makes all recorded steps due for counting."""
        self._records.append(record)
        if last or len(self._records) >= COUNT_AFTER:
            self.due = True

    def count(self) -> None:
        """Count all recorded steps, and set the gauges to what is on the device now."""
        self.due = False
        records, self._records = self._records, []
        for run in _runs(records):
            if len(run) == 1 or self.spells.slows or not self._count_run(run):
                for record in run:
                    self._count(record)
        self._metrics.hold(len(self._gpu), self._gpu.kv_tokens)

    def _count_run(self, run: Sequence[StepRecord]) -> bool:
        """Count a run of steps at once if their durations grow evenly; return whether they do."""
        batch, num_steps = run[0].batch, len(run)
        first, last = self._gpu.step_cost(batch), self._gpu.step_cost(run[-1].batch)
        modelled_ps = [record.end_ps - record.start_ps for record in run]
        if 2 * sum(modelled_ps) != num_steps * (first.total_ps + last.total_ps):
            return False
        self._metrics.decodes_done(
            batch.num_decodes,
            first.plus_up_to(last, num_steps),
            modelled_ps,
            [record.actual_ps for record in run],
            [record.gap_ps for record in run],
            [record.lag_seconds for record in run],
        )
        return True

    def _count(self, record: StepRecord) -> None:
        cost = self._gpu.step_cost(record.batch)
        slow_ps = self.spells.stretch(cost.total_ps, record.start_ps - record.gap_ps) - cost.total_ps
        if slow_ps:
            self._metrics.fault(SLOW_WORKER)
            cost = replace(cost, whole=cost.whole + slow_ps)
        num_sampled = num_joined = 0
        if record.prefills and record.batch.prefills:
            finished = {handle for handle, _ in record.outcome.finished}
            sampled = [work.handle for work in record.prefills if work.samples]
            num_sampled, num_joined = len(sampled), sum(handle not in finished for handle in sampled)
        self._metrics.step_done(
            record.batch,
            cost,
            len(record.outcome.handles),
            record.end_ps - record.start_ps,
            record.actual_ps,
            record.gap_ps,
            record.lag_seconds,
            num_sampled,
            num_joined,
        )


def _runs(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    """Split steps into runs that only decode the same sequences; any other step is alone."""
    first = 0
    for index in range(1, len(records) + 1):
        if index == len(records) or not _go_on(records[index - 1], records[index]):
            yield records[first:index]
            first = index


def _go_on(one: StepRecord, other: StepRecord) -> bool:
    """Return whether a step decodes exactly the sequences of the step before, and each gets a token in both."""
    before, after, num = one.batch, other.batch, other.batch.num_decodes
    return (
        before.num_decodes == num == len(one.outcome.handles) == len(other.outcome.handles)
        and after.decode_kv_tokens == before.decode_kv_tokens + num
        and after.max_decode_kv_tokens == before.max_decode_kv_tokens + 1
        and after.lora is before.lora
        and not before.prefills
        and not after.prefills
    )
