"""Paged KV memory taken block by block as steps are scheduled, by the rules of vLLM's V1 engine.

Recorded from vLLM 0.32 (docs/engines.md). Of a pool of blocks of `block_size` tokens:

* A step that computes a sequence up to its n-th token needs ceil(n / block_size) blocks of it, no sooner. Nothing is
  kept for the first token of the output, nor for the later chunks of a prompt.
* A sequence enters if its next chunk has its blocks and, with `reserve_full_input`, if its whole input would fit at
  that moment. Beside a batch, admission leaves a watermark free.
* A running sequence that lacks a block makes the way to batch preempt another one (`batching.vllm`), so that `victim`
  is not called.

    held = sum of ceil(tokens computed or scheduled / block_size) - shared ones counted twice

Blocks that a prefix cache keeps and no sequence pins are free: each allocation evicts as many as it takes beyond those
that are empty. `memory.paged` is the older rule, which counts the token of the coming step ahead for each newcomer.
"""

from lorrery.scheduler.core.memory.base import Check, Trial
from lorrery.scheduler.core.memory.paged import PagedMemory
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class OnDemandMemory(PagedMemory):
    """A pool of blocks.

    Decoding sequences grow together (`memory.paged.BlockGrowth`); the blocks of all others are counted one by one.

    Args:
        pool_tokens: size of the pool, adapters included; an incomplete last block is not used.
        block_size: tokens in a block.
        watermark: share of the blocks that admission leaves free beside a batch.
        reserve_full_input: whether a whole input must fit when its first chunk enters.
        shared: blocks that a prefix cache holds in this pool; None: nothing is shared.
    """

    def __init__(
        self,
        pool_tokens: int,
        *,
        block_size: int = 16,
        watermark: float = 0.0,
        reserve_full_input: bool = True,
        shared: SharedBlocks | None = None,
    ) -> None:
        super().__init__(pool_tokens, block_size=block_size, shared=shared)
        self.watermark_blocks = int(watermark * (self.num_blocks + 1))  # vLLM counts one that it never gives out
        self.reserve_full_input = reserve_full_input
        # Decoding sequences have their blocks up to this decode step, or up to the last that was committed.
        self._covered_step = -1
        self._ahead: dict[int, int] = {}  # blocks that some of them have got for the next step, during a pass
        self._num_ahead = 0

    # --- how much is held -------------------------------------------------------------------------------------------

    def needed_blocks(self, running: Running, num_steps: int = 0) -> int:
        """Return the blocks that the batch holds after a decode step that follows `num_steps` others, or covered."""
        return self._growth.blocks(max(running.decode_step + num_steps, self._covered_step)) + self._others()

    def _others(self) -> int:
        return super()._others() + self._num_ahead

    def used_blocks(self, running: Running) -> int:
        """Return the blocks that the batch and its adapters have, those of the coming step once it is covered."""
        return self.blocks_for(running.adapter_slots) + self.needed_blocks(running, -1)

    def free_blocks(self, running: Running) -> int:
        """Return the blocks that are empty, or only cached."""
        return self.num_blocks - self.used_blocks(running)

    # --- a step -----------------------------------------------------------------------------------------------------

    def cover_decodes(self, running: Running) -> bool:
        """Take the blocks of every decoding sequence for the coming step, if there are enough."""
        if not running.num_decoding:
            return True
        if not self._surely_suffices(running, 0) and self.needed_blocks(running) > self._room(running.adapter_slots):
            return False
        self._covered_step = running.decode_step
        return True

    def uncover_decodes(self, running: Running) -> None:
        """Take back `cover_decodes`."""
        self._covered_step = running.decode_step - 1

    def missing_for(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the blocks that a sequence in prefill lacks to be computed up to this number of its tokens."""
        return max(0, self.blocks_for(num_tokens) - self._prefill_blocks.get(sequence.handle, 0))

    def cover_decode(self, running: Running, sequence: Sequence) -> bool:
        """Take the block, if it needs one, of one decoding sequence for the coming step; `covered_all` ends a pass."""
        tokens = sequence.input_tokens + sequence.output_tokens_at(running.decode_step) - 1
        if tokens % self.block_size or sequence.handle in self._ahead:
            return True
        if not self.free_blocks(running):
            return False
        self._ahead[sequence.handle] = 1
        self._num_ahead += 1
        return True

    def covered_all(self, running: Running) -> None:
        """Note that every sequence that still decodes has its blocks for the coming step."""
        self._ahead.clear()
        self._num_ahead = 0
        if running.num_decoding:
            self._covered_step = running.decode_step

    def cover(self, running: Running, sequence: Sequence, num_tokens: int) -> bool:
        """Take the blocks of a sequence in prefill up to this number of its tokens, if there are enough."""
        missing = self.missing_for(sequence, num_tokens)
        if missing:
            if missing > self.free_blocks(running):
                return False
            self._prefill_blocks[sequence.handle] = self._prefill_blocks.get(sequence.handle, 0) + missing
            self._num_prefill_blocks += missing
            self._enough_until = self._enough_version = -1
        return True

    def evict(self, running: Running) -> None:
        """Evict the cached blocks whose places have been taken."""
        shared = self.shared
        if shared is not None and shared.num_unpinned:
            shared.shrink(self.free_blocks(running) * self.block_size)

    # --- admission --------------------------------------------------------------------------------------------------

    def can_enter(
        self,
        running: Running,
        sequence: Sequence,
        cached_tokens: int,
        num_tokens: int,
        adapter_slots: int,
        beside: bool,
    ) -> bool:
        """Return whether a waiting sequence has its blocks.

        Args:
            running: the batch, without those that have entered in this pass; the blocks of these are taken.
            sequence: whose first `cached_tokens` a prefix cache holds.
            cached_tokens: see there.
            num_tokens: how far the coming step computes it.
            adapter_slots: pool slots of the adapters of the batch, of those that have entered, and of this one.
            beside: whether anything else runs, or has entered in this pass.
        """
        free = self.free_blocks(running) - (self.watermark_blocks if beside else 0)
        if adapter_slots:
            free -= self.blocks_for(adapter_slots) - self.blocks_for(running.adapter_slots)
        if self.reserve_full_input:
            num_tokens = sequence.input_tokens
        found = 0 if self.shared is None or not cached_tokens else self.shared.num_shareable(sequence)
        return self.blocks_for(num_tokens) - found <= free

    def trial(self, running: Running) -> Trial:
        """Begin an estimate of what could enter (`headroom`): whole inputs, without what a cache holds."""
        return _OnDemandTrial(self, running)

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return when the sequence may find more in the prefix cache; otherwise, while nothing leaves, less is free."""
        return limit if self.shared is None else self.shared.steps_unchanged(sequence, limit)

    # --- coming and going -------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        """Nothing: `cover` has taken what it needs."""

    def left(self, sequence: Sequence) -> None:
        """Free its blocks."""
        self._num_ahead -= self._ahead.pop(sequence.handle, 0)
        super().left(sequence)

    def stop_growing(self, sequence: Sequence, running: Running) -> None:
        """Keep the blocks of a decoding sequence that does not decode again."""
        super().stop_growing(sequence, running)
        ahead = self._ahead.pop(sequence.handle, 0)
        self._num_ahead -= ahead
        self._prefill_blocks[sequence.handle] += ahead
        self._num_prefill_blocks += ahead

    # --- running out ------------------------------------------------------------------------------------------------

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return how many decode steps have their blocks, 0 to `limit`; exact."""
        growth, step = self._growth, running.decode_step
        if step + limit - 1 <= self._enough_until:
            return limit
        spare = self._room(running.adapter_slots) - self.needed_blocks(running)
        return 0 if spare < 0 else 1 + growth.steps_within(step, spare, limit - 1)

    def chunks_before_full(self, running: Running, chunk: Chunk, limit: int) -> int:
        """Return over how many steps, 1 to `limit`, all have their blocks if this prompt goes on by equal chunks.

        The first of them has been covered. Cost: O(block_size log limit).
        """
        held, others = self._prefill_blocks.get(chunk.handle, 0), self._others()
        room, step = self._room(running.adapter_slots), running.decode_step
        fewest, most = 1, limit
        while fewest < most:
            steps = (fewest + most + 1) // 2
            more = self.blocks_for(chunk.past_tokens + steps * chunk.new_tokens) - held
            grown = self._growth.blocks(step + steps - 1) if running.num_decoding else 0
            if grown + others + more <= room:
                fewest = steps
            else:
                most = steps - 1
        return fewest

    def victim(self, running: Running) -> Sequence | None:
        """Return None: the way to batch preempts."""
        return None


class _OnDemandTrial(Trial):
    """What could enter beside what runs; an estimate."""

    def __init__(self, memory: OnDemandMemory, running: Running) -> None:
        self._memory = memory
        self._adapter_slots = running.adapter_slots
        self._num_sequences = len(running)
        self._free = memory.free_blocks(running)

    def test(self, sequence: Sequence) -> Check:
        """Test one more sequence."""
        memory = self._memory
        blocks = memory.blocks_for(sequence.input_tokens)
        most = self._free - (memory.watermark_blocks if self._num_sequences else 0)
        peak_tokens = (memory.num_blocks - self._free + blocks) * memory.block_size
        return Check(sequence, peak_tokens, self._adapter_slots, self._num_sequences + 1, blocks <= most)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that passed as taken."""
        self._free -= self._memory.blocks_for(sequence.input_tokens)
        self._num_sequences += 1
