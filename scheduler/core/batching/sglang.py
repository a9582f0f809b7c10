"""SGLang's loop: prefill before decode, within budgets, and retraction when a decode step lacks memory.

sgl-project/sglang (0.5.23), srt/managers/scheduler.py (`get_next_batch_to_run`, `update_running_batch`):

* A step computes prompts, as many as the pass admits (`core.budgeted_admission`); the one that is cut goes on first in
  the next. Otherwise all decode; with `enable_mixed_chunk` they do so beside the prompts, if that fits.
* When the pass met a full batch, no other is made until a sequence leaves. Every prefill into an empty batch forgets
  that, as does a chunk.
* `prefill_decode_interval` decode steps follow every prefill.
* If the next decode step does not fit, sequences are retracted until it does: fewest output tokens first, then the
  longest prompt, then the last of the batch; one stays. Each such time the new-token ratio is set anew, otherwise a
  decode step lowers it. An engine without requests starts again with the first.

`prefill_first` is the same loop with limits on sequences and tokens alone.
"""

from dataclasses import replace
from typing import Final

from lorrery.scheduler.core.adapters.slots import AdapterDrain
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batch_context import ReplicaBatchContext
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.budgeted_admission import BudgetedPass
from lorrery.scheduler.core.memory.estimated import EstimatedMemory
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.queues.sglang import Rejoining
from lorrery.scheduler.core.replica_settings import DEFAULT, SglangRules
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr

