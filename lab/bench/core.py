"""Cost of the scheduler's core: CPU time of one plan and one commit, per step, by policy.

A replica is held at a batch of 32 or 256 with 100 or 100,000 requests waiting. Each step is one `plan` and one `commit`
of a single step. Sequences end at lengths hidden from the core, and each that ends is replaced by a new one, so the
steps are the mixture of plain decodes, steps with ends, and prefills of a loaded worker. A live scheduler does less: it
commits each step, but plans only when the plan is used up or a sequence has ended; that is measured separately, as a
mean per step. Two kinds of pressure:

* seats: the batch is full (`running_max_req_size`, `max_num_seqs`), the KV pool is not;
* memory: the KV pool is full, so the head of the queue is tested against the running sequences' peak.

Reference, in the same run and with the same number of sequences: a plain loop over one slotted object per sequence that
adds a token to each, sums the KV tokens and replaces finished sequences: the minimum cost of a batch without
aggregates.

Times are the thread's CPU time (CLOCK_THREAD_CPUTIME_ID) minus the clock's own cost, so waiting for a core does not
count, though a cold cache after the wait does: on a busy machine that is most of the 99th percentile.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorrery.chassis.tables import read_tables
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.devices import TABLES_PACKAGE, Devices
from lorrery.scheduler.core.plan import Finished, Idle, Plan, Ran
from lorrery.scheduler.core.policies import QUEUES
from lorrery.scheduler.core.queues.profile import Profile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.finish_reason import FinishReason

BATCHES = (32, 256)
WAITING = (100, 100_000)
PRESSURES = ("seats", "memory")
AIM_US, AIM_BATCH = 20.0, 256
"""Bookkeeping of one step at this batch, from measurements of prototypes."""

PROMPT_TOKENS = 256
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 32, 256
NUM_ADAPTERS, RANK = 32, 16
_STEP_PS = 15 * 10**9

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CoreCost:
    """CPU microseconds of one plan and one commit.

    Attributes:
        num_running: mean batch over the measured steps.
        decode_p50_us: steps in which no sequence ended or was admitted.
        prefill_p50_us: steps that admit.
        mean_admitted: sequences that such a step admits.
        live_mean_us: mean over all steps if plans are made only when a live scheduler makes one.
        reference_p50_us: the plain loop at the same batch.
    """

    policy: str
    pressure: str
    batch: int
    waiting: int
    num_running: float
    p50_us: float
    p99_us: float
    decode_p50_us: float | None
    prefill_p50_us: float | None
    mean_admitted: float
    live_mean_us: float
    reference_p50_us: float

    @property
    def ratio(self) -> float:
        """Median / the plain loop's median."""
        return self.p50_us / self.reference_p50_us


def measure(num_steps: int, on_row: Callable[[CoreCost], None] = lambda row: None) -> list[CoreCost]:
    """Measure every policy of the catalogue at every size; `on_row` is called with each result as it arrives."""
    rows = []
    for batch in BATCHES:
        reference = reference_us(batch, num_steps)
        for policy in QUEUES:
            for pressure in PRESSURES:
                for waiting in WAITING:
                    row = _measure_one(policy, pressure, batch, waiting, num_steps, reference)
                    on_row(row)
                    rows.append(row)
    return rows


def _measure_one(policy: str, pressure: str, batch: int, waiting: int, num_steps: int, reference: float) -> CoreCost:
    world = World(build_replica(_settings(policy, pressure, batch)), batch + waiting, _sequence)
    _run(world, 4 * MAX_OUTPUT_TOKENS)  # until the sequences' ages are mixed
    samples = _run(world, num_steps)
    live = _run(world, num_steps, plan_always=False)
    own_us = clock_us()

    def us(chosen: list[_Sample]) -> FloatArray:
        return np.array([sample.nanoseconds for sample in chosen]) / 1e3 - own_us

    prefills = [sample for sample in samples if sample.num_admitted]
    return CoreCost(
        policy=policy,
        pressure=pressure,
        batch=batch,
        waiting=waiting,
        num_running=float(np.mean([sample.num_running for sample in samples])),
        p50_us=float(np.median(us(samples))),
        p99_us=float(np.quantile(us(samples), 0.99)),
        decode_p50_us=_median(us([sample for sample in samples if sample.plain])),
        prefill_p50_us=_median(us(prefills)),
        mean_admitted=sum(sample.num_admitted for sample in prefills) / max(len(prefills), 1),
        live_mean_us=float(np.mean(us(live))),
        reference_p50_us=reference,
    )


