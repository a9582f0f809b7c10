"""Paged KV memory: blocks on demand, and preemption when they run out.

vLLM's way (Kwon et al., SOSP 2023; vllm/core/block_manager.py and scheduler.py of its first engine). The pool is cut
into blocks of `block_size` tokens. A sequence enters when there are blocks for its input; it takes another one when it
crosses a block's border. If the next decode step finds none, the sequence that arrived last gives up all its blocks and
waits again; what it had produced is then part of its input, and is computed anew ("recompute").

    needed blocks = sum of ceil(tokens / block_size) - shared ones counted twice

where a sequence's tokens include the one that the coming decode step caches: input + output so far. So a batch whose
need fits can decode, and admission, which may not raise the need above the pool, leaves decoding its blocks. A
watermark (a share of the pool) stays free at admission beside a running batch, so that the first blocks of a new
sequence are not at once taken from another; an empty batch needs none, or one sequence of nearly the pool's size could
never come back.

`NoEvictMemory` never preempts.

Adapters in use take their slots from the same pool, together rounded up to whole blocks. Blocks of a prefix cache that
several sequences pin count once. Unpinned ones are free memory: the cache evicts them on demand.
"""

from typing import TYPE_CHECKING, Final

from lorrery.scheduler.core.memory.base import BlockUse, Check, Memory, Trial
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.machine_ints import sum_of_last

if TYPE_CHECKING:
    from mypy_extensions import i64

_EVER: Final = 1 << 60


