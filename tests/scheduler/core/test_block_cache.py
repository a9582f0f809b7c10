"""The cache of extents against the one that keeps a node for each block, and its rules one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.memory.base import UnlimitedMemory
from lorrery.scheduler.core.plan import Chunk, Plan
from lorrery.scheduler.core.prefix_cache.base import of_runs
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlocksStored
from lorrery.scheduler.core.prefix_cache.extents import root_name
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from tests.scheduler.core.cache_copy import CacheCopy
from tests.scheduler.core.oracle.blocks import BlockCache as Oracle

BLOCK, EXAMPLES = 2, 12
ADAPTERS = {None: None, "a": Adapter("a", 8), "a@3": Adapter("a", 16, version=3), "b": Adapter("b", 8)}


class _Spare(UnlimitedMemory):
    """A memory that leaves so many tokens spare after so many steps."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        return self.tokens[num_steps]


class CacheMachine(RuleBasedStateMachine):
    """Plans admit sequences in chunks, steps compute them, they decode and leave, in any order; blocks are evicted.

    Prompts are runs of tokens that begin alike. With `by_id` the cache gets the ids of the runs instead of tokens.
    """

    block, by_id, min_computed_tokens = BLOCK, False, 1
    RUN = 6

    def __init__(self) -> None:
        super().__init__()
        more = {"min_computed_tokens": self.min_computed_tokens}
        self.cache, self.oracle = BlockCache(self.block, **more), Oracle(self.block, **more)
        self.noted = False
        self.batch: dict[int, tuple[Sequence, Sequence]] = {}
        self.waiting: list[tuple[Sequence, Sequence]] = []
        self.chunks: list[tuple[int, int]] = []
        self.num_handles = 0
        self.copy = CacheCopy()

    @rule(
        runs=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=6),
        cut=st.integers(0, RUN - 1),
        output=st.integers(1, 9),
        adapter=st.sampled_from([None, None, None, "a"]),
        salt=st.sampled_from(["", "", "", "pepper"]),
    )
    def arrive(self, runs: list[int], cut: int, output: int, adapter: str | None, salt: str) -> None:
        self.num_handles += 1
        tokens = [run * self.RUN + number for run in runs for number in range(self.RUN)][: len(runs) * self.RUN - cut]
        output_ids = [] if self.by_id else [(runs[0] + number) % 3 for number in range(output)]
        both = [
            Sequence(self.num_handles, len(tokens), output, 0, ADAPTERS[adapter], "", tokens, output_ids)
            for _ in range(2)
        ]
        for one in both:
            one.cache_salt = salt
        if self.by_id:
            both[0].prompt_token_ids = ()
            both[0].content = of_runs(runs, self.RUN, len(tokens))
        self.waiting.append((both[0], both[1]))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def look_up(self, which: int) -> None:
        ours, theirs = self.waiting[which % len(self.waiting)]
        before = self.cache.paths()
        assert self.cache.reusable(ours) == self.oracle.reusable(theirs)
        assert self.cache.num_shareable(ours) == self.oracle.num_shareable(theirs)
        if not self.by_id:
            key = ours.adapter.key if ours.adapter is not None else None
            found = self.cache.match(ours.prompt_token_ids, key, ours.cache_salt)
            assert found == self.oracle.match(theirs.prompt_token_ids, root_name(key, ours.cache_salt))
        assert self.cache.paths() == before

    @invariant()
    def who_waits(self) -> None:
        """Look up one that goes on waiting after each change, as a blocked pass does: the last result is kept."""
        if self.waiting:
            ours, theirs = self.waiting[-1]
            assert self.cache.num_shareable(ours) == self.oracle.num_shareable(theirs)
            assert self.cache.reusable(ours) == self.oracle.reusable(theirs)

    @precondition(lambda self: not self.chunks)
    @rule(budget=st.sampled_from([3, 8, 20, 60]), most=st.integers(0, 3))
    def plan(self, budget: int, most: int) -> None:
        for ours, _ in self.batch.values():
            budget = self._chunk(ours, budget)
        while budget > 0 and most and self.waiting:
            most -= 1
            ours, theirs = self.waiting.pop(0)
            for cache, sequence in ((self.cache, ours), (self.oracle, theirs)):
                usable = min(cache.reusable(sequence), sequence.input_tokens - self.min_computed_tokens)
                sequence.cached_tokens = sequence.computed_tokens = usable
                cache.acquire(sequence)
            assert ours.cached_tokens == theirs.cached_tokens
            self.batch[ours.handle] = (ours, theirs)
            budget = self._chunk(ours, budget)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        new_tokens = min(sequence.input_tokens - sequence.computed_tokens, budget)
        if new_tokens > 0:
            self.chunks.append((sequence.handle, new_tokens))
        return budget - new_tokens

    @precondition(lambda self: self.chunks)
    @rule()
    def commit(self) -> None:
        for handle, new_tokens in self.chunks:
            for cache, sequence in zip((self.cache, self.oracle), self.batch[handle], strict=True):
                sequence.computed_tokens += new_tokens
                cache.commit(sequence)
        self.chunks.clear()

    @precondition(lambda self: not self.chunks)
    @rule(piece=st.integers(1, 8), spare_blocks=st.lists(st.integers(0, 12), min_size=2, max_size=5))
    def stretch(self, piece: int, spare_blocks: list[int]) -> None:
        """Let steps go on with one long prompt, as a batch does; decodes leave each of them less room."""
        if not any(ours.input_tokens > ours.computed_tokens for ours, _ in self.batch.values()):
            self.plan(piece, 1)
            self.commit()
        spare = _Spare([num_blocks * self.block for num_blocks in sorted(spare_blocks, reverse=True)])
        for both in self.batch.values():
            num_steps = min(len(spare_blocks), (both[0].input_tokens - both[0].computed_tokens - 1) // piece)
            if num_steps < 2:
                continue
            for cache, sequence in zip((self.cache, self.oracle), both, strict=True):
                chunk = Chunk(sequence, piece, sequence.computed_tokens, samples=False)
                Batch(spare, cache).advance_chunks(Plan(0, 1, (chunk,), decode=True), num_steps)
            break

    @precondition(lambda self: self.chunks and not any(self.batch[handle][0].produced_tokens for handle in self.batch))
    @rule()
    def never_run(self) -> None:
        """End those that a plan let in before its step has run."""
        self.chunks.clear()
        for handle in reversed(list(self.batch)):
            self._leave(handle, 0)

    @precondition(lambda self: self.batch and not self.chunks)
    @rule(which=st.integers(0, 20), most=st.integers(1, 9), again=st.booleans())
    def leave(self, which: int, most: int, again: bool) -> None:
        handle = list(self.batch)[which % len(self.batch)]
        ours, theirs = self._leave(handle, most)
        if again and ours.budget_tokens > 0:  # preempted: its output is input now
            self.waiting.insert(0, (ours, theirs))
            self.look_up(0)

    def _leave(self, handle: int, most: int) -> tuple[Sequence, Sequence]:
        both = self.batch.pop(handle)
        for cache, sequence in zip((self.cache, self.oracle), both, strict=True):
            through = sequence.computed_tokens == sequence.input_tokens
            output_tokens = min(most, sequence.budget_tokens) if through else 0
            cache.release(sequence, output_tokens)
            sequence.requeue(output_tokens, 0)
        return both

    @rule(num_blocks=st.sampled_from([0, 1, 2, 4, 7, 12]), odd=st.integers(-1, 1))
    def shrink(self, num_blocks: int, odd: int) -> None:
        for cache in (self.cache, self.oracle):
            cache.shrink(num_blocks * self.block + odd)

    @precondition(lambda self: self.num_handles % 6 == 5)  # seldom, or there would be little to forget
    @rule()
    def lose(self) -> None:
        for cache in (self.cache, self.oracle):
            cache.lose()
        self.copy = CacheCopy()
        self.batch.clear()
        self.chunks.clear()
        self.num_handles += 1

    @precondition(lambda self: not self.by_id)
    @rule()
    def listen(self) -> None:
        self.noted = not self.noted
        for cache in (self.cache, self.oracle):
            cache.note_changes(self.noted)
        if self.noted:
            self.copy = CacheCopy()
            self.copy.apply(self.cache.contents())
            theirs = CacheCopy()
            theirs.apply(self.oracle.contents())
            assert self.copy.blocks == theirs.blocks

    @invariant()
    def same(self) -> None:
        ours, theirs = self.cache, self.oracle
        paths = ours.paths()
        assert paths == theirs.paths()
        assert (ours.num_pins, ours.num_pinned) == (theirs.num_pins, theirs.num_pinned)
        assert (ours.num_unpinned, ours.num_evictions) == (theirs.num_unpinned, theirs.num_evictions)
        assert ours.num_extents <= 2 * self.num_handles
        changes = ours.take_changes()
        assert [told(change) for change in changes] == [told(change) for change in theirs.take_changes()]
        if self.noted:
            self.copy.apply(changes)
            assert max(self.copy.num_copies.values(), default=0) <= 1, "stored twice"
            assert self.copy.paths() == {(name, tokens) for name, tokens, _ in paths}


def told(change: BlockChange) -> object:
    """Return all that a change says."""
    if isinstance(change, BlocksStored):
        return change.adapter, change.cache_salt, change.parent_hash, change.hashes, change.keys
    return change.hashes


@pytest.mark.parametrize(
    ("block", "by_id", "min_computed_tokens"), [(2, False, 1), (1, False, 0), (2, True, 1), (4, True, 1), (9, True, 0)]
)
def test_extents_do_to_the_block_what_a_node_for_each_block_does(
    block: int, by_id: bool, min_computed_tokens: int
) -> None:
    own = {"block": block, "by_id": by_id, "min_computed_tokens": min_computed_tokens}
    machine = type("Machine", (CacheMachine,), own)
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None))


