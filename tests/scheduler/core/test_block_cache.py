"""The block cache against a plain dictionary of prefixes, and its rules one by one."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.sequence import Adapter, Sequence
from tests.scheduler.core.cache_copy import CacheCopy

BLOCK = 2
ADAPTERS = {None: None, "a": Adapter("a", 8), "a@3": Adapter("a", 16, version=3), "b": Adapter("b", 8)}

Prefix = tuple[str | None, tuple[int, ...]]


@dataclass
class Entry:
    """A cached block, in the naive cache: who pins it, and when somebody last let go of it."""

    pins: set[int] = field(default_factory=set)
    used: tuple[int, int] = (0, 0)


class NaiveCache:
    """A dictionary from (adapter, all tokens up to a block's end) to that block."""

    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.clock = 0

    @staticmethod
    def prefixes(sequence: Sequence, num_tokens: int) -> list[Prefix]:
        tokens = (*sequence.prompt_token_ids, *sequence.output_token_ids)
        name = sequence.adapter.key if sequence.adapter is not None else None
        return [(name, tokens[:end]) for end in range(BLOCK, num_tokens + 1, BLOCK)]

    def reusable(self, sequence: Sequence) -> int:
        found = 0
        for prefix in self.prefixes(sequence, sequence.input_tokens - 1):
            if prefix not in self.entries:
                break
            found += BLOCK
        return found

    def pin(self, sequence: Sequence, num_tokens: int) -> None:
        for prefix in self.prefixes(sequence, num_tokens):
            self.entries.setdefault(prefix, Entry()).pins.add(sequence.handle)

    def release(self, sequence: Sequence, num_tokens: int) -> None:
        self.clock += 1
        for entry in self.entries.values():
            entry.pins.discard(sequence.handle)
        for prefix in self.prefixes(sequence, num_tokens):
            self.entries.setdefault(prefix, Entry()).used = (self.clock, -len(prefix[1]))

    def shrink(self, num_blocks: int) -> int:
        gone = self.unpinned()[: max(0, len(self.unpinned()) - num_blocks)]
        for prefix in gone:
            del self.entries[prefix]
        return len(gone)

    def unpinned(self) -> list[Prefix]:
        free = [prefix for prefix, entry in self.entries.items() if not entry.pins]
        return sorted(free, key=lambda prefix: self.entries[prefix].used)

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        pinned = [(*prefix, len(entry.pins)) for prefix, entry in self.entries.items() if entry.pins]
        pinned.sort(key=lambda path: (path[0] or "", path[1]))
        return pinned + [(*prefix, 0) for prefix in self.unpinned()]


class BlockCacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, decode and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(BLOCK)
        self.cache.note_changes()
        self.copy = CacheCopy()
        self.naive = NaiveCache()
        self.batch: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.num_handles = 0
        self.num_evicted = 0

    def _pick(self, which: int) -> Sequence:
        return list(self.batch.values())[which % len(self.batch)]

    def _enter(self, sequence: Sequence) -> None:
        sequence.cached_tokens = sequence.computed_tokens = self.cache.reusable(sequence)
        self.cache.acquire(sequence)
        self.naive.pin(sequence, sequence.cached_tokens)
        self.batch[sequence.handle] = sequence

    @rule(
        fork=st.sampled_from([16, 16, 5, 3, 0]),
        total=st.integers(10, 16),
        prompt=st.integers(1, 9),
        adapter=st.sampled_from([None, None, None, "a"]),
        computed=st.booleans(),
    )
    def enter(self, fork: int, total: int, prompt: int, adapter: str | None, computed: bool) -> None:
        tokens = [0 if index < fork else 1 + self.num_handles % 2 for index in range(total)]
        self.num_handles += 1
        sequence = Sequence(
            self.num_handles,
            prompt,
            len(tokens) - prompt,
            adapter=ADAPTERS[adapter],
            prompt_token_ids=tokens[:prompt],
            output_token_ids=tokens[prompt:],
        )
        self.waiting.append(sequence)
        self._enter(sequence)
        if computed:
            self.compute(-1, 9)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def look_up(self, which: int) -> None:
        sequence = self.waiting[which % len(self.waiting)]
        before = self.cache.paths()
        found = self.cache.reusable(sequence)
        assert found == self.naive.reusable(sequence)
        pinned = sum(bool(self.naive.entries[prefix].pins) for prefix in self.naive.prefixes(sequence, found))
        assert self.cache.num_shareable(sequence) == pinned
        assert self.cache.paths() == before

    @precondition(lambda self: self.batch)
    @rule(which=st.integers(0, 20), num_tokens=st.sampled_from([9, 4, 1]))
    def compute(self, which: int, num_tokens: int) -> None:
        sequence = self._pick(which)
        sequence.computed_tokens = min(sequence.input_tokens, sequence.computed_tokens + num_tokens)
        self.cache.commit(sequence)
        self.naive.pin(sequence, sequence.computed_tokens)

    @precondition(lambda self: self.batch)
    @rule(which=st.integers(0, 20), most=st.integers(1, 16), again=st.booleans())
    def leave(self, which: int, most: int, again: bool) -> None:
        sequence = self._pick(which)
        del self.batch[sequence.handle]
        through = sequence.computed_tokens == sequence.input_tokens
        output_tokens = min(most, sequence.budget_tokens) if through else 0
        self.cache.release(sequence, output_tokens)
        self.naive.release(sequence, sequence.computed_tokens + max(0, output_tokens - 1))
        sequence.requeue(output_tokens, 0)
        if again and sequence.budget_tokens:  # preempted: its output is input now
            assert self.cache.reusable(sequence) == self.naive.reusable(sequence)
            self._enter(sequence)

    @rule(num_blocks=st.integers(2, 12), odd=st.integers(0, BLOCK - 1))
    def shrink(self, num_blocks: int, odd: int) -> None:
        self.cache.shrink(num_blocks * BLOCK + odd)
        self.num_evicted += self.naive.shrink(num_blocks)

    @precondition(lambda self: self.num_handles % 6 == 5)  # seldom, or there would be little to forget
    @rule()
    def lose(self) -> None:
        self.cache.lose()
        self.copy = CacheCopy()
        self.naive = NaiveCache()
        self.batch.clear()
        self.num_handles += 1

    @invariant()
    def same(self) -> None:
        paths = self.cache.paths()
        assert paths == self.naive.paths()
        assert self.cache.num_pins == sum(pins for _, _, pins in paths)
        assert self.cache.num_pinned == sum(pins > 0 for _, _, pins in paths)
        assert self.cache.num_unpinned == sum(not pins for _, _, pins in paths)
        assert self.cache.num_evictions == self.num_evicted
        self.copy.apply(self.cache.take_changes())
        assert self.copy.paths() == {(adapter_key, tokens) for adapter_key, tokens, _ in paths}


BlockCacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestAgainstADictionaryOfPrefixes = BlockCacheMachine.TestCase


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


def test_two_of_one_plan_share_at_once_if_told_so() -> None:
    cache = BlockCache(BLOCK, share_within_plan=True)
    first, second = sequence(1, [1, 2, 3, 4, 5]), sequence(2, [1, 2, 3, 4, 6])
    compute_all(cache, first, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert (cache.num_pins, cache.num_pinned) == (4, 2)


def test_what_a_chunk_did_not_reach_is_hidden_again() -> None:
    cache = BlockCache(BLOCK, share_within_plan=True)
    first = sequence(1, [1, 2, 3, 4, 5, 6, 7])
    cache.acquire(first)
    first.computed_tokens = 3
    cache.commit(first)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], None) == 2
    assert (cache.num_pins, cache.num_pinned, cache.num_unpinned) == (1, 1, 0)


