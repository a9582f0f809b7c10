"""Paged KV memory without preemption: a sequence enters when there are blocks for all that it may still produce.

TensorRT-LLM's GUARANTEED_NO_EVICT (NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp): the
sum of what every admitted sequence needs at its end, in blocks, stays within the pool.

    claimed blocks = sum of ceil((input + most output - 1) / block_size) - shared ones counted twice

Blocks are still taken one by one, so a prefix cache may use those that are claimed and not taken yet. `memory = 'peak'`
claims less: it takes into account that sequences end at different times.
"""

from lorrery.scheduler.core.memory.paged import PagedMemory
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class NoEvictMemory(PagedMemory):
    """A pool of blocks in which an admitted sequence has all it will ever need.

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
