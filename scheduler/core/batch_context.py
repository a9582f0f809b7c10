"""A replica as its way to batch sees it: running sequences, and admission of waiting ones."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import NoReturn

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.adapters.slots import AdapterSlots
from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits, Blocked, StepPass
from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.batching.base import BatchContext
from lorrery.scheduler.core.checked.base import PolicyErrors, SequenceError
from lorrery.scheduler.core.facts import Admitted, Dropped, Event, Preempted
from lorrery.scheduler.core.memory.base import Check
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.overlap import NOTHING, Overlap, Unseen
from lorrery.scheduler.core.plan import Chunk, Plan
from lorrery.scheduler.core.prefix_cache.base import PrefixCache, usable_tokens
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.prefix_cache.scheduled_blocks import ScheduledBlockCache
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.sequence import Sequence


class ReplicaBatchContext(BatchContext):
    """The `batching.base.BatchContext` of a replica.

    Args:
        batch: running sequences and what each holds.
        queue: waiting sequences.
        errors: receives errors of the queue beside the one that is raised.
        min_computed_tokens: see `ReplicaOptions`.
        adapters: adapters on the GPU; None: they are not used.
        on_check: called with every memory test.
        max_overtakes: see `AdmissionPass`.
        async_scheduling: see `ReplicaOptions`.

    Attributes:
        preempted_ended: sequences that were preempted though they had ended, for validation.
        admitted: sequences admitted and not yet in a plan; the reader replaces it with an empty list.
        events: of admissions, likewise; preceded by those of the replica.
        blocked: whether the last `admit` found no seat, or stopped at a sequence that lacked a resource. The prompt
            limit counts only if nothing was admitted: otherwise the next step has the full prompt budget again. So the
            value holds until a sequence enters.
        at_rest: the queue has said that it is, and nothing has arrived since.
        adapters_awaited: whether a sequence with an adapter has ever waited.
        passed_over: see `AdmissionPass`; of the last pass. A queue may try one sequence of an adapter for all of them.
        queue, memory: of the replica, for a way to batch with an admission pass of its own (`admit_by`).
        overlap: the last step's result, if that is known one decision late.
    """

    def __init__(
        self,
        batch: Batch,
        queue: Queue,
        errors: PolicyErrors,
        *,
        min_computed_tokens: int,
        adapters: Residency | None,
        on_check: Callable[[Check], None] | None,
        max_overtakes: int | None = 0,
        async_scheduling: bool = False,
    ) -> None:
        self._batch = batch
        self._unseen_tokens = int(async_scheduling)
        self.preempted_ended: list[Sequence] = []
        self.running = batch.running
        self._errors = errors
        self.admitted: list[Sequence] = []
        self.events: list[Event] = []
        self._queue = queue
        self.queue = queue
        self.memory = self._memory = batch.memory
        self._on_demand = batch.memory if isinstance(batch.memory, OnDemandMemory) else None
        self._prefix_cache: PrefixCache | None = batch.prefix_cache
        self._min_computed_tokens = min_computed_tokens
        self._adapters = adapters
        # What a pass calls is bound once, since a pass begins at most boundaries.
        self._count_cached = self._cached_tokens
        self._require_adapter = None if adapters is None else self._has_adapter
        self._loads_aside: Collection[str] = () if adapters is None else adapters.aside.keys()
        self._on_take = None if batch.prefix_cache is None else self._pin_prefix
        self._on_check = on_check
        self._max_overtakes = max_overtakes
        self._at_ps = 0
        self.overlap: Overlap | None = None
        self.blocked = False
        self._tried = False
        self.passed_over: list[tuple[Sequence, int]] = []
        self.at_rest = False
        self.adapters_awaited = False

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._queue)

    def enqueue(self, sequence: Sequence, at_ps: int, *, preempted: bool = False) -> None:
        """Put a sequence into the queue.

        Raises:
            SequenceError: the queue cannot take it.
        """
        try:
            put_first = getattr(self._queue, "put_first", None) if preempted else None
            if put_first is None:
                self._queue.append(sequence, at_ps)
            else:
                put_first(sequence, at_ps)
        except Exception as error:
            self._turn_away(sequence, error)
        self.at_rest = False
        if sequence.adapter is not None:
            self.adapters_awaited = True

    def _turn_away(self, sequence: Sequence, error: Exception) -> NoReturn:
        try:
            self._queue.cancel(sequence.handle)  # it may have been taken in before the error
        except Exception as other:
            self._errors.error = other
        raise SequenceError(sequence, error) from error

    # --- a step that takes memory as it schedules -------------------------------------------------------------------

    def admit_chunks(self, limits: BatchLimits, at_ps: int, budget: int, most: int) -> list[Chunk]:
        """Admit waiting sequences, with their first chunks. See `BatchContext.admit_chunks`."""
        if not self._begins(limits):
            return []
        assert self._on_demand is not None
        adapters = self._adapters
        admission = StepPass(
            self.running,
            self._on_demand,
            self._prefix_cache,
            limits,
            budget,
            most,
            None if adapters is None else adapters.options.max_loras,
            self._require_adapter,
            self._on_take,
            self._max_overtakes,
            at_ps,
            self._min_computed_tokens,
            self._loads_aside,
        )
        self._admit(admission, at_ps)
        return admission.chunks

    def cover(self, chunks: Many[Chunk]) -> bool:
        """Take the blocks of these chunks and of every decoding sequence. See `BatchContext.cover`."""
        memory, running = self._on_demand, self.running
        assert memory is not None
        if not memory.cover_decodes(running):
            return False
        if chunks:
            missing = 0
            for chunk in chunks:
                missing += memory.missing_for(chunk.sequence, chunk.past_tokens + chunk.new_tokens)
            if missing > memory.free_blocks(running):
                memory.uncover_decodes(running)
                return False
            if self._notes_changes:
                self._cover_in_order(chunks)
                return True
            for chunk in chunks:
                self._cover_prompt(chunk.sequence, chunk.past_tokens + chunk.new_tokens)
        elif self._notes_changes:
            self._cover_in_order(())
        else:
            memory.evict(running)
        return True

    @property
    def _notes_changes(self) -> bool:
        cache = self._prefix_cache
        return isinstance(cache, ScheduledBlockCache) and cache.notes_changes

    def _cover_in_order(self, chunks: Many[Chunk]) -> None:
        """Take blocks that are there sequence by sequence, as vLLM's events tell of them."""
        memory, running = self._on_demand, self.running
        assert memory is not None
        memory.uncover_decodes(running)
        tokens = {chunk.handle: chunk.new_tokens for chunk in chunks}
        for sequence in sorted([*running, *running.prefilling.values()], key=_entered):
            if sequence.handle in tokens or sequence.handle not in running.prefilling:
                is_there = self.cover_one(sequence, tokens.get(sequence.handle, 1))
                assert is_there
        self.covered()

    def cover_next(self, plan: Plan) -> None:
        """Take the blocks of the next step of a plan, which are there, some of whose steps have been committed."""
        memory, running = self._on_demand, self.running
        assert memory is not None
        chunks = [next_chunk(chunk) for chunk in plan.prefills if chunk.handle in running.prefilling]
        if self._notes_changes:
            self._cover_in_order(chunks)
            memory.uncover_decodes(running)
            return
        for chunk in chunks:
            self._cover_prompt(chunk.sequence, chunk.past_tokens + chunk.new_tokens)
        self._batch.shrink_cache(0)

    def note_ends(self) -> None:
        """Note the blocks that those have filled whose last token has come, and that no step takes up again."""
        cache, batch = self._prefix_cache, self._batch
        if isinstance(cache, ScheduledBlockCache) and cache.notes_changes:
            for handle, sequence in batch.ended.items():
                if handle in self.running.held:
                    cache.end_output(sequence, batch.output_tokens(sequence))

    def _cover_prompt(self, sequence: Sequence, num_tokens: int) -> bool:
        memory, cache = self._on_demand, self._prefix_cache
        assert memory is not None
        if not memory.cover(self.running, sequence, num_tokens):
            return False
        if cache is not None:
            memory.evict(self.running)
            cache.schedule(sequence, num_tokens)
        return True

    def cover_one(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the blocks of one running sequence. See `BatchContext.cover_one`."""
        memory = self._on_demand
        assert memory is not None
        if sequence.handle in self.running.prefilling:
            return self._cover_prompt(sequence, sequence.computed_tokens + num_tokens)
        if not memory.cover_decode(self.running, sequence):
            return False
        memory.evict(self.running)
        cache = self._prefix_cache
        if isinstance(cache, ScheduledBlockCache) and cache.notes_changes:
            cache.schedule_output(sequence)
        return True

    def covered(self) -> None:
        """End a pass of `cover_one`."""
        assert self._on_demand is not None
        self._on_demand.covered_all(self.running)

    def preempt(self, sequence: Sequence, at_ps: int, scheduled: int = 0) -> None:
        """Put a running sequence back into the queue. See `BatchContext.preempt`."""
        batch = self._batch
        ahead = 0 if self._on_demand is None else scheduled - self._unseen_tokens
        if sequence.handle in batch.ended:
            batch.cancel(sequence, ahead)
            self.preempted_ended.append(sequence)
            return
        unseen_tokens, had_ended = (0, False) if self.overlap is None else self.overlap.take_back(sequence)
        sequence.requeue(batch.remove(sequence, ahead) - unseen_tokens, at_ps)
        if not had_ended:
            batch.leaves.append(sequence)
        self.events.append(Preempted(sequence))
        self.enqueue(sequence, at_ps, preempted=self._on_demand is not None)

    def step_aside(self, sequence: Sequence) -> None:
        """Leave a decoding sequence out of this step. See `BatchContext.step_aside`."""
        if sequence.handle in self._batch.ended:
            self._batch.stand_still(sequence)
        else:
            self._batch.step_aside(sequence)

    @property
    def has_ended(self) -> bool:
        """Whether a sequence of the batch has ended without this decision knowing."""
        return bool(self._batch.ended)

    # --- admission in one go ----------------------------------------------------------------------------------------

    def _begins(self, limits: BatchLimits) -> bool:
        """Return whether a pass is worth while; otherwise nothing can enter."""
        seats = limits.max_sequences if limits.max_active is None else limits.max_active
        self.blocked = self.running.num >= seats
        self._tried = not self.blocked and not (self.at_rest or self.has_no_candidates())
        return self._tried

    def admit(self, limits: BatchLimits, at_ps: int, max_prompt_tokens: int | None = None) -> list[Sequence]:
        """Admit waiting sequences within these limits; they are then in prefill. See `BatchContext.admit`."""
        if not self._begins(limits):
            return []
        admission = AdmissionPass(
            self._memory.trial(self.running),
            limits,
            self._count_cached,
            self._require_adapter,
            on_check=self._on_check,
            on_take=self._on_take,
            max_prompt_tokens=max_prompt_tokens,
            max_overtakes=self._max_overtakes,
            at_ps=at_ps,
            aside=self._loads_aside,
        )
        return self._admit(admission, at_ps)

    def admit_by(self, admission: AdmissionPass, at_ps: int) -> list[Sequence]:
        """Let the queue try its sequences in a pass that a way to batch has made; those admitted are in prefill."""
        return self._admit(admission, at_ps) if len(self._queue) else []

    def _admit(self, admission: AdmissionPass, at_ps: int) -> list[Sequence]:
        running = self.running
        self._at_ps = at_ps
        try:
            dropped = self._queue.admit(admission, running, at_ps)
        except Exception:
            self._take_back(admission.admitted)
            raise
        if dropped:
            # Strict S-LoRA also drops cancelled sequences, whose end was reported at the cancel.
            self.events += [Dropped(sequence) for sequence in dropped if not sequence.aborted]
        refused = admission.refused
        self.blocked = refused is not None and (refused[1] is not Blocked.PROMPT or not admission.admitted)
        self.passed_over = admission.passed_over
        if self.passed_over:
            admission.note_overtakes()
        admitted = admission.admitted
        for sequence in admitted:
            if sequence.load_end is not None:
                sequence.leave_load(at_ps)
            first = sequence.first_admitted_ps is None
            if first:
                sequence.first_admitted_ps = at_ps
                sequence.first_cached_tokens = min(sequence.cached_tokens, sequence.prompt_tokens)
            running.admit(sequence)
            self._memory.admitted(sequence)
            queried = first and self._prefix_cache is not None and not sequence.skips_prefix_cache
            self.events.append(Admitted(sequence, first, sequence.input_tokens if queried else 0))
        self.admitted += admitted
        return admitted

    @property
    def unseen(self) -> Unseen:
        """What a decision does not know of the last step's result."""
        return NOTHING if self.overlap is None else self.overlap.unseen

    @property
    def radix_cache(self) -> RadixCache | None:
        """The prefix cache, if it is SGLang's."""
        cache = self._prefix_cache
        return cache if isinstance(cache, RadixCache) else None

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """The adapters on the GPU, if they are kept as in SGLang and used at all."""
        adapters = self._adapters
        return adapters if isinstance(adapters, AdapterSlots) else None

    def steps_blocked(self, limit: int) -> int:
        """Return for how many decode steps `admit`, which has just admitted nothing, would still admit nothing.

        Sequences that were passed over wait for a load's end, or for one that leaves: a plan ends at both. If memory
        fills up meanwhile, the pass would end at one of them, and admit nothing either.
        """
        if not self._tried:
            return limit
        return self._queue.holds_for(self.running, self._memory, limit)

    def has_no_candidates(self) -> bool:
        """Return whether `admit` would admit nothing, and change nothing, until something arrives."""
        if not self.at_rest:
            self.at_rest = self._queue.at_rest()
        return self.at_rest

    def arrivals_matter(self) -> bool:
        """Return whether an arrival could change the result of the last `admit`."""
        return self.at_rest or self._queue.arrivals_matter()

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be admitted next if only the prompt limit counted."""
        return self._queue.look_ahead(max_prompt_tokens)

    def _has_adapter(self, sequence: Sequence, admitted: list[Sequence]) -> bool:
        assert sequence.adapter is not None
        assert self._adapters is not None
        adapters = self._adapters
        if adapters.require(sequence.adapter, self._at_ps, admitted):
            return True
        sequence.await_adapter(adapters.load_end(sequence.adapter), self._at_ps)
        return False

    def _cached_tokens(self, sequence: Sequence) -> int:
        return usable_tokens(self._prefix_cache, sequence, self._min_computed_tokens)

    def _pin_prefix(self, sequence: Sequence) -> None:
        """Pin the cached prefix of a sequence before the pass goes on."""
        assert self._prefix_cache is not None
        sequence.cached_tokens = sequence.computed_tokens = self._cached_tokens(sequence)
        self._prefix_cache.acquire(sequence)

    def _take_back(self, sequences: Many[Sequence]) -> None:
        """Undo the admissions of a pass that its queue broke off: the sequences wait again, with nothing pinned."""
        for sequence in sequences:
            if sequence.admitted_ps is None:  # its queue put it there without the pass
                continue
            sequence.admitted_ps = None
            if self._on_demand is not None:
                self._on_demand.left(sequence)
            if self._prefix_cache is not None:
                self._prefix_cache.release(sequence, 0)
                sequence.cached_tokens = sequence.computed_tokens = 0


def next_chunk(chunk: Chunk) -> Chunk:
    """Return the chunk of a long prompt that follows the steps that have been committed."""
    return Chunk(chunk.sequence, chunk.new_tokens, chunk.sequence.computed_tokens, samples=False)


def _entered(sequence: Sequence) -> int:
    return sequence.entered
