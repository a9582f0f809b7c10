"""Predicted finish: the worker where the request is expected to end first; for workers of different speed.

    input   = tokens of the prompt to compute, without those in a worker's prefix cache
    output  = its output budget x the share of theirs that requests used lately
    step(b) = base + sequence x b + kv_token x KV tokens          of all running and waiting there, and this one
    queue   = base + prompt_token x input tokens of the waiting ones
    blocked = (waiting + 1) x output x step / running             if waiting ones could not start
    first   = max(queue, blocked, load of its adapter) + base + prompt_token x input
    finish  = (first + (output - 1) x step / (1 - prompts)) x slowdown

The coefficients are announced by the worker, the slowdown is the ratio of its measured step times to them, and prompts
is the share of its last steps' time in which running sequences waited for the prompts of others (`core.forecast`).
Later events are left out: sequences that end meanwhile, evicted adapters, and what the request costs the others.

A worker that became slow and gets no new requests shows no new steps, even if it is fast again. So its slowdown beyond
the usual one counts half as much after every `HALVING` (`core.expected_finish`) requests that go elsewhere, until one
goes there and its steps are measured.

Cost: some additions per worker, and a look-up if there are prefix caches; of many workers only those that might be the
first are evaluated (`core.first_finish`).
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
"""Most workers whose last placement is remembered; beyond it, those without a placement for so long that it makes no
difference are forgotten, so departures of workers need not be reported."""


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
        if len(self._last_placed) > MOST_NAMES:  # workers attach and leave
            oldest = self._num_placed - FORGIVEN
            self._last_placed = {name: number for name, number in self._last_placed.items() if number > oldest}
        why = f"would end in {first_ps / PS_PER_SECOND:.3f} s"
        return Choice(chosen, why if next_ps == NEVER else f"{why}; in {next_ps / PS_PER_SECOND:.3f} s on the next")


def _first(ends: list[int], candidates: Many[Candidate]) -> tuple[int, int, int]:
    """Return the index of the earliest finish, that finish, and the next one; `NEVER`: there is no other."""
    first_ps = min(ends)
    index = ends.index(first_ps)
    if ends.count(first_ps) > 1:
        tied = [number for number, end_ps in enumerate(ends) if end_ps == first_ps]
        return min(tied, key=lambda number: candidates[number].load), first_ps, first_ps
    del ends[index]
    return index, first_ps, min(ends, default=NEVER)