IDLE_PASS_PS: Final = 50_000_000
"""Time of a pass that runs nothing: 50 us, the order of magnitude of Python's loop. It only matters while nothing
decodes although `prefill_decode_interval` requires it: the original counts passes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Sglang:
    """Choose as SGLang does.

    Args:
        limits: `max_prompt_tokens` is the token budget of a step with chunks.
        rules: SGLang's settings.
        max_loras: places for adapters, the base model's included; None: unlimited.
        idle_pass_ps: time of a pass that runs nothing.

    Attributes:
        drain: which adapters drain; None: none ever does.
    """

    def __init__(
        self,
        limits: BatchLimits,
        rules: SglangRules = DEFAULT,
        *,
        max_loras: int | None = None,
        idle_pass_ps: int = IDLE_PASS_PS,
    ) -> None:
        self.limits = replace(limits, partial=True)  # without chunks too, the first prompt may be longer
        self.rules = rules
        self.drain: AdapterDrain | None = None
        if rules.lora_drain_wait_threshold and max_loras is not None:
            self.drain = AdapterDrain(rules.lora_drain_wait_threshold, max_loras)
        self._idle_pass_ps = idle_pass_ps
        self._memory: EstimatedMemory | None = None
        self._full = False
        self._chunks: list[Chunk] = []
        """Prompts of the last step; empty if it had none."""
        self._num_decoding = 0
        """Sequences that decoded, or waited to, at the last choice; 0 if the last step took them in (mixed)."""
        self._num_after = 0
        """How many decode after it if none leaves."""
        self._mixed = False
        self._retracted = False
        """Whether the coming decode step follows a retraction."""
        self._steps_to_prefill = 0
        self._idle_from_ps: int | None = None
        self._passes_on: Rejoining | None = None
        """The queue, if each step of the last choice stands for a pass that changes nothing."""
        self._num_counted = 0
        """Passes of those steps that have been counted: at first the one of the choice itself."""

    # --- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        assert isinstance(context, ReplicaBatchContext)
        running, memory = context.running, context.memory
        assert isinstance(memory, EstimatedMemory), "batching = 'sglang' needs memory = 'estimated'"
        self._memory = memory
        self._passes_on = None
        self._count_idle_passes(at_ps)
        chunks = self._not_run(context)
        if not chunks:
            self._look_back(context)
            chunks = [] if self._steps_to_prefill else self._prefill(context, memory, at_ps)
        if chunks:
            return self._compute(context, memory, chunks, at_ps)
        self._chunks, self._mixed = [], False
        fits = not running.num_decoding or self._make_room(context, memory, at_ps)
        if not running.num_decoding or not fits:
            return self._idle(context, memory, at_ps)
        memory.decodes = True
        self._num_decoding = self._num_after = running.num_decoding
        loads = self._place(context, running, at_ps)
        return Step(decode=True, max_steps=self._steps_alike(context), loads=loads)

    def _not_run(self, context: ReplicaBatchContext) -> list[Chunk]:
        """Return what is left of a step with prompts that has not run: nothing has changed but who may have gone."""
        prefilling = context.running.prefilling
        return [
            Chunk(chunk.sequence, chunk.new_tokens, chunk.past_tokens, chunk.samples)
            for chunk in self._chunks
            if prefilling.get(chunk.sequence.handle) is chunk.sequence
            and chunk.sequence.computed_tokens == chunk.past_tokens
        ]

    def _look_back(self, context: ReplicaBatchContext) -> None:
        """Take in what the last step has computed, and whether a sequence has left."""
        cache, running = context.radix_cache, context.running
        in_prefill = next(iter(running.prefilling.values()), None)
        if in_prefill is not None and cache is not None:
            cache.publish(in_prefill)
        if self._mixed:  # the original's new batch takes in the old one
            running.put_first([chunk.sequence for chunk in self._chunks])
        if self._chunks and (not self._num_decoding or not self._chunks[0].samples or not self._chunks[-1].samples):
            self._full = False
        if running.num_decoding < self._num_after or not running.num_decoding:
            self._full = False

    def _prefill(self, context: ReplicaBatchContext, memory: EstimatedMemory, at_ps: int) -> list[Chunk]:
        """Make a pass; return the chunks of the coming step."""
        running = context.running
        in_prefill = next(iter(running.prefilling.values()), None)
        context.blocked = self._full
        if in_prefill is None:
            if self._full or context.has_no_candidates():
                return []
            if running.num_decoding >= self.limits.max_sequences:
                self._full = context.blocked = True
                return []
        elif not self._has_room(memory, running, in_prefill):
            return []
        adapters = context.adapter_slots
        admission = BudgetedPass(memory, running, self.limits, adapters, self.drain, at_ps, context.unseen)
        if in_prefill is not None:
            admission.go_on(in_prefill)
        if self.drain is not None and adapters is not None:
            assert isinstance(context.queue, Rejoining)
            self.drain.update(context.queue.with_joined(), running, at_ps, context.unseen)
        context.admit_by(admission, at_ps)
        self._full = context.blocked = admission.full
        if not admission.chunks and not admission.tried and self.drain is None:
            assert isinstance(context.queue, Rejoining)
            self._passes_on, self._num_counted = context.queue, 1
        return admission.chunks

    def _has_room(self, memory: EstimatedMemory, running: Running, in_prefill: Sequence) -> bool:
        """Return whether the next chunk fits; the original fails if it does not."""
        rules, page = self.rules, memory.block_size
        budget = self.limits.max_prompt_tokens - (running.num_decoding if rules.enable_mixed_chunk else 0)
        end = min(in_prefill.input_tokens, in_prefill.computed_tokens + budget)
        pages = -(-end // page) - -(-in_prefill.computed_tokens // page)
        return budget > 0 and pages * page <= memory.free_tokens(running) + memory.evictable_tokens()

    def _compute(
        self, context: ReplicaBatchContext, memory: EstimatedMemory, chunks: list[Chunk], at_ps: int
    ) -> Step | Wait:
        """Allocate the pages of a step with prompts, and let sequences decode beside them if that fits."""
        running, rules = context.running, self.rules
        page = memory.block_size
        tokens = sum([chunk.new_tokens for chunk in chunks])
        memory.make_free(running, tokens if page == 1 else tokens + len(chunks) * page)
        for chunk in chunks:
            memory.extend(chunk.sequence, chunk.past_tokens + chunk.new_tokens)
        self._chunks, self._num_decoding = chunks, running.num_decoding
        self._num_after = running.num_decoding + sum([chunk.samples for chunk in chunks])
        self._mixed = memory.decodes = False
        self._retracted = False
        self._steps_to_prefill = rules.prefill_decode_interval
        if rules.chunked and rules.enable_mixed_chunk and running.num_decoding:
            self._leave_out_finishing(context, memory)
            self._num_decoding = running.num_decoding
            self._num_after = self._num_decoding + sum([chunk.samples for chunk in chunks])
        if rules.chunked and rules.enable_mixed_chunk and running.num_decoding:
            self._mixed = memory.decodes = memory.make_free(running, memory.decode_tokens(running))
        if self._mixed:
            self._num_decoding = 0
        batch = [chunk.sequence for chunk in chunks]
        loads = self._place(context, [*batch, *running] if self._mixed else batch, at_ps)
        return Step(chunks, decode=self._mixed, loads=loads)

    def _leave_out_finishing(self, context: ReplicaBatchContext, memory: EstimatedMemory) -> bool:
        """Leave out of the coming decode step what is about to end by its length; return whether anything is."""
        running, ended = context.running, context.unseen.ended
        finishing = [one for one in map(running.get, ended) if one is not None and self._is_at_length(one, running)]
        for sequence in finishing:
            memory.stop_growing(sequence, running)
            running.hold(sequence)
        if finishing:
            self._full = False
        return bool(finishing)

    def _is_at_length(self, sequence: Sequence, running: Running) -> bool:
        return sequence.finish_step <= running.decode_step and not running.is_prefilling(sequence)

    def _make_room(self, context: ReplicaBatchContext, memory: EstimatedMemory, at_ps: int) -> bool:
        """Preempt sequences until the next decode step fits; one stays. False: it waits for what is about to end."""
        running = context.running
        are_finishing = self._leave_out_finishing(context, memory)
        if memory.make_free(running, memory.decode_tokens(running)):
            return True
        if are_finishing:
            return False
        step, unseen = running.decode_step, context.unseen
        known = {one.handle: one.produced_tokens + one.output_tokens_at(step) - unseen.of(one) for one in running}
        ranked = sorted(running, key=lambda one: (known[one.handle], -one.prompt_tokens), reverse=True)
        while len(ranked) > 1:
            victim = ranked.pop()
            if context.radix_cache is not None:
                context.radix_cache.withhold(victim)
            context.preempt(victim, at_ps)
            memory.make_free(running, len(ranked) * self.rules.retract_decode_steps)
            if memory.make_free(running, memory.decode_tokens(running)):
                break
        else:  # the original gives up the last one; a prompt in prefill may have what it lacks
            for sequence in list(running.prefilling.values()):
                context.preempt(sequence, at_ps)
        output_tokens = sum([known[one.handle] for one in ranked])
        memory.ratio.retracted(len(ranked), output_tokens, sum([one.max_new_tokens for one in ranked]))
        running.put_first(ranked)  # the original keeps them in this order
        self._retracted, self._full = True, False
        return True

    def _idle(self, context: ReplicaBatchContext, memory: EstimatedMemory, at_ps: int) -> Wait:
        """Wait: nothing can run."""
        memory.decodes = False
        self._num_decoding = self._num_after = 0
        self._idle_from_ps = at_ps
        is_settled = context.overlap is None or context.overlap.is_settled
        nothing_waits = not context.running.num and context.has_no_candidates()
        if not is_settled or (self._steps_to_prefill and not nothing_waits):
            return Wait(at_ps + max(1, self._steps_to_prefill) * self._idle_pass_ps)
        if nothing_waits:
            memory.ratio.reset()
        return Wait()

    # --- time -------------------------------------------------------------------------------------------------------

    def _steps_alike(self, context: ReplicaBatchContext) -> int:
        """Return for how many decode steps, from the coming one on, no pass could change the batch."""
        limit = context.running.steps_to_length()
        if context.unseen.ended:
            return 1
        if self._full or (not context.running.prefilling and context.has_no_candidates()):
            return limit
        if self._passes_on is not None:  # all wait for places of adapters, which are free when a sequence leaves
            passes = None if context.radix_cache is None else self._passes_on.passes_alike()
            return limit if passes is None else min(limit, passes)
        return min(limit, self._steps_to_prefill) if self._steps_to_prefill else 1

    def _count_idle_passes(self, at_ps: int) -> None:
        """Count the passes that have run nothing since the last choice."""
        if self._idle_from_ps is not None:
            passes = -(-(at_ps - self._idle_from_ps) // self._idle_pass_ps)
            self._steps_to_prefill = max(0, self._steps_to_prefill - passes)
            self._idle_from_ps = None

    def _place(self, context: ReplicaBatchContext, batch: list[Sequence] | Running, at_ps: int) -> tuple[Adapter, ...]:
        """Give the adapters of a batch their places; return those that it waits for."""
        adapters = context.adapter_slots
        if adapters is None:
            return ()
        by_key = {one.adapter.key: one.adapter for one in batch if one.adapter is not None}
        with_base = any(one.adapter is None for one in batch)
        return adapters.place(by_key, at_ps, with_base=with_base)

    def advanced(self, num_decode_steps: int) -> None:
        """Note decode steps: a pass that decodes alone lowers the ratio, unless it has retracted."""
        if self._mixed:
            return
        if self._passes_on is not None:
            self._passes_on.count_passes(num_decode_steps - self._num_counted)
            self._num_counted = 0
        self._steps_to_prefill = max(0, self._steps_to_prefill - num_decode_steps)
        if self._memory is not None:
            self._memory.ratio.decay(num_decode_steps - self._retracted)
        self._retracted = False

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return not self._full
