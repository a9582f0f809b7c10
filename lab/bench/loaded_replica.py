"""A replica held at a batch, with many requests waiting: the world in which `lab.bench.decisions` measures the core.

Sequences end at lengths hidden from the core, and each that ends is replaced by a new one, so the steps are the mixture
of plain decodes, steps with ends, and prefills of a loaded worker. Two kinds of pressure:

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
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from lorrery.scheduler.core.build import TABLES_PACKAGE, Devices
from lorrery.scheduler.core.facts import Finished
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.queues.pets import Profile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.files.reading import read_tables
from lorrery.vocabulary.endings import FinishReason

PRESSURES = ("seats", "memory")
PROMPT_TOKENS = 256
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 32, 256
RANK = 16
NUM_ADAPTERS = 32
_STEP_PS = 15 * 10**9


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
