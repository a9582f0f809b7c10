"""SGLang's KV memory: pages on demand, with an estimate of what running sequences will still take.

A sequence enters if all that it may produce fits beside what the running ones are thought to produce (the pass is
`core.budgeted_admission`):

    input - cached + remaining output + a page < free + cached and unused - sum over running (remaining output x ratio)

The *new-token ratio* falls linearly with each decode step, from `init` to `least`, since most requests end early. When
the next decode step lacks pages, sequences are retracted, and the ratio becomes what those that stay have shown:

    ratio = min(1, (their output + retract_decode_steps x their number) / (their max_new_tokens + 1))

An idle engine starts again with `init`. sgl-project/sglang (0.5.23), srt/managers/schedule_policy.py,
scheduler_components/new_token_ratio_tracker.py, schedule_batch.py (`retract_decode`) and mem_cache/allocation.py.

The ratio is a float, as there. It is computed in the same order from the same numbers, so it is the same one in every
run, however many steps are committed at a time.

Unlike in `paged`, a prompt takes pages chunk by chunk, the pages of adapters lie elsewhere, and it is the way to batch
that retracts (`batching.sglang`), since only a decode step needs room.
"""

from lorrery.scheduler.core.memory.base import Check, Trial
from lorrery.scheduler.core.memory.paged import PagedMemory
from lorrery.scheduler.core.overlap import NOTHING, Unseen
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.replica_settings import DEFAULT, SglangRules
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class NewTokenRatio:
    """What share of their remaining tokens running sequences are thought to use.

    Attributes:
        current: the ratio now.
    """

    __slots__ = ("_decay", "_init", "_least", "_retract_decode_steps", "current")

    def __init__(self, rules: SglangRules = DEFAULT) -> None:
        self._init = min(rules.init_new_token_ratio * rules.schedule_conservativeness, 1.0)
        self._least = min(self._init * rules.min_new_token_ratio_factor, 1.0)
        self._decay = (self._init - self._least) / rules.new_token_ratio_decay_steps
        self._retract_decode_steps = rules.retract_decode_steps
        self.current = self._init

    def decay(self, num_steps: int) -> None:
        """Lower the ratio once for each decode step; at most as often as it takes to reach the least."""
        current, decay, least = self.current, self._decay, self._least
        for _ in range(num_steps):
            if current <= least:
                break
            current = max(current - decay, least)
        self.current = max(current, least) if num_steps else current

    def reset(self) -> None:
        """Start again: the engine is idle."""
        self.current = self._init

    def retracted(self, num_left: int, output_tokens: int, max_new_tokens: int) -> None:
        """Set the ratio by the sequences that stay: their number, their output, and their limits together."""
        expected = output_tokens + self._retract_decode_steps * num_left
        self.current = min(1.0, expected / (max_new_tokens + 1))


