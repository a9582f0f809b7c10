"""A replica as its way to batch sees it: running sequences, and admission of waiting ones."""

from collections.abc import Callable
from collections.abc import Sequence as Many

from lorrery.scheduler.core.adapter_slots import AdapterSlots
from lorrery.scheduler.core.adapters import Residency
from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits, Blocked, taken_out
from lorrery.scheduler.core.batching.base import BatchContext
from lorrery.scheduler.core.given import Given, changed_fields
from lorrery.scheduler.core.memory.base import Check, Memory
from lorrery.scheduler.core.overlap import NOTHING, Overlap, Unseen
from lorrery.scheduler.core.plan import Admitted, Dropped, Event
from lorrery.scheduler.core.policy_answers import dropped_by, is_ours, steps_held
from lorrery.scheduler.core.prefix_cache.base import PrefixCache, usable_tokens
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.protocols.queue import Queue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class ReplicaBatchContext(BatchContext):
    """The `batching.base.BatchContext` of a replica.

    Args:
        running: the batch.
        queue: waiting sequences.
        memory: decides what fits.
        prefix_cache: KV blocks that are already computed.
        min_computed_tokens: see `ReplicaOptions`.
        adapters: adapters on the GPU; None: they are not used.
        on_check: called with every memory test.
        given: what a queue from outside the tree has got; None: it is of the tree.
        max_overtakes: see `AdmissionPass`.

    Attributes:
        admitted: sequences admitted and not yet in a plan; the reader replaces it with an empty list.
        events: of admissions, likewise; preceded by those of the replica.
        blocked: whether the last `admit` found no seat, or stopped at a sequence that lacked a resource. The prompt
            limit counts only if nothing was admitted: otherwise the next step has the full prompt budget again. So the
            value holds until a sequence enters.
        at_rest: the queue has said that it is, and nothing has arrived since.
        adapters_awaited: whether a sequence with an adapter has ever waited.
        queue, memory: of the replica, for a way to batch with an admission pass of its own (`admit_by`).
        preempt: takes a sequence out of the batch and queues it again, at a time; set by the replica.
        overlap: the last step's result, if that is known one decision late; likewise.
    """

    preempt: Callable[[Sequence, int], None]
    overlap: Overlap | None

    def __init__(
        self,
        running: Running,
        queue: Queue,
        memory: Memory,
        *,
        prefix_cache: PrefixCache | None,
        min_computed_tokens: int,
        adapters: Residency | None,
        on_check: Callable[[Check], None] | None,
        given: Given | None = None,
        max_overtakes: int = 0,
    ) -> None:
        self.running = running
        self.admitted: list[Sequence] = []
        self.events: list[Event] = []
        self._queue = queue
        self._queue_is_ours = is_ours(queue)
        self.given = given
        self.queue = queue
        self.memory = self._memory = memory
        self._prefix_cache = prefix_cache
        self._min_computed_tokens = min_computed_tokens
        self._adapters = adapters
        # What a pass calls is bound once, since a pass begins at most boundaries.
        self._count_cached = self._cached_tokens
        self._require_adapter = None if adapters is None else self._has_adapter
        self._on_take = None if prefix_cache is None else self._pin_prefix
        self._on_check = on_check
        self._max_overtakes = max_overtakes
        self._at_ps = 0
        self.overlap = None
        self.blocked = False
        self._tried = False
        self._passed_over = False
        self.at_rest = False
        self.adapters_awaited = False

    def enqueue(self, sequence: Sequence, at_ps: int) -> None:
        """Put a sequence into the queue."""
        if self.given is not None:
            self.given.add(sequence)
        self._queue.append(sequence, at_ps)
        self.at_rest = False
        if sequence.adapter is not None:
            self.adapters_awaited = True

    def admit(self, limits: BatchLimits, at_ps: int, max_prompt_tokens: int | None = None) -> list[Sequence]:
        """Admit waiting sequences within these limits; they are then in prefill. See `BatchContext.admit`."""
        running = self.running
        self.blocked = running.num >= limits.max_sequences
        self._tried = not self.blocked and not (self.at_rest or self.has_no_candidates())
        if not self._tried:
            return []
        self._at_ps = at_ps
        admission = AdmissionPass(
            self._memory.trial(running),
            limits,
            self._count_cached,
            self._require_adapter,
            on_check=self._on_check,
            on_take=self._on_take,
            max_prompt_tokens=max_prompt_tokens,
            max_overtakes=self._max_overtakes,
            at_ps=at_ps,
        )
        self._pass(admission, at_ps)
        refused = admission.refused
        self.blocked = refused is not None and (refused[1] is not Blocked.PROMPT or not admission.admitted)
        self._passed_over = bool(admission.passed_over)
        if self._passed_over:
            admission.note_overtakes()
        return self._enter(admission.admitted, at_ps)

    def admit_by(self, admission: AdmissionPass, at_ps: int) -> list[Sequence]:
        """Let the queue try its sequences in a pass that a way to batch has made; those admitted are in prefill."""
        if len(self._queue):
            self._pass(admission, at_ps)
        return self._enter(admission.admitted, at_ps)

    def _pass(self, admission: AdmissionPass, at_ps: int) -> None:
        try:
            if self._queue_is_ours:
                dropped = self._queue.admit(admission, self.running, at_ps)
            else:
                dropped = dropped_by(self._queue, admission, self.running, at_ps)
            if self.given is not None:
                self.given.check(admission.admitted, at_ps)
                for sequence in dropped:
                    self.given.dropped(sequence)
            if dropped:
                # Strict S-LoRA also drops cancelled sequences, whose end was reported at the cancel.
                self.events += [Dropped(sequence) for sequence in taken_out(dropped)]
        except Exception as error:
            changed = [] if self.given is None else self.given.put_back()
            self._take_back(admission.admitted)
            if changed:
                raise ValueError(changed_fields(changed)) from error  # which most likely caused this error
            raise

    def _enter(self, admitted: list[Sequence], at_ps: int) -> list[Sequence]:
        running = self.running
        for sequence in admitted:
            sequence.leave_load(at_ps)
            first = sequence.first_admitted_ps is None
            if first:
                sequence.first_admitted_ps = at_ps
                sequence.first_cached_tokens = min(sequence.cached_tokens, sequence.prompt_tokens)
            if self.given is not None:
                self.given.enters(sequence)
            running.admit(sequence)
            self._memory.admitted(sequence)
            self.events.append(Admitted(sequence, first))
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
        if self._queue_is_ours:
            return self._queue.holds_for(self.running, self._memory, limit)
        if self._passed_over:  # `holds_for` of a queue from outside may only know of the sequence that ended the pass
            return 1
        return steps_held(self._queue, self.running, self._memory, limit)

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
        if self.given is not None:
            self.given.cached(sequence, sequence.cached_tokens)

    def _take_back(self, sequences: Many[Sequence]) -> None:
        """Undo the admissions of a pass that its queue broke off: the sequences wait again, with nothing pinned."""
        for sequence in sequences:
            if sequence.admitted_ps is None:  # its queue put it there without the pass
                continue
            sequence.admitted_ps = None
            if self._prefix_cache is not None:
                self._prefix_cache.release(sequence, 0)
                sequence.cached_tokens = sequence.computed_tokens = 0
                if self.given is not None:
                    self.given.cached(sequence, 0)
