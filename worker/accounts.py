"""Counts finished steps in the metrics, in batches.

Counting a step updates several counters and histograms and evaluates the step-time formula again. While a worker sleeps
until the next step ends, other processes evict its cache lines, so the first step counted after a sleep costs several
times what the second one does. Each finished step is therefore kept as one record, and records are counted together
when nothing is urgent: after `COUNT_AFTER` of them, at a heartbeat, and at the end of a plan. The metrics may lag
behind what the scheduler knows by that much.
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from lorrery.chassis.faults import SLOW_WORKER
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.slow import Spells
from lorrery.worker.device.work import PrefillWork, StepOutcome
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
    """

    def __init__(self, gpu: MockGpu, metrics: WorkerMetrics, spells: Spells) -> None:
        self._gpu, self._metrics = gpu, metrics
        self.spells = spells
        self._records: deque[StepRecord] = deque()
        self._due = False

    def ended(self, record: StepRecord, *, last: bool) -> None:
        """Record a finished step; the last step of a plan makes all recorded steps due for counting."""
        self._records.append(record)
        self._due = self._due or last or len(self._records) >= COUNT_AFTER

    def settle(self) -> None:
        """Count the recorded steps if they are due."""
        if self._due:
            self.count()

    def count(self) -> None:
        """Count all recorded steps, and set the gauges to what is on the device now."""
        self._due = False
        while self._records:
            self._count(self._records.popleft())
        self._metrics.hold(len(self._gpu), self._gpu.kv_tokens)

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