class EstimatedMemory(PagedMemory):
    """A pool of pages.

    Args:
        pool_tokens: size of the pool; an incomplete last page is not used.
        page_size: tokens in a page.
        shared: pages that a prefix cache holds in this pool; None: nothing is shared.
        rules: SGLang's settings.

    Attributes:
        ratio: the new-token ratio.
        decodes: whether the coming step decodes, so that it needs pages; set by the way to batch.
    """

    def __init__(
        self, pool_tokens: int, *, page_size: int = 1, shared: RadixCache | None = None, rules: SglangRules = DEFAULT
    ) -> None:
        super().__init__(pool_tokens, block_size=page_size, watermark=0.0, shared=shared)
        self.cache = shared
        self.rules = rules
        self.ratio = NewTokenRatio(rules)
        self.decodes = False

    # --- how much is used -------------------------------------------------------------------------------------------

    def _room(self, adapter_slots: int) -> int:
        return self.num_blocks  # adapters have a pool of their own

    def newcomer_blocks(self, sequence: Sequence) -> int:
        """Return the pages that a sequence has when it enters: those that it found; chunks take more (`extend`)."""
        return self.blocks_for(sequence.computed_tokens)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the pages of a prompt up to the end of its next chunk."""
        blocks = self.blocks_for(num_tokens)
        self._num_prefill_blocks += blocks - self._prefill_blocks[sequence.handle]
        self._prefill_blocks[sequence.handle] = blocks
        self._enough_until = self._enough_version = -1

    def free_tokens(self, running: Running) -> int:
        """Return the tokens of pages that neither sequences nor the cache have."""
        unpinned = 0 if self.shared is None else self.shared.num_unpinned
        return (self.num_blocks - self.used_blocks(running) - unpinned) * self.block_size

    def used_blocks(self, running: Running) -> int:
        """Return the pages that the batch has, without those that the coming step takes."""
        return self.needed_blocks(running, -1)

    def evictable_tokens(self) -> int:
        """Return the tokens of cached pages that no sequence uses."""
        return 0 if self.shared is None else self.shared.num_unpinned * self.block_size

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return the tokens that unused cached pages may take in a decode step that follows `num_steps` others.

        Before its allocation the original has a whole page free for each sequence, although few need one.
        """
        if not self.decodes:
            return self.num_blocks * self.block_size
        pages = self.num_blocks - self.needed_blocks(running, num_steps - 1) - running.num_decoding
        return pages * self.block_size

    def make_free(self, running: Running, num_tokens: int) -> bool:
        """Evict cached pages until this many tokens are free; return whether they are."""
        missing = num_tokens - self.free_tokens(running)
        if missing <= 0:
            return True
        if self.shared is None:
            return False
        self.shared.shrink(self.evictable_tokens() - missing)
        return self.free_tokens(running) >= num_tokens

    def decode_tokens(self, running: Running) -> int:
        """Return the tokens of the pages that the next decode step takes."""
        return (self.needed_blocks(running) - self.needed_blocks(running, -1)) * self.block_size

    # --- admission --------------------------------------------------------------------------------------------------

    def clipped(self, new_tokens: int) -> int:
        """Return what counts of tokens that a sequence may still produce."""
        return min(new_tokens, self.rules.clip_max_new_tokens)

    def expected_tokens(self, running: Running, unseen: Unseen = NOTHING) -> float:
        """Return what decoding sequences are thought to take yet. A sum in their order, as in the original.

        Sequences that ignore the end-of-sequence token are thought to take all that they may, as since 0.5.22.
        """
        ratio, most, step = self.ratio.current, self.rules.clip_max_new_tokens, running.decode_step
        if_ignoring = 1.0 if self.rules.reserve_ignored_eos else ratio
        return sum(
            [
                min(one.base_step + one.budget_tokens - step + unseen.of(one), most)
                * (if_ignoring if one.ignore_eos else ratio)
                for one in running
            ],
            0.0,
        )

    def trial(self, running: Running) -> Trial:
        """Begin a test of what could enter, for others than SGLang's own pass. Cost: O(batch)."""
        return _EstimatedTrial(self, running)

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None if an empty pool admits the sequence, else why not.

        SGLang lowers `max_new_tokens` instead, so that it does.
        """
        new_tokens = self.clipped(sequence.budget_tokens)
        tokens = -(-sequence.input_tokens // self.block_size) * self.block_size + new_tokens + self.block_size
        whole = sequence.input_tokens + sequence.budget_tokens - 1
        most = self.num_blocks * self.block_size
        if tokens < most and whole <= most:
            return None
        return (
            f"prompt and output may take {max(tokens + 1, whole)} tokens of whole pages;"
            f" max_total_token_num is {self._pool_tokens}, in pages of {self.block_size}"
        )

    # --- running out ------------------------------------------------------------------------------------------------

    def victim(self, running: Running) -> Sequence | None:
        """Return None: the way to batch retracts."""
        return None


class _EstimatedTrial(Trial):
    """What could enter beside the batch, by the estimate. Cached prefixes are not counted."""

    def __init__(self, memory: EstimatedMemory, running: Running) -> None:
        self._memory = memory
        self._num_sequences = len(running)
        self._prefilling = sum(
            one.input_tokens - one.computed_tokens + memory.clipped(one.budget_tokens)
            for one in running.prefilling.values()
        )
        left = memory.free_tokens(running) + memory.evictable_tokens() - self._prefilling
        self._left = left - memory.expected_tokens(running)
        self._taken = 0

    def _tokens(self, sequence: Sequence) -> int:
        memory = self._memory
        return sequence.input_tokens + memory.clipped(sequence.budget_tokens) + memory.block_size

    def test(self, sequence: Sequence) -> Check:
        """Test one more sequence."""
        tokens = self._taken + self._tokens(sequence)
        return Check(sequence, tokens, 0, self._num_sequences + 1, tokens < self._left)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that passed as taken."""
        self._taken += self._tokens(sequence)
        self._num_sequences += 1
