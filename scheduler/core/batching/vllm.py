"""One step of vLLM's V1 scheduler: running sequences first, then waiting ones, within one budget of tokens.

Recorded from vLLM 0.32 (docs/engines.md); the rules are those of vllm/v1/core/sched/scheduler.py, `schedule`. A step
has `max_num_batched_tokens` tokens. Running sequences get theirs in order of admission: one token if they decode, else
as much of their prompt as is left of it, of the budget, and of `long_prefill_token_threshold`. Each takes the blocks
that its tokens need. One that finds none preempts the last of the batch, by admission, which may be itself; under
`policy = "priority"` the one of the lowest priority, whose tokens of this step, if it has got them, are withdrawn. One
that is its own victim ends the step for those behind it. What a victim has produced becomes part of its input.

If nothing was preempted, waiting sequences enter while tokens and seats are left (`admission.StepPass`).

A step without preemption is decided by sums, and holds for as long as the blocks suffice, if nothing waits or what
waits cannot enter before a sequence leaves.
"""

from dataclasses import replace
from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Stateless, Step, Wait
from lorrery.scheduler.core.batching.chunked import steps_alike
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Vllm(Stateless):
    """vLLM's step.

    Args:
        limits: `max_prompt_tokens` is the token budget of a step, `max_sequences` the seats.
        long_prefill_tokens: most prompt tokens of one sequence in a step, unless it is the only one; None: no bound.
        adaptive: raise that bound to each one's share of the budget.
        by_priority: whether the sequence of the lowest priority is preempted, and not the last of the batch.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(
        self,
        limits: BatchLimits,
        *,
        long_prefill_tokens: int | None = None,
        adaptive: bool = False,
        by_priority: bool = False,
    ) -> None:
        self.limits = replace(limits, cached_count=False)
        self._long_prefill_tokens = long_prefill_tokens
        self._adaptive = adaptive
        self._by_priority = by_priority

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        running, limits = context.running, self.limits
        most = self._most_per_prompt(context)
        budget = limits.max_prompt_tokens - running.num_decoding
        chunks: list[Chunk] = []
        for sequence in sorted(running.prefilling.values(), key=_entered):  # one that stepped aside came first
            chunk = _chunk(sequence, min(most, budget))
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.new_tokens
        if context.cover(chunks):
            if budget > 0:
                chunks += context.admit_chunks(limits, at_ps, budget, most)
            elif len(chunks) == 1 and not (chunks[0].samples or context.has_ended):
                return self._go_on(chunks, running)
        else:
            chunks = self._preempt(context, at_ps, most)
            if not (chunks or running.num_decoding):
                return Wait(at_ps)  # a step without a token takes no time, and the next one may admit
            return Step(chunks, decode=running.num_decoding > 0)
        if chunks:
            return Step(chunks, decode=running.num_decoding > 0)
        if not running.num_decoding:
            return Wait()
        if context.has_ended:
            return Step(decode=True)
        return Step(decode=True, max_steps=context.steps_blocked(running.steps_to_length()))

    def _go_on(self, chunks: list[Chunk], running: Running) -> Step:
        """Return a step with a chunk that takes the whole budget; so do the next ones of its prompt."""
        steps = steps_alike(chunks)
        if running.num_decoding:
            return Step(chunks, decode=True, chunk_steps=min(steps, running.steps_to_length()))
        return Step(chunks, chunk_steps=steps)

    def _most_per_prompt(self, context: BatchContext) -> int:
        """Return the most tokens that one prompt gets in this step."""
        budget, most = self.limits.max_prompt_tokens, self._long_prefill_tokens
        if most is None:
            return budget
        num = context.running.num + context.num_waiting
        if num <= 1:
            return budget
        return max(most, budget // num) if self._adaptive else most

    def _preempt(self, context: BatchContext, at_ps: int, most: int) -> list[Chunk]:
        """Go through the batch in order and preempt where blocks lack; return the chunks that have theirs.

        Decoding sequences that get no token step aside: the next step takes them up again.
        """
        running = context.running
        order = sorted([*running, *running.prefilling.values(), *running.held.values()], key=_entered)
        budget, place = self.limits.max_prompt_tokens, 0
        tokens: dict[int, int] = {}  # by handle, of this step
        while place < len(order) and budget > 0:
            sequence = order[place]
            num_tokens = 1
            if sequence.handle in running.held:  # it has ended, as was foreseen
                place += 1
                continue
            if sequence.handle in running.prefilling:
                num_tokens = min(sequence.input_tokens - sequence.computed_tokens, most, budget)
            while not context.cover_one(sequence, num_tokens):
                victim = max(order, key=_by_priority) if self._by_priority else order[-1]
                index = order.index(victim)
                del order[index]
                place -= index < place
                budget += tokens.get(victim.handle, 0)
                context.preempt(victim, at_ps, scheduled=tokens.pop(victim.handle, 0))
                if victim is sequence:
                    break
            else:
                tokens[sequence.handle] = num_tokens
                budget -= num_tokens
                place += 1
                continue
            break
        for sequence in order:
            if not (
                sequence.handle in tokens or sequence.handle in running.prefilling or sequence.handle in running.held
            ):
                context.step_aside(sequence)
        context.covered()
        chunks = [
            _chunk(one, tokens[one.handle])
            for one in order
            if one.handle in tokens and one.handle in running.prefilling
        ]
        return [chunk for chunk in chunks if chunk is not None]

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return self._long_prefill_tokens is not None or context.arrivals_matter()


def _chunk(sequence: Sequence, most: int) -> Chunk | None:
    """Return the next chunk of a prompt, of at most this many tokens; None: there is nothing to compute."""
    left = sequence.input_tokens - sequence.computed_tokens
    new_tokens = min(left, most)
    if new_tokens <= 0:
        return None
    return Chunk(sequence, new_tokens, sequence.computed_tokens, samples=new_tokens == left)


def _entered(sequence: Sequence) -> int:
    return sequence.entered


def _by_priority(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.priority, sequence.arrived_ps, sequence.handle
