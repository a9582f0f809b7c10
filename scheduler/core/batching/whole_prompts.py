"""Ways to batch that compute each prompt whole, in one step: continuous, static, mixed, and llm-mock's.

In all but static batching sequences enter at every boundary and leave in the step that ends them: iteration-level
scheduling (Orca, OSDI 2022).
"""

from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Stateless, Step, Wait, whole


class Continuous(Stateless):
    """Continuous batching with separate prefill, as in vLLM's first scheduler.

    At every boundary the sequences that fit enter, in a prefill of their own that the running ones wait for; otherwise
    every running sequence decodes.

    Args:
        limits: of one prefill and of the batch.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        admitted = context.admit(self.limits, at_ps)
        if admitted:
            return Step(whole(admitted))
        if not len(context.running):
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(context.running.steps_to_length()))


class Static(Stateless):
    """Static ("naive", synchronous) batching: a batch runs until its longest sequence has ended, then the next one.

    Nothing enters a running batch, and nothing leaves it: a sequence that has ended keeps its place, its KV tokens and
    its share of every step, as padding does, and its stream ends with the batch. Tokens are streamed as they are
    produced.

    Args:
        limits: of a batch.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        if len(context.running):
            return Step(decode=True, max_steps=context.running.steps_to_last_length(), hold=True)
        admitted = context.admit(self.limits, at_ps)
        return Step(whole(admitted), hold=True) if admitted else Wait()

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether the batch is empty: no arrival matters while one runs."""
        return not len(context.running)


class Mixed(Stateless):
    """Continuous batching with mixed steps: a step prefills new sequences and decodes the rest.

    No step is spent on prefill alone, but every running sequence waits for the whole of a new one's prompt. The tokens
    of a step, one per decoding sequence and the new prompts, stay within the prompt limit.

    Args:
        limits: `max_prompt_tokens` bounds the tokens of a whole step.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        num_decoding = context.running.num_decoding
        admitted = context.admit(self.limits, at_ps, self.limits.max_prompt_tokens - num_decoding)
        if admitted:
            return Step(whole(admitted), decode=num_decoding > 0)
        if not num_decoding:
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(context.running.steps_to_length()))


class LlmMock:
    """llm-mock's way to batch: mixed steps, limited by count only, and an empty step each time the batch drains.

    The first `max_sequences` requests in order of arrival are the batch; each keeps its place until it has ended, and
    new ones enter at the start of the next step, with their whole prompt, beside the decoding ones. An engine whose
    batch has drained with nothing waiting runs one more, empty step before it sleeps; a request that arrives during
    that step waits for its end (github.com/dongmingli-Ben/llm-mock, commit f07dd39).

    Args:
        limits: `max_sequences` is llm-mock's BATCH_SIZE.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._mixed = Mixed(limits)
        self._drained = False

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        choice = self._mixed.choose(context, at_ps)
        drained, self._drained = self._drained, False
        return Step() if drained and isinstance(choice, Wait) else choice

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Note that an empty step is due."""
        self._drained = True

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()
