"""Ways to batch that split prompts over steps of a token budget: beside the decodes, or before them.

The oldest prompt in prefill comes first; new ones enter only if budget is left.
"""

from dataclasses import replace
from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Stateless, Step, Wait
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.sequence import Sequence


class Chunked(Stateless):
    """Chunked prefill: decode first, then as much of the prompts as the step's token budget leaves.

    Sarathi-Serve (OSDI 2024), DeepSpeed-FastGen's SplitFuse (2024), vLLM's `enable_chunked_prefill`. Every decoding
    sequence gets its token in every step; a long prompt is computed over several steps and never stalls another
    sequence for longer than one step of `max_num_batched_tokens`.

    Args:
        limits: `max_prompt_tokens` is the token budget of a step; it must exceed `max_sequences`, so that decoding
            leaves room for a prompt.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = replace(limits, partial=True)

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        running = context.running
        budget = self.limits.max_prompt_tokens - running.num_decoding
        chunks = chunks_within(context, self.limits, at_ps, budget)
        if chunks:
            steps = steps_alike(chunks)
            if running.num_decoding:
                return Step(chunks, decode=True, chunk_steps=min(steps, running.steps_to_length()))
            return Step(chunks, chunk_steps=steps)
        if not running.num_decoding:
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(running.steps_to_length()))


def chunks_within(context: BatchContext, limits: BatchLimits, at_ps: int, budget: int) -> list[Chunk]:
    """Return the chunks that a token budget pays for: prompts in prefill first, then newly admitted ones."""
    chunks: list[Chunk] = []
    for sequence in context.running.prefilling.values():
        budget = add_chunk(chunks, sequence, budget)
    if budget > 0:
        for sequence in context.admit(limits, at_ps, budget):
            budget = add_chunk(chunks, sequence, budget)
    return chunks


def steps_alike(chunks: list[Chunk]) -> int:
    """Return how many steps, from the one with these chunks on, compute a chunk of the same prompt and nothing else.

    A single chunk that does not finish its prompt takes the whole budget; so do the next ones, as long as the budget is
    the same and the prompt goes on. The step that finishes it may have room for others.
    """
    if len(chunks) > 1 or chunks[0].samples:
        return 1
    chunk = chunks[0]
    return (chunk.sequence.input_tokens - chunk.past_tokens - 1) // chunk.new_tokens


def add_chunk(chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
    """Add a chunk of this sequence as far as the budget goes, and return the rest of the budget."""
    left = sequence.input_tokens - sequence.computed_tokens
    new_tokens = min(left, budget)
    if new_tokens > 0 or not left:
        chunks.append(Chunk(sequence, new_tokens, sequence.computed_tokens, samples=new_tokens == left))
    return budget - new_tokens


class PrefillFirst(Stateless):
    """Prefill first, in chunks: SGLang's way to batch (sgl-project/sglang, srt/managers/scheduler.py).

    While prompts are in prefill or may enter, a step computes prompts alone, as many as its token budget holds
    (`chunked_prefill_size`); the last one is cut where the budget ends and continues first in the next step. Decode
    steps run only when no sequence may enter. So a wave of prompts stalls all decoding sequences until all of it is
    computed. `Continuous` is the same with whole prompts.

    Args:
        limits: `max_prompt_tokens` is the token budget of a step with prompts.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = replace(limits, partial=True)

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        running = context.running
        chunks = chunks_within(context, self.limits, at_ps, self.limits.max_prompt_tokens)
        if chunks:
            return Step(chunks, chunk_steps=steps_alike(chunks))
        if not running.num_decoding:
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(running.steps_to_length()))