def _median(values: FloatArray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _settings(policy: str, pressure: str, batch: int) -> ReplicaSettings:
    settings = ReplicaSettings(
        policy, 1, 1, batch_num_adapters=NUM_ADAPTERS, profile=profile() if policy == "pets" else None
    )
    return pressed(settings, pressure, batch)


def profile() -> Profile:
    """Return the device's cost profile, for `pets`."""
    return Devices(read_tables(TABLES_PACKAGE)).profile("A100-80-SXM", "Llama-2-7B", 1, "roofline")


def pressed(settings: ReplicaSettings, pressure: str, batch: int) -> ReplicaSettings:
    """Return settings whose limits hold a batch near this size by one kind of pressure."""
    total = PROMPT_TOKENS + MAX_OUTPUT_TOKENS
    if pressure == "seats":
        seats, pool = batch, 10 * batch * total
    else:
        # Tokens that `batch` sequences hold at half their longest output, plus the adapters' share.
        seats, pool = 4 * batch, batch * (PROMPT_TOKENS + MAX_OUTPUT_TOKENS // 2) + 4 * RANK * min(NUM_ADAPTERS, batch)
    return replace(
        settings,
        max_total_token_num=pool,
        max_req_total_len=total,
        running_max_req_size=seats,
        max_num_seqs=seats,
        max_num_batched_tokens=16 * total,
        batch_max_tokens=16 * total,
    )


class _Sample(NamedTuple):
    """One step: CPU time, whether no sequence ended or was admitted, and how many were admitted and ran."""

    nanoseconds: int
    plain: bool
    num_admitted: int
    num_running: int


class World:
    """A device that ends sequences at hidden lengths, and clients that replace each one that ends.

    Attributes:
        replica: runs the sequences.
        at_ps: the device's time.
    """

    def __init__(self, replica: Replica, num_requests: int, make: Callable[[int, int], Sequence]) -> None:
        """Submit `num_requests` requests; `make` returns the sequence for a handle and an arrival time."""
        self.replica = replica
        self.at_ps = 0
        self._make = make
        self._rng = np.random.default_rng(1)
        self._handles = count()
        self._decode_step = 0
        self._ends: list[tuple[int, int]] = []  # (decode step, handle)
        for _ in range(num_requests):
            self._submit()

    def next_sequence(self) -> Sequence:
        """Return a sequence that arrives now."""
        return self._make(next(self._handles), self.at_ps)

    def step(self, plan: Plan) -> Ran:
        """Run a step of a plan."""
        self.at_ps += _STEP_PS
        finished: list[tuple[int, FinishReason]] = []
        if plan.decode:
            self._decode_step += 1
            while self._ends and self._ends[0][0] <= self._decode_step:
                handle = heappop(self._ends)[1]
                if self.replica.running.get(handle) is not None:
                    finished.append((handle, FinishReason.EOS))
        for chunk in plan.prefills:
            if chunk.samples:
                most = chunk.sequence.budget_tokens
                length = min(most, int(self._rng.integers(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)))
                heappush(self._ends, (self._decode_step + max(1, length - 1), chunk.sequence.handle))
        return Ran(1, self.at_ps, finished)

    def replace_finished(self, events: Iterable[object]) -> None:
        """Submit one request for each that has ended."""
        for event in events:
            if isinstance(event, Finished):
                self._submit()

    def _submit(self) -> None:
        self.replica.submit(self.next_sequence(), self.at_ps)


def _sequence(handle: int, at_ps: int) -> Sequence:
    return Sequence(handle, PROMPT_TOKENS, MAX_OUTPUT_TOKENS, at_ps, Adapter(f"lora-{handle % NUM_ADAPTERS}", RANK))


def _run(world: World, num_steps: int, *, plan_always: bool = True) -> list[_Sample]:
    """Run `num_steps` steps and return the cost of each; unless `plan_always`, plan as a live scheduler does."""
    replica, clock = world.replica, time.thread_time_ns
    samples = []
    steps_left = 0
    plan: Plan | Idle = Idle(None)
    for _ in range(num_steps):
        started = clock()
        if plan_always or not steps_left:
            plan = replica.plan(world.at_ps)
        planned = clock() - started
        assert not isinstance(plan, Idle), "requests wait, so there is something to run"
        steps_left = (steps_left or plan.max_steps) - 1
        ran = world.step(plan)
        num_running = replica.num_running
        started = clock()
        events = replica.commit(plan, ran)
        nanoseconds = planned + clock() - started
        samples.append(_Sample(nanoseconds, plan.decode and not ran.finished, len(plan.joins), num_running))
        world.replace_finished(events)
        if ran.finished:
            steps_left = 0
    return samples


class _Seat:
    """One sequence of the reference loop."""

    __slots__ = ("kv_tokens", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.kv_tokens = PROMPT_TOKENS


def reference_us(batch: int, num_steps: int) -> float:
    """Return the median cost of a step of the plain loop."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS, size=batch * (num_steps + 1)).tolist()
    seats = [_Seat(lengths.pop()) for _ in range(batch)]
    samples = []
    for _ in range(num_steps):
        started = time.thread_time_ns()
        kv_tokens, done = 0, []
        for index, seat in enumerate(seats):
            seat.left -= 1
            seat.kv_tokens += 1
            kv_tokens += seat.kv_tokens
            if not seat.left:
                done.append(index)
        for index in done:
            seats[index] = _Seat(lengths.pop())
        samples.append(time.thread_time_ns() - started)
    # The core times two intervals, this loop one; the clock's cost is subtracted from both.
    return float(np.median(samples)) / 1e3 - clock_us() / 2


def clock_us() -> float:
    """Return what the clock adds to a sample of two intervals."""
    costs = []
    for _ in range(2000):
        started = time.thread_time_ns()
        costs.append(time.thread_time_ns() - started)
    return 2 * float(np.median(costs)) / 1e3
