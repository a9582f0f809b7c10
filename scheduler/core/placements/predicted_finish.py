"""Predicted finish: the worker where the request is expected to end first; for workers of different speed.

    input   = tokens of the prompt to compute, without those in a worker's prefix cache
    output  = its output budget x the share of theirs that requests used lately
    step(b) = base + sequence x b + kv_token x KV tokens          of all running and waiting there, and this one
    queue   = base + prompt_token x input tokens of the waiting ones
    blocked = (waiting + 1) x output x step / running             if waiting ones could not start
    first   = max(queue, blocked, load of its adapter) + base + prompt_token x input
    finish  = (first + (output - 1) x step / (1 - prompts)) x slowdown

The coefficients are announced by the worker, the slowdown is the ratio of its measured step times to them, and prompts
is the share of its last steps' time in which running sequences waited for the prompts of others (`forecast.py`).
Later events are left out: sequences that end meanwhile, evicted adapters, and what the request costs the others.

A worker that became slow and gets no new requests shows no new steps, even if it is fast again. So its slowdown beyond
the usual one counts half as much after every `HALVING` requests that go elsewhere, until one goes there and its steps
are measured.

Of many workers, the columns give each one's lower bound on the finish, and they are evaluated in order of their bounds
until the next bound is above the best two finishes found; the second goes into the decision log:

    finish >= ((output - 1) x token_time + (base + prompt_token x input + (output - 1) x kv_token x own) x slowdown)
              / 1000                                       own = KV tokens of this request, half of its output included

with `token_time` from `worker_table.py`. What the bound leaves out costs evaluations, not exactness: the wait for
prompts, the load of the adapter and the tokens that a worker has not cached; the last two are added worker by worker.

Whole numbers throughout. Cost: some additions per worker, and a look-up if there are prefix caches; of many workers
some operations on columns, and an evaluation for each worker that might be the first.
"""

from collections.abc import Sequence as Many
from typing import Final

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, table_of
from lorrery.scheduler.core.placements.candidate import ReplicaCandidate
from lorrery.scheduler.core.placements.forecast import ONE, finish_ps
from lorrery.scheduler.core.placements.worker_table import LARGEST, WorkerTable
from lorrery.scheduler.core.prefix_cache.holders import Way
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.machine_ints import product
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND

HALVING: Final = 64
"""Number of placements elsewhere that halve the weight of a worker's slowdown beyond its usual one."""

FORGIVEN: Final = 32 * HALVING
"""Number of placements elsewhere after which no slowdown beyond the usual one counts, up to a million times that."""