def sequence(
    handle: int, token_ids: list[int], adapter: str | None = None, output: list[int] | None = None
) -> Sequence:
    return Sequence(
        handle,
        len(token_ids),
        10,
        adapter=ADAPTERS[adapter],
        prompt_token_ids=token_ids,
        output_token_ids=output or [],
    )


def compute_all(cache: BlockCache, *sequences: Sequence) -> None:
    """Admit these in one plan and run its step."""
    for each in sequences:
        each.cached_tokens = each.computed_tokens = cache.reusable(each)
        cache.acquire(each)
    for each in sequences:
        each.computed_tokens = each.input_tokens
        cache.commit(each)


def test_a_block_is_visible_when_its_step_is_committed_and_to_its_adapter_only() -> None:
    cache = BlockCache(BLOCK)
    first = sequence(1, [1, 2, 3, 4, 5], "a")
    cache.acquire(first)
    assert cache.match([1, 2, 3, 4, 5], "a") == 0
    first.computed_tokens = 3
    cache.commit(first)
    assert cache.match([1, 2, 3, 4, 5], "a") == 2
    assert cache.match([1, 2, 3, 4, 5], "b") == 0
    assert cache.match([1, 2, 3, 4, 5], None) == 0


def test_the_last_prompt_token_is_computed_unless_told_otherwise() -> None:
    for min_computed_tokens, cached_tokens in ((1, 2), (0, 4)):
        cache = BlockCache(BLOCK, min_computed_tokens=min_computed_tokens)
        compute_all(cache, sequence(1, [1, 2, 3, 4]))
        assert cache.match([1, 2, 3, 4], None) == 4
        assert cache.reusable(sequence(2, [1, 2, 3, 4])) == cached_tokens