def test_what_a_chunk_did_not_reach_stays_if_another_computed_it_and_ended_with_the_same_step() -> None:
    cache = BlockCache(BLOCK, share_within_plan=True)
    long, other = sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), sequence(2, [1, 2, 3, 4, 5, 6, 0])
    cache.acquire(long)
    long.computed_tokens = 3
    cache.commit(long)
    other.cached_tokens = other.computed_tokens = cache.reusable(other)
    cache.acquire(other)
    assert other.cached_tokens == 2
    long.computed_tokens = 9
    cache.commit(long)
    cache.release(long, 1)
    other.computed_tokens = 3
    cache.commit(other)
    assert [(tokens, pins) for _, tokens, pins in cache.paths()] == [
        ((1, 2), 1),
        ((1, 2, 3, 4, 5, 6, 7, 8), 0),
        ((1, 2, 3, 4, 5, 6), 0),
        ((1, 2, 3, 4), 0),
    ]
    cache.shrink(0)
    assert cache.num_unpinned == 0


def test_what_was_shown_ahead_of_a_step_that_never_ended_is_hidden_again() -> None:
    cache = BlockCache(BLOCK, share_within_plan=True)
    first = sequence(1, [1, 2, 3, 4, 5])
    cache.acquire(first)
    cache.release(first, 0)
    assert cache.paths() == []


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