class BlockGrowth:
    """How many KV blocks a set of growing sequences needs, now and after any number of decode steps.

    Every decoding sequence gains one token per step, so sequence i holds `g + h_i` tokens when the decode-step counter
    is g, and needs ceil((g + h_i) / size) blocks. Write h_i + size - 1 = q_i * size + r_i with 0 <= r_i < size, and
    g = G * size + s likewise. Then

        sum of blocks = sum(q_i) + n * G + number of sequences with r_i >= size - s

    so a count of sequences per residue r is all the state: a step costs nothing, a query O(size), whatever the batch.
    After `size` steps every sequence has taken exactly one more block, so the first step that runs out is found by
    whole periods and a scan of at most `size` residues.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_at: list[i64] = [0] * block_size
        self._whole_blocks = 0
        self._num = 0
        self._known_step = -2  # the step at which `blocks` returned `_known_blocks`; never before step -1
        self._known_blocks = 0

    def __len__(self) -> int:
        return self._num

    def add(self, tokens_at_0: int) -> None:
        """Count a sequence that would hold this many tokens at decode step 0; may be negative."""
        tokens = tokens_at_0 + self.block_size - 1
        self._whole_blocks += tokens // self.block_size
        self._num_at[tokens % self.block_size] += 1
        self._num += 1
        self._known_step = -2

    def remove(self, tokens_at_0: int) -> None:
        """Uncount a sequence that was added with the same number."""
        tokens = tokens_at_0 + self.block_size - 1
        self._whole_blocks -= tokens // self.block_size
        self._num_at[tokens % self.block_size] -= 1
        self._num -= 1
        self._known_step = -2

    def blocks(self, decode_step: int) -> int:
        """Return the blocks that all sequences need at this value of the decode-step counter; repeated calls O(1)."""
        if decode_step != self._known_step:
            periods, phase = decode_step // self.block_size, decode_step % self.block_size
            self._known_step = decode_step
            self._known_blocks = self._whole_blocks + self._num * periods + sum_of_last(self._num_at, phase)
        return self._known_blocks

    def last_step_surely_within(self, num_blocks: int) -> int:
        """Return a decode step up to which `blocks` is at most `num_blocks`; less than two periods later it is more.

        Follows from `blocks <= whole blocks + n * (G + 1)`. Negative: no step. Cost: O(1).
        """
        if not self._num:
            return _EVER if num_blocks >= 0 else -1
        return (num_blocks - self._whole_blocks) // self._num * self.block_size - 1

    def steps_within(self, decode_step: int, spare_blocks: int, limit: int) -> int:
        """Return for how many further steps all sequences together grow by at most `spare_blocks` (>= 0) blocks.

        Args:
            decode_step: the counter now.
            spare_blocks: blocks that they may take.
            limit: upper bound on the result.
        """
        size = self.block_size
        if self._num * (limit // size + 1) <= spare_blocks:
            return limit
        periods, spare_blocks = divmod(spare_blocks, self._num)
        steps = periods * size
        for step in range(decode_step, decode_step + size):
            # Between `step` and the next one, sequences with the residue that completes a block take another.
            spare_blocks -= self._num_at[-(step + 1) % size]
            if spare_blocks < 0:
                break
            steps += 1
        return min(steps, limit)


class PagedMemory(Memory):
    """A pool of blocks.

    Args:
        pool_tokens: size of the pool, adapters included; an incomplete last block is not used.
        block_size: tokens in a block.
        watermark: share of the blocks that admission leaves free beside a batch.
        shared: blocks that a prefix cache holds in this pool; None: nothing is shared.
    """

    def __init__(
        self, pool_tokens: int, *, block_size: int = 16, watermark: float = 0.01, shared: SharedBlocks | None = None
    ) -> None:
        self.block_size = block_size
        self.num_blocks = pool_tokens // block_size
        self.watermark_blocks = int(watermark * self.num_blocks)
        self.shared = shared
        self._pool_tokens = pool_tokens
        self._growth = BlockGrowth(block_size)
        self._tokens_at_0: dict[int, int] = {}
        self._prefill_blocks: dict[int, int] = {}  # of those that do not decode: in prefill, or at their end
        self._num_prefill_blocks = 0
        # Up to this decode step the batch surely has its blocks, as it was at that version or with fewer sequences.
        self._enough_until = self._enough_version = -1

    # --- how much is needed -----------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that this many tokens or slots take."""
        return -(-num_tokens // self.block_size)

    def newcomer_blocks(self, sequence: Sequence) -> int:
        """Return the blocks of an input and of the first token after it, unless that is the last."""
        return self.blocks_for(sequence.input_tokens + (sequence.budget_tokens > 1))

    def needed_blocks(self, running: Running, num_steps: int = 0) -> int:
        """Return the blocks that the batch needs for a decode step that follows `num_steps` others; O(block_size)."""
        return self._growth.blocks(running.decode_step + num_steps) + self._others()

    def _others(self) -> int:
        """Return the blocks of those that do not decode, less those that several share."""
        blocks, shared = self._num_prefill_blocks, self.shared
        return blocks if shared is None else blocks + shared.num_pinned - shared.num_pins

    def used_blocks(self, running: Running) -> int:
        """Return the blocks that the batch and its adapters have, those that the coming decode step takes included."""
        return self.blocks_for(running.adapter_slots) + self.needed_blocks(running)

    def claim_of(self, sequence: Sequence) -> int:
        """Return the blocks that must be free for a sequence to enter."""
        return self.newcomer_blocks(sequence)

    def claimed_blocks(self, running: Running) -> int:
        """Return the blocks that count as the batch's at admission."""
        return self.needed_blocks(running)

    def _surely_suffices(self, running: Running, num_steps: int) -> bool:
        """Return whether an O(1) upper bound already shows that the batch has its blocks that far ahead."""
        step = running.decode_step + num_steps
        if step > self._enough_until and self._enough_version != running.version:
            left = self._room(running.adapter_slots) - self._others()
            self._enough_until = self._growth.last_step_surely_within(left)
            self._enough_version = running.version
        return step <= self._enough_until

    def _room(self, adapter_slots: int) -> int:
        return self.num_blocks - self.blocks_for(adapter_slots) if adapter_slots else self.num_blocks

    def block_use(self, running: Running) -> BlockUse:
        """Return the use of blocks; see `used_blocks`."""
        used = self.used_blocks(running)
        cached = self.shared.num_unpinned if self.shared is not None else 0
        return BlockUse(used, cached, self.num_blocks - used - cached, self.block_size)

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return the tokens of whole blocks left free after a decode step that follows `num_steps` others."""
        return (self._room(running.adapter_slots) - self.needed_blocks(running, num_steps)) * self.block_size

    # --- admission --------------------------------------------------------------------------------------------------

    def trial(self, running: Running) -> Trial:
        """Begin an admission pass. Cost: O(block_size)."""
        return _PagedTrial(self, running)

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return `limit`: while nothing leaves, the batch only grows; 1 if output may be found as it fills blocks."""
        return 1 if self.shared is not None and self.shared.share_within_plan else limit

    @property
    def capacity(self) -> tuple[int, ...]:
        """What `can_ever_hold` depends on."""
        return self._pool_tokens, self.block_size

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None if an empty pool holds the sequence to its end, else why not."""
        slots = sequence.adapter.slots if sequence.adapter is not None else 0
        tokens = sequence.input_tokens + sequence.budget_tokens - 1  # the last token produced is never cached
        if self.blocks_for(tokens) <= self._room(slots):
            return None
        return (
            f"prompt and output need {tokens} tokens and the adapter takes {slots} slots;"
            f" max_total_token_num is {self._pool_tokens}, in blocks of {self.block_size}"
        )

    # --- coming and going -------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        """Allocate the blocks of its input and of the first token after it."""
        blocks = self.newcomer_blocks(sequence)
        self._prefill_blocks[sequence.handle] = blocks
        self._num_prefill_blocks += blocks
        self._enough_until = self._enough_version = -1

    def joined(self, sequence: Sequence) -> None:
        """Count its growth by a token in every decode step."""
        self._forget_prefill(sequence.handle)
        self._tokens_at_0[sequence.handle] = tokens_at_0 = sequence.input_tokens - sequence.base_step
        self._growth.add(tokens_at_0)
        self._enough_until = self._enough_version = -1

    def left(self, sequence: Sequence) -> None:
        """Free its blocks."""
        tokens_at_0 = self._tokens_at_0.get(sequence.handle)
        if tokens_at_0 is None:
            self._forget_prefill(sequence.handle)
            return
        del self._tokens_at_0[sequence.handle]
        self._growth.remove(tokens_at_0)

    def stop_growing(self, sequence: Sequence, running: Running) -> None:
        """Keep the blocks of a decoding sequence that does not decode again."""
        tokens_at_0 = self._tokens_at_0.pop(sequence.handle)
        self._growth.remove(tokens_at_0)
        blocks = self.blocks_for(tokens_at_0 + running.decode_step - 1)
        self._prefill_blocks[sequence.handle] = blocks
        self._num_prefill_blocks += blocks
        self._enough_until = self._enough_version = -1

    def _forget_prefill(self, handle: int) -> None:
        self._num_prefill_blocks -= self._prefill_blocks.pop(handle)

    # --- running out ------------------------------------------------------------------------------------------------

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return how many decode steps have their blocks; exact, at least 1 if `victim` has returned None."""
        if limit <= 1 or self._surely_suffices(running, limit - 1):
            return limit
        spare = self._room(running.adapter_slots) - self.needed_blocks(running)
        return 1 + self._growth.steps_within(running.decode_step, max(0, spare), limit - 1)

    def victim(self, running: Running) -> Sequence | None:
        """Return the sequence that arrived last, if the next decode step lacks blocks; never the only one.

        Cost: O(block_size) if no block is missing, else O(batch).
        """
        if running.decode_step <= self._enough_until or self._surely_suffices(running, 0):
            return None
        if self.needed_blocks(running) <= self._room(running.adapter_slots) or len(running) == 1:
            return None  # a single sequence has its blocks to the end, see `can_ever_hold`
        present: list[Sequence] = [*running, *running.prefilling.values()]
        return max(present, key=lambda sequence: (sequence.arrived_ps, sequence.handle))


class _PagedTrial(Trial):
    """One pass over candidates. What it takes is not in the memory's counts yet, but already pins its shared blocks."""

    def __init__(self, memory: PagedMemory, running: Running) -> None:
        self._memory = memory
        self._running = running
        self._num_sequences = len(running)
        # Shared blocks change as sequences of this pass pin them; own blocks are allocated at its end.
        self._claimed_blocks = memory.claimed_blocks(running) if memory.shared is None else None
        self._taken_blocks = 0
        self._tested: Sequence | None = None  # last, and its claim
        self._claim = 0
        self._new_adapters: set[str] = set()
        self._adapter_slots = running.adapter_slots

    def test(self, sequence: Sequence) -> Check:
        """Test one more sequence."""
        memory = self._memory
        slots = self._slots_with(sequence.adapter)
        claimed = self._claimed_blocks
        if claimed is None:
            claimed = memory.claimed_blocks(self._running)
        self._tested, self._claim = sequence, memory.claim_of(sequence)
        blocks = claimed + self._taken_blocks + self._claim
        if memory.shared is not None and not sequence.skips_prefix_cache:
            blocks -= memory.shared.num_shareable(sequence)
        most = memory.num_blocks - memory.blocks_for(slots)
        if self._num_sequences:
            most -= memory.watermark_blocks
        return Check(sequence, blocks * memory.block_size, slots, self._num_sequences + 1, blocks <= most)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that passed as taken."""
        self._taken_blocks += self._claim if sequence is self._tested else self._memory.claim_of(sequence)
        self._num_sequences += 1
        if sequence.adapter is not None:
            self._adapter_slots = self._slots_with(sequence.adapter)
            self._new_adapters.add(sequence.adapter.key)

    def _slots_with(self, adapter: Adapter | None) -> int:
        if adapter is None or self._running.uses(adapter.key) or adapter.key in self._new_adapters:
            return self._adapter_slots
        return self._adapter_slots + adapter.slots


class NoEvictMemory(PagedMemory):
    """Paged memory without preemption: a sequence enters when there are blocks for all that it may still produce.

    TensorRT-LLM's GUARANTEED_NO_EVICT (NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp): the
    sum of what every admitted sequence needs at its end, in blocks, stays within the pool.

        claimed blocks = sum of ceil((input + most output - 1) / block_size) - shared ones counted twice

    Blocks are still taken one by one, so a prefix cache may use those that are claimed and not taken yet.
    `memory = 'peak'` claims less: it takes into account that sequences end at different times.

    Args:
        pool_tokens: size of the pool, adapters included; an incomplete last block is not used.
        block_size: tokens in a block.
        shared: blocks that a prefix cache holds in this pool; None: nothing is shared.
    """

    reserved = True

    def __init__(self, pool_tokens: int, *, block_size: int = 16, shared: SharedBlocks | None = None) -> None:
        super().__init__(pool_tokens, block_size=block_size, watermark=0.0, shared=shared)
        self._claims: dict[int, int] = {}
        self._num_claimed = 0

    def claim_of(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence has at its end; the last token produced is never cached."""
        return self.blocks_for(sequence.input_tokens + sequence.budget_tokens - 1)

    def claimed_blocks(self, running: Running) -> int:
        """Return the blocks that the batch has once every sequence has produced all it may."""
        blocks = self._num_claimed
        if self.shared is not None:
            blocks += self.shared.num_pinned - self.shared.num_pins
        return blocks

    def admitted(self, sequence: Sequence) -> None:
        """Claim the blocks of its end, and allocate those of its input and of the first token after it."""
        super().admitted(sequence)
        self._claims[sequence.handle] = blocks = self.claim_of(sequence)
        self._num_claimed += blocks

    def left(self, sequence: Sequence) -> None:
        """Free its blocks, and what it claimed."""
        super().left(sequence)
        self._num_claimed -= self._claims.pop(sequence.handle)

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return `limit`: every step has its blocks."""
        return limit

    def victim(self, running: Running) -> Sequence | None:
        """Return None: nothing is preempted."""
        return None