def test_output_is_found_once_its_sequence_has_left_without_the_token_that_was_never_cached() -> None:
    cache = BlockCache(BLOCK)
    first = sequence(1, [1, 2, 3], output=[4, 5, 6])
    compute_all(cache, first)
    assert cache.match([1, 2, 3, 4, 5, 6], None) == 2
    cache.release(first, 3)
    assert cache.match([1, 2, 3, 4, 5, 6], None) == 4


def test_two_of_one_plan_compute_the_same_blocks_and_hold_them_once_afterwards() -> None:
    cache = BlockCache(BLOCK)
    first, second = sequence(1, [1, 2, 3, 4, 5]), sequence(2, [1, 2, 3, 4, 6])
    compute_all(cache, first, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert (cache.num_pins, cache.num_pinned) == (4, 2)


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    cache = BlockCache(BLOCK)
    old, new = sequence(1, [1, 2, 3, 4, 5]), sequence(2, [1, 2, 7, 8, 9])
    compute_all(cache, old, new)
    cache.release(old, 1)
    cache.shrink(0)  # the common block is still pinned
    assert cache.match([1, 2, 3, 4], None) == 2
    cache.release(new, 1)
    cache.reusable(sequence(3, [1, 2, 7, 8, 9]))
    cache.shrink(BLOCK)
    assert cache.match([1, 2, 7, 8], None) == 2
    assert cache.num_evictions == 2


def test_a_result_that_is_kept_is_not_that_of_a_tree_that_was_split_or_merged_meanwhile() -> None:
    cache = BlockCache(BLOCK)
    first, other, like_other = early = [
        sequence(handle, tokens)
        for handle, tokens in enumerate([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 4, 9, 9, 9]])
    ]
    for each in early:
        cache.acquire(each)  # none finds anything
        each.computed_tokens = 7
    cache.commit(first)
    cache.release(first, 1)
    waiting = sequence(4, [1, 2, 3, 4, 5, 6, 8])
    assert (cache.reusable(waiting), cache.num_shareable(waiting)) == (6, 0)
    cache.commit(other)  # splits what is kept
    assert (cache.reusable(waiting), cache.num_shareable(waiting)) == (6, 2)
    cache.shrink(0)
    waiting = sequence(5, [1, 2, 3, 4, 9, 9, 8])
    assert (cache.reusable(waiting), cache.num_shareable(waiting)) == (6, 3)
    cache.release(other, 1)  # merges both of its extents
    assert (cache.reusable(waiting), cache.num_shareable(waiting)) == (6, 0)
    cache.commit(like_other)
    assert (cache.reusable(waiting), cache.num_shareable(waiting)) == (6, 3)


def test_unknown_tokens_are_neither_found_nor_kept() -> None:
    cache = BlockCache(BLOCK)
    unknown = Sequence(1, 6, 10, output_token_ids=[1, 2, 3])
    compute_all(cache, unknown)
    cache.release(unknown, 3)
    assert cache.paths() == []


def test_who_leaves_blocks_that_are_there_already_has_used_them_last() -> None:
    cache = BlockCache(BLOCK)
    first = sequence(1, [1, 2, 3], output=[4, 5, 6])
    same = sequence(2, [1, 2, 3], output=[4, 5, 6])
    other = sequence(3, [7, 8, 9])
    compute_all(cache, first, same, other)
    cache.release(first, 3)
    cache.release(other, 1)
    cache.release(same, 3)
    assert [tokens for _, tokens, _ in cache.paths()] == [(7, 8), (1, 2, 3, 4), (1, 2)]
