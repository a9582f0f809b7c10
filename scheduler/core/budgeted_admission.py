"""SGLang's admission pass: which waiting sequences one prefill computes, within budgets of memory and of tokens.

A sequence passes if its adapter finds a place, the batch has a seat, and these hold, in tokens, `ceil` to whole pages:

    input - cached + remaining output + a page  <  free + evictable - running - reserved             (memory)
    ceil(input - cached)                        <  input budget left, unless it is the first    (without chunks)

where `running` is what decoding sequences are thought to take (`memory.estimated`), `reserved` what this pass has
admitted (`ceil(input - cached)`, a page, and the whole `max_new_tokens`), and pages that the pass has pinned are not
evictable any more. In chunks, a sequence that exceeds what is left of the chunk's budget enters with that much of it,
in whole pages, and reserves no output yet.

Without a prefix cache, sequences that ignore the end-of-sequence token are tested by running the batch ahead instead:
at each end, all that still run must have had their tokens.

A pass is over when a budget is used up, or at the first sequence that lacks memory or a seat; the batch then counts as
full. A sequence that lacks only its adapter is passed over, without a bound (see `adapter_drain`).

sgl-project/sglang (0.5.23), srt/managers/schedule_policy.py (`PrefillAdder`) and mem_cache/prefill_budget.py; the loop
is `_get_new_batch_prefill_raw` of srt/managers/scheduler.py. The order of float operations is kept.
"""

from collections.abc import Collection

from lorrery.scheduler.core.adapters.slots import AdapterDrain, AdapterSlots, key_of
from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits, Blocked
from lorrery.scheduler.core.memory.base import Trial
from lorrery.scheduler.core.memory.estimated import EstimatedMemory
from lorrery.scheduler.core.overlap import NOTHING, Unseen
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

_RESERVE_TOKENS = 1
"""Tokens of a sequence that stay free in the run ahead."""


