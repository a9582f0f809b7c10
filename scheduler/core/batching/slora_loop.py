"""S-LoRA's router loop (S-LoRA, slora/server/router/manager.py, commit c1ddf48).

* Nothing runs: try to form a batch; a new batch is prefilled alone.
* Something runs: decode. A new batch is tried only after `MAX_WAIT_STEPS` decode steps since the last prefill, and then
  before every step; a new batch is prefilled alone (the running sequences stall) and joins at the end.
* With `prefetch`, the adapters of the next batch are loaded ahead, 5 and 7 steps after a prefill.

`strict` keeps the original's idle poll: after the batch became empty it checks for requests every 10 ms, not when one
arrives.
"""

from typing import Final

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, whole

MAX_WAIT_STEPS: Final = 10
PREFETCH_STEPS: Final = (5, 7)
IDLE_POLL_PS: Final = 10_000_000_000


class SloraLoop:
    """S-LoRA's way to batch.

    Args:
        limits: of a new batch.
        strict: poll when idle, on a 10 ms grid.
        prefetch: load the next batch's adapters ahead.
    """

    def __init__(self, limits: BatchLimits, *, strict: bool = False, prefetch: bool = False) -> None:
        self.limits = limits
        self.strict = strict
        self.prefetch = prefetch
        self.wait_steps = 0
        """Decode steps since the last prefill, at most MAX_WAIT_STEPS (S-LoRA's has_wait_tokens)."""
        self._poll_ps = 0

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        if not len(context.running):
            return self._choose_idle(context, at_ps)
        if self.wait_steps < MAX_WAIT_STEPS:
            return self._decode_without_trying(context, at_ps)
        admitted = context.admit(self.limits, at_ps)
        if admitted:
            self.wait_steps = 0
            return Step(whole(admitted))
        return Step(decode=True, max_steps=context.steps_blocked(context.running.steps_to_length()))

    def _choose_idle(self, context: BatchContext, at_ps: int) -> Step | Wait:
        if self.strict:
            since_poll_ps = at_ps - self._poll_ps
            next_poll_ps = self._poll_ps if since_poll_ps < 0 else at_ps + (-since_poll_ps) % IDLE_POLL_PS
            if next_poll_ps > at_ps:
                return Wait(None if context.has_no_candidates() else next_poll_ps)
        admitted = context.admit(self.limits, at_ps)
        if admitted:
            self.wait_steps = 0
            return Step(whole(admitted))
        if self.strict and context.steps_blocked(2) < 2:  # a queue whose failed try changes what the next one does
            return Wait(at_ps + IDLE_POLL_PS)
        return Wait()  # with nothing running, only an event can change this choice

    def _decode_without_trying(self, context: BatchContext, at_ps: int) -> Step:
        steps = context.running.steps_to_length()
        if context.has_no_candidates():
            context.admit(self.limits, at_ps)  # so that `blocked` forgets a refused sequence that has left
        else:
            steps = min(steps, MAX_WAIT_STEPS - self.wait_steps)
        if not self.prefetch:
            return Step(decode=True, max_steps=steps)
        for at_step in PREFETCH_STEPS:
            if self.wait_steps < at_step:
                return Step(decode=True, max_steps=min(steps, at_step - self.wait_steps))
            if self.wait_steps == at_step:
                ahead = context.look_ahead(self.limits.max_prompt_tokens)
                adapters = {sequence.adapter for sequence in ahead if sequence.adapter is not None}
                return Step(decode=True, prefetch=tuple(sorted(adapters)))
        return Step(decode=True, max_steps=steps)

    def advanced(self, num_decode_steps: int) -> None:
        """Count the decode steps since the last prefill."""
        self.wait_steps = min(self.wait_steps + num_decode_steps, MAX_WAIT_STEPS)

    def emptied(self, at_ps: int) -> None:
        """Start the idle poll's grid."""
        self._poll_ps = at_ps + IDLE_POLL_PS

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out: only if the next step tries it."""
        return context.has_no_candidates() or (self.wait_steps >= MAX_WAIT_STEPS and context.arrivals_matter())
