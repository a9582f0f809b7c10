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
counts half as much beyond the usual with every `HALVING` requests that go elsewhere, until one goes there and tells.

Cost: some sums per worker, and a look-up where there are prefix caches.
"""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.forecast import ONE
from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND

HALVING = 64
LEAST_DECODING = 100
"""Share of a worker's time, in thousandths, that its decode steps get at least."""


class PredictedFinish:
    """See the module."""

    moves_waiting = True
    predicts = True

    def __init__(self) -> None:
        self._num_placed = 0
        self._last_placed: dict[str, int] = {}

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the earliest finish; ties: the least load, then the first to attach."""
        ends = [(self._finish_ps(sequence, one), one.load, index) for index, one in enumerate(candidates)]
        first_ps, _, index = min(ends)
        chosen = candidates[index]
        self._num_placed += 1
        if len(self._last_placed) > 4 * len(candidates) + 16:  # of workers that are gone
            names = {one.name for one in candidates}
            self._last_placed = {name: number for name, number in self._last_placed.items() if name in names}
        self._last_placed[chosen.name] = self._num_placed
        others = [end[0] for end in ends if end[2] != index]
        why = f"would end in {first_ps / PS_PER_SECOND:.3f} s"
        return Choice(chosen, f"{why}; in {min(others) / PS_PER_SECOND:.3f} s on the next" if others else why)

    def _finish_ps(self, sequence: Sequence, candidate: Candidate) -> int:
        pace, num_running, num_waiting = candidate.pace, candidate.num_running, candidate.num_waiting
        waiting_tokens, kv_tokens = candidate.waiting_tokens, candidate.kv_tokens
        new_tokens = sequence.input_tokens - candidate.cached_tokens(sequence)
        output_tokens = max(sequence.budget_tokens * candidate.output_ratio // ONE, 1)
        batch_tokens = kv_tokens + waiting_tokens + sequence.input_tokens + output_tokens // 2
        num = num_running + num_waiting + 1
        step_ps = pace.base_ps + num * pace.sequence_ps + batch_tokens * pace.kv_token_ps
        step_ps = step_ps * ONE // max(ONE - candidate.prompt_share, LEAST_DECODING)
        wait_ps = 0
        if num_waiting:
            wait_ps = pace.base_ps + waiting_tokens * pace.prompt_token_ps
            if num_running and candidate.is_blocked:
                running_ps = pace.base_ps + num_running * pace.sequence_ps + kv_tokens * pace.kv_token_ps
                wait_ps = max(wait_ps, (num_waiting + 1) * output_tokens * running_ps // num_running)
        if sequence.adapter is not None:
            wait_ps = max(wait_ps, candidate.load_ps(sequence.adapter))
        finish_ps = wait_ps + pace.base_ps + new_tokens * pace.prompt_token_ps + (output_tokens - 1) * step_ps
        return finish_ps * self._slowdown(candidate) // ONE

    def _slowdown(self, candidate: Candidate) -> int:
        last = self._last_placed.get(candidate.name, self._num_placed)
        usual = candidate.usual_slowdown
        return max(usual + ((candidate.slowdown - usual) >> ((self._num_placed - last) // HALVING)), 1)
