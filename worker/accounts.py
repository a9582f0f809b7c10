"""Counts steps in the metrics many at a time.

What a step was goes into a score of counters and histograms, and what its time went to is the step-time model's formula
once more. While a worker waits for the end of the next step, others use the core's caches, so the first look at all of
that costs several times what the second one does. So a step that has ended is noted in one record, and records are
counted together when there is nothing more urgent: `COUNT_AFTER` of them, those since the last heartbeat, or those of a
plan when it is over. What is shown may be that much older than what the scheduler knows.

Most steps decode the same sequences as the one before. Such a run costs little more than one step: where its steps take
evenly longer, so does each part of them, and the first and the last say what all of them cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lorrery.chassis.faults import SLOW_WORKER
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.slow import Spells
from lorrery.worker.device.work import PrefillWork, StepOutcome
from lorrery.worker.metrics import WorkerMetrics

COUNT_AFTER = 64
"""Steps that are kept before they are counted, about those of a second."""


class StepRecord(NamedTuple):
    """A step that has ended.

    Attributes:
        batch: what it computed.
        prefills: its plan's, of which the batch may have none any more.
        outcome: what it gave.
        gap_ps: how much later than the boundary before it began.
        start_ps: when it began.
        end_ps: when it ended.
        actual_ps: how long it took by the wall clock, in device time.
        lag_seconds: wall seconds by which its end was noticed late.
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
    """The steps of one GPU that are not counted yet.

    Args:
        gpu: that runs them.
        metrics: where they are counted.
        spells: in which they take longer; who changes them counts what has been run before.

    Attributes:
        due: whether there is enough to be counted.
    """

    def __init__(self, gpu: MockGpu, metrics: WorkerMetrics, spells: Spells) -> None:
        self._gpu, self._metrics = gpu, metrics
        self.spells = spells
        self._records: list[StepRecord] = []
        self.due = False

    def ended(self, record: StepRecord, *, last: bool) -> None:
        """Note a step; the last of a plan is due to be counted, with those before it."""
        self._records.append(record)
        if last or len(self._records) >= COUNT_AFTER:
            self.due = True

    def count(self) -> None:
        """Count the steps that have been noted, and what is on the device now."""
        self.due = False
        records, self._records = self._records, []
        for run in _runs(records):
            if len(run) == 1 or self.spells.slows or not self._count_run(run):
                for record in run:
                    self._count(record)
        self._metrics.hold(len(self._gpu), self._gpu.kv_tokens)

    def _count_run(self, run: Sequence[StepRecord]) -> bool:
        """Count a run of steps, if they take evenly longer; return whether they do."""
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
    """Divide steps into those that do nothing but decode the same sequences."""
    first = 0
    for index in range(1, len(records) + 1):
        if index == len(records) or not _go_on(records[index - 1], records[index]):
            yield records[first:index]
            first = index


def _go_on(one: StepRecord, other: StepRecord) -> bool:
    """Tell whether a step decodes the sequences of the one before, all of which get a token in both."""
    before, after, num = one.batch, other.batch, other.batch.num_decodes
    return (
        before.num_decodes == num == len(one.outcome.handles) == len(other.outcome.handles)
        and after.decode_kv_tokens == before.decode_kv_tokens + num
        and after.max_decode_kv_tokens == before.max_decode_kv_tokens + 1
        and after.lora is before.lora
        and not before.prefills
        and not after.prefills
    )
