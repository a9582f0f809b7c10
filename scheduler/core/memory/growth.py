"""How many KV blocks a set of growing sequences needs, now and after any number of decode steps.

Every decoding sequence gains one token per step, so sequence i holds `g + h_i` tokens when the decode-step counter is
g, and needs ceil((g + h_i) / size) blocks. Write h_i + size - 1 = q_i * size + r_i with 0 <= r_i < size, and
g = G * size + s likewise. Then

    sum of blocks = sum(q_i) + n * G + number of sequences with r_i >= size - s

so a count of sequences per residue r is all the state: a step costs nothing, a query O(size), whatever the batch. After
`size` steps every sequence has taken exactly one more block, so the first step that runs out is found by whole periods
and a scan of at most `size` residues.
"""

from typing import TYPE_CHECKING, Final

from lorrery.vocabulary.machine_ints import sum_of_last

if TYPE_CHECKING:
    from mypy_extensions import i64

_EVER: Final = 1 << 60


class BlockGrowth:
    """Growing sequences by the residue of their length.

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