MOST_NAMES: Final = 2 * FORGIVEN
"""Most workers whose last placement is remembered; beyond it, those without a placement for so long that it makes no
difference are forgotten, so departures of workers need not be reported."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PredictedFinish:
    """See the module."""

    moves_waiting = True
    predicts = True

    def __init__(self) -> None:
        self._num_placed = 0
        self._last_placed: dict[str, int] = {}  # by name: number, from 1, of the last placement that went there

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the earliest finish; ties: the least load, then the first to attach."""
        output_tokens = max(sequence.budget_tokens * candidates[0].output_ratio // ONE, 1)  # the same at all workers
        table = table_of(candidates)
        found = None if table is None else self._first_of_many(sequence, table, output_tokens)
        if found is None:
            ends = [self._finish_ps(sequence, candidate, output_tokens) for candidate in candidates]
            found = _first(ends, candidates)
        index, first_ps, next_ps = found
        chosen = candidates[index]
        self._num_placed += 1
        self._last_placed[chosen.name] = self._num_placed
        if len(self._last_placed) > MOST_NAMES:  # workers attach and leave
            oldest = self._num_placed - FORGIVEN
            self._last_placed = {name: number for name, number in self._last_placed.items() if number > oldest}
        why = f"would end in {first_ps / PS_PER_SECOND:.3f} s"
        return Choice(chosen, why if next_ps == NEVER else f"{why}; in {next_ps / PS_PER_SECOND:.3f} s on the next")

    def _finish_ps(self, sequence: Sequence, candidate: Candidate, output_tokens: int) -> int:
        """Return how long after now a sequence with this much output would end at one worker, in picoseconds."""
        if isinstance(candidate, ReplicaCandidate):  # the same in fewer calls
            forecast = candidate.forecast
            end_ps = candidate.finish_ps(sequence, output_tokens)
            slowdown, usual = forecast.slowdown, forecast.usual_slowdown
        else:
            end_ps = _finish_by_name_ps(sequence, candidate, output_tokens)
            slowdown, usual = candidate.slowdown, candidate.usual_slowdown
        if slowdown != usual:
            num_elsewhere = self._num_placed - self._last_placed.get(candidate.name, 0)
            slowdown = usual + ((slowdown - usual) >> (num_elsewhere // HALVING))
        return product(end_ps, max(slowdown, 1)) // ONE

    def _first_of_many(self, sequence: Sequence, table: WorkerTable, output_tokens: int) -> tuple[int, int, int] | None:
        """Return what `_first` would; None: the figures are too large for columns."""
        adapter, input_tokens, further_tokens = sequence.adapter, sequence.input_tokens, output_tokens - 1
        held: Way = []
        computed_tokens = input_tokens
        if table.have_prefix_caches:
            found = table.holders(sequence)
            if found is None:
                computed_tokens = 1
            elif found:
                held = found
                computed_tokens = input_tokens - held[-1][0]
        own_tokens = product(further_tokens, input_tokens + output_tokens // 2)
        alike_ps = [
            pace.base_ps + product(computed_tokens, pace.prompt_token_ps) + product(own_tokens, pace.kv_token_ps)
            for pace in table.paces
        ]
        if further_tokens * table.most_token_time + max(alike_ps) * table.most_slowdown > LARGEST:
            return None
        alike = np.array(alike_ps)[table.pace] if len(alike_ps) > 1 else alike_ps[0]
        bounds = (further_tokens * table.token_times + alike * table.slowdowns) // ONE
        refines = bool(held) or adapter is not None
        refined: set[int] = set()
        first, first_load, first_ps, next_ps = -1, 0, NEVER, NEVER
        while True:
            row = int(bounds.argmin())
            bound_ps = bounds.item(row)
            if bound_ps >= next_ps and (bound_ps > first_ps or (first_load == 0 and row > first)):
                return first, first_ps, next_ps  # the others would rank behind these two
            candidate = table.candidates[row]
            if refines and row not in refined:
                refined.add(row)
                pace = table.paces[table.pace[row]]
                more_ps = product(_less_held(held, row), pace.prompt_token_ps)
                if adapter is not None:
                    # A blocked worker's load ends while the request waits; that wait is in the bound.
                    more_ps += max(0, candidate.load_ps(adapter) - further_tokens * table.blocked_ps.item(row))
                if more_ps:
                    bounds[row] = min(bound_ps + product(more_ps, table.slowdowns.item(row)) // ONE, LARGEST - 1)
                    continue
            bounds[row] = LARGEST
            end_ps = self._finish_ps(sequence, candidate, output_tokens)
            table.was_read(row)
            if end_ps > first_ps or (end_ps == first_ps and (candidate.load, row) > (first_load, first)):
                next_ps = min(next_ps, end_ps)
            else:
                first, first_load, first_ps, next_ps = row, candidate.load, end_ps, first_ps


def _less_held(held: Way, row: int) -> int:
    """Return how many leading prompt tokens fewer than the one with most a worker holds, or less than that."""
    most = held[-1][0] if held else 0
    for tokens, numbers in reversed(held):
        if numbers >> row & 1:
            return most - tokens
    return most


def _finish_by_name_ps(sequence: Sequence, candidate: Candidate, output_tokens: int) -> int:
    """Return the finish without the slowdown at a candidate noted for a journal, or read back from one."""
    num_running, num_waiting = candidate.num_running, candidate.num_waiting
    return finish_ps(
        candidate.pace,
        num_running,
        num_waiting,
        candidate.waiting_tokens,
        candidate.kv_tokens,
        sequence.input_tokens,
        candidate.cached_tokens(sequence),
        output_tokens,
        candidate.prompt_share,
        num_waiting > 0 and num_running > 0 and candidate.is_blocked,
        0 if sequence.adapter is None else candidate.load_ps(sequence.adapter),
    )


def _first(ends: list[int], candidates: Many[Candidate]) -> tuple[int, int, int]:
    """Return the index of the earliest finish, that finish, and the next one; `NEVER`: there is no other."""
    first_ps = min(ends)
    index = ends.index(first_ps)
    if ends.count(first_ps) > 1:
        tied = [number for number, end_ps in enumerate(ends) if end_ps == first_ps]
        return min(tied, key=lambda number: candidates[number].load), first_ps, first_ps
    del ends[index]
    return index, first_ps, min(ends, default=NEVER)
