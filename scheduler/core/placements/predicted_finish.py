"""Predicted finish: where the request would end first, as far as can be told; for workers of different speed.

    input   = computed tokens of the prompt, those that a worker's prefix cache holds left out
    output  = what it may produce x the share of that which requests produce lately
    step(b) = base + sequence x b + kv_token x KV tokens          of all that run and wait there, and this one
    queue   = base + prompt_token x input tokens of those that wait
    blocked = (waiting + 1) x output x step / running             where those that wait could not start
    first   = max(queue, blocked, load of its adapter) + base + prompt_token x input
    finish  = (first + (output - 1) x step / (1 - prompts)) x slowdown

The coefficients are those that the worker announced, the slowdown what its steps took beside them, and prompts the
share of its last steps' time in which running sequences waited for the prompts of others (`core.forecast`). Left out
is what comes later: those that end meanwhile, adapters put out, and what the request costs the others.

A worker that became slow and has no new requests shows no new steps, whether or not it is fast again. So its slowdown
counts half as much beyond the usual with every `HALVING` (`core.expected_finish`) requests that go elsewhere, until one
goes there and tells.

Cost: some sums per worker, and a look-up where there are prefix caches; of many workers only those are looked at that
might be the first (`core.first_finish`).
"""

from collections.abc import Sequence as Many
from typing import Final

from lorrery.scheduler.core.expected_finish import FORGIVEN, finishes_ps
from lorrery.scheduler.core.first_finish import first_of_many
from lorrery.scheduler.core.placements.base import Candidate, Choice, kept_of
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND

MOST_NAMES: Final = 2 * FORGIVEN
"""Workers whose last placement is remembered, at most; beyond it those are forgotten that have had none for so long
that it makes no difference, so nobody needs to know which workers are gone."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PredictedFinish:
    """See the module."""

    moves_waiting = True
    predicts = True

    def __init__(self) -> None:
        self._num_placed = 0
        self._last_placed: dict[str, int] = {}

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the earliest finish; ties: the least load, then the first to attach."""
        many = kept_of(candidates)
        if many is None:
            ends = finishes_ps(sequence, candidates, self._last_placed, self._num_placed)
            index, first_ps, next_ps = _first(ends, candidates)
        else:
            index, first_ps, next_ps = first_of_many(sequence, many, self._last_placed, self._num_placed)
        chosen = candidates[index]
        self._num_placed += 1
        self._last_placed[chosen.name] = self._num_placed
        if len(self._last_placed) > MOST_NAMES:  # workers come and go
            oldest = self._num_placed - FORGIVEN
            self._last_placed = {name: number for name, number in self._last_placed.items() if number > oldest}
        why = f"would end in {first_ps / PS_PER_SECOND:.3f} s"
        return Choice(chosen, why if next_ps == NEVER else f"{why}; in {next_ps / PS_PER_SECOND:.3f} s on the next")


def _first(ends: list[int], candidates: Many[Candidate]) -> tuple[int, int, int]:
    """Return the index of the earliest of all finishes, that finish, and the next; `NEVER`: there is no other."""
    first_ps = min(ends)
    index = ends.index(first_ps)
    if ends.count(first_ps) > 1:
        tied = [number for number, end_ps in enumerate(ends) if end_ps == first_ps]
        return min(tied, key=lambda number: candidates[number].load), first_ps, first_ps
    del ends[index]
    return index, first_ps, min(ends, default=NEVER)