class BudgetedPass(AdmissionPass):
    """One admission pass.

    Args:
        memory: of the replica.
        running: the batch.
        limits: seats, and the token budget of a chunk.
        adapters: places for adapters; None: they are not used.
        drain: which adapters drain; None: none does.
        at_ps: now; `admitted_ps` of admitted sequences.
        unseen: output that the pass does not know of.

    Attributes:
        chunks: to compute in the step, in order.
        full: whether the batch takes no sequence until one leaves.
        tried: whether a sequence has lacked more than its adapter, or nothing.
    """

    def __init__(
        self,
        memory: EstimatedMemory,
        running: Running,
        limits: BatchLimits,
        adapters: AdapterSlots | None,
        drain: AdapterDrain | None,
        at_ps: int,
        unseen: Unseen = NOTHING,
    ) -> None:
        super().__init__(Trial(), limits, _none_cached, at_ps=at_ps)
        rules = memory.rules
        self.memory = memory
        self.chunks: list[Chunk] = []
        self.full = self.tried = False
        self._is_over = False
        self._running = running
        self._unseen = unseen
        self._page = memory.block_size
        self._seats = limits.max_sequences - running.num_decoding
        self._most_requests = rules.prefill_max_requests
        num_mixed = running.num_decoding if rules.chunked and rules.enable_mixed_chunk else 0
        self._input_left = rules.max_prefill_tokens - num_mixed
        self._chunk_left = limits.max_prompt_tokens - num_mixed
        self._chunked = rules.chunked
        self._free = memory.free_tokens(running)
        self._reserved_now = num_mixed
        self._reserved = float(num_mixed)
        self._reserved += memory.expected_tokens(running, unseen)
        self._ends: list[tuple[float, int]] | None = None
        self._adapters = adapters
        self._drain = drain
        self._keys: set[str | None] = {key_of(sequence) for sequence in running} if adapters is not None else set()

    # --- budgets ----------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return self._free + self.memory.evictable_tokens() - self._reserved

    def _left_now(self) -> int:
        return self._free + self.memory.evictable_tokens() - self._reserved_now

    def _has_capacity(self) -> bool:
        return self._left() > 0 and self._left_now() > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be tried."""
        return self._is_over or (self._is_spent() and self._has_capacity())

    @property
    def only_adapters(self) -> Collection[str | None] | None:
        """The adapters, by key, that a sequence may have, since no other finds a place any more; None: any."""
        adapters = self._adapters
        if adapters is None or adapters.options.max_loras is None or len(self._keys) < adapters.options.max_loras:
            return None
        return self._keys

    def _is_spent(self) -> bool:
        return self._input_left <= 0 or (self._chunked and self._chunk_left <= 0)

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _take(self, sequence: Sequence, past_tokens: int, new_tokens: int, max_new_tokens: int, *, whole: bool) -> None:
        """Charge the budgets with a chunk."""
        charged = self._ceil(new_tokens)
        self._reserved += charged + self._page + max_new_tokens
        self._reserved_now += charged + self._page
        self._input_left -= charged
        self._chunk_left -= charged
        self.chunks.append(Chunk(sequence, new_tokens, past_tokens, samples=whole))

    # --- one by one -------------------------------------------------------------------------------------------------

    def go_on(self, sequence: Sequence) -> None:
        """Take the next chunk of the sequence that is in prefill; call it before the queue is tried."""
        budget = min(self._chunk_left, int(self._left()))
        if budget <= 0:
            budget = self._chunk_left
        left = sequence.input_tokens - sequence.computed_tokens
        new_tokens = min(left, budget)
        whole = new_tokens == left
        reserved = self.memory.clipped(sequence.max_new_tokens) if whole else 0
        self._take(sequence, sequence.computed_tokens, new_tokens, reserved, whole=whole)
        self._keys.add(key_of(sequence))

    def admit(self, sequence: Sequence) -> bool:
        """Test a sequence, and admit it if it passes; return whether it did."""
        if self.is_over:
            self.refused = (sequence, Blocked.PROMPT)
            return False
        if self._adapters is not None and not self._may_place(sequence):
            self.refused = (sequence, Blocked.ADAPTER)
            return False
        self.tried = True
        if len(self.chunks) >= self._seats:
            self.full = self._is_over = True
            self.refused = (sequence, Blocked.COUNT)
            return False
        cache = self.memory.cache
        cached_tokens = 0 if cache is None else cache.touch(sequence)
        blocked = self._try(sequence, cached_tokens)
        if blocked is not None:
            self._is_over = True
            self.refused = (sequence, blocked)
            self.full = blocked is Blocked.MEMORY and (bool(self.chunks) or self._running.num_decoding > 0)
            return False
        self._keys.add(key_of(sequence))
        sequence.admitted_ps = self._at_ps
        self.admitted.append(sequence)
        if cache is not None:
            sequence.cached_tokens = sequence.computed_tokens = cached_tokens
            cache.acquire(sequence)
        if not self._has_capacity():
            self.full = self._is_over = True
            self.refused = (sequence, Blocked.MEMORY)
        elif self._is_spent():
            self._is_over = True
            self.refused = (sequence, Blocked.PROMPT)
        return True

    def pass_over(self) -> bool:
        """Return whether the sequence refused last lacks only its adapter."""
        return self.refused is not None and self.refused[1] is Blocked.ADAPTER

    def _may_place(self, sequence: Sequence) -> bool:
        if self._drain is not None and not self._drain.admits(sequence):
            return False
        key, adapters, adapter = key_of(sequence), self._adapters, sequence.adapter
        if key in self._keys or adapters is None:
            return True
        if not adapters.fit({key, *self._keys}):
            return False
        if adapter is None or adapters.is_readable(adapter, self._at_ps):
            return True
        sequence.await_adapter(adapters.load_end(adapter), self._at_ps)
        return False

    def _try(self, sequence: Sequence, cached_tokens: int) -> Blocked | None:
        """Charge the budgets with a sequence; None: it has passed."""
        if self._most_requests is not None and len(self.chunks) >= self._most_requests:
            return Blocked.PROMPT
        memory, cache = self.memory, self.memory.cache
        if sequence.ignore_eos and cache is None:
            return self._try_ahead(sequence)
        new_tokens = sequence.input_tokens - cached_tokens
        needed = new_tokens + memory.clipped(sequence.budget_tokens) + self._page
        # While it is tested, the pages that it would pin are not evictable.
        pinned = 0 if cache is None else cache.num_unpinned_found(sequence) * self._page
        if needed >= self._free + (memory.evictable_tokens() - pinned) - self._reserved:
            return Blocked.MEMORY
        charged = self._ceil(new_tokens)
        if not self._chunked:
            if self.chunks and charged >= self._input_left:
                return Blocked.PROMPT
        elif charged > self._chunk_left:
            end = cached_tokens + self._chunk_left // self._page * self._page
            part = end // self._page * self._page - cached_tokens
            if part <= 0:
                return Blocked.PROMPT
            self._take(sequence, cached_tokens, part, 0, whole=False)
            return None
        self._take(sequence, cached_tokens, new_tokens, memory.clipped(sequence.max_new_tokens), whole=True)
        return None

    # --- ends that are known ----------------------------------------------------------------------------------------

    def _try_ahead(self, sequence: Sequence) -> Blocked | None:
        """As `_try`, for a sequence that will use all its tokens, without a prefix cache."""
        new_tokens = sequence.input_tokens
        paged = self._ceil(new_tokens) + self._page
        if paged > self._left_now() or paged > self._left():
            return Blocked.MEMORY
        self._count_end(sequence)
        assert self._ends is not None
        left, freed = self._left_now() - paged, 0
        for place, (tokens_left, occupied) in enumerate(self._ends):
            num = len(self._ends) - place
            if left + freed - tokens_left * num <= _RESERVE_TOKENS * num:
                return Blocked.MEMORY
            freed += occupied
        if self._chunked and new_tokens > self._chunk_left:
            if self._chunk_left <= 0:
                return Blocked.PROMPT
            self._take(sequence, 0, self._chunk_left, 0, whole=False)
        else:
            self._take(sequence, 0, new_tokens, self.memory.clipped(sequence.max_new_tokens), whole=True)
        return None

    def _count_end(self, sequence: Sequence) -> None:
        """Count a sequence among those that end; the first one brings all that run or were admitted with it.

        Later ones keep the original's place: before the last, if they end after all others.
        """
        end = self._end_of(sequence, sequence.produced_tokens)
        if self._ends is None:
            step = self._running.decode_step
            ends = [end]
            unseen = self._unseen
            ends += [
                self._end_of(one, one.produced_tokens + one.output_tokens_at(step) - unseen.of(one))
                for one in self._running
            ]
            ends += [self._end_of(chunk.sequence, chunk.sequence.produced_tokens) for chunk in self.chunks]
            self._ends = sorted([one for one in ends if one[0] > 0], key=_tokens_left)
        elif end[0] > 0:
            before = [place for place, (tokens_left, _) in enumerate(self._ends) if end[0] <= tokens_left]
            self._ends.insert(before[0] if before else max(0, len(self._ends) - 1), end)

    def _end_of(self, sequence: Sequence, output_tokens: int) -> tuple[float, int]:
        """Return the tokens that a sequence is thought to produce yet, and those that it has."""
        ratio = 1.0 if sequence.ignore_eos else self.memory.ratio.current
        return sequence.max_new_tokens * ratio - output_tokens, sequence.prompt_tokens + output_tokens


def _none_cached(sequence: Sequence) -> int:
    return 0


def _tokens_left(end: tuple[float, int]) -> float:
    return end[0]
