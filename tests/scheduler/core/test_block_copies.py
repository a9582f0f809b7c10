"""The cache of extents with `share_within_plan` against one that keeps each physical block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorrery.scheduler.core.prefix_cache.scheduled_blocks import ScheduledBlockCache
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from tests.scheduler.core.cache_copy import CacheCopy, to_be_found
from tests.scheduler.core.oracle.pool import Pool

ADAPTERS = {None: None, "a": Adapter("a", 8)}
EXAMPLES = 60


class Side:
    """A cache, and the batch that it knows."""

    def __init__(self, cache: ScheduledBlockCache | Pool) -> None:
        self.cache = cache
        self.running = cache.running = Running()
        self.waiting: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []


class CopiesMachine(RuleBasedStateMachine):
    """Steps are planned and run; sequences that begin alike enter, decode alike, leave, and come back.

    Between a plan and the end of its step nothing leaves, as in a replica.
    """

    block, min_computed_tokens, unseen = 2, 1, 0
    RUN = 5

    def __init__(self) -> None:
        super().__init__()
        more = {"min_computed_tokens": self.min_computed_tokens}
        self.ours = Side(ScheduledBlockCache(self.block, **more))
        self.oracle = Side(Pool(self.block, **more))
        self.sides = (self.ours, self.oracle)
        for side in self.sides:
            side.cache.unseen_tokens = self.unseen
        self.num_handles = 0
        self.is_planned = False
        self.copy = CacheCopy()

    @rule(
        runs=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5),
        cut=st.integers(0, RUN - 1),
        adapter=st.sampled_from([None, None, None, "a"]),
        salt=st.sampled_from(["", "", "", "pepper"]),
    )
    def arrive(self, runs: list[int], cut: int, adapter: str | None, salt: str) -> None:
        self.num_handles += 1
        tokens = [run * self.RUN + number for run in runs for number in range(self.RUN)][: len(runs) * self.RUN - cut]
        # What follows a prompt is the rest of the run that it was cut in, and then the run 0 again and again.
        output = (
            list(range(runs[-1] * self.RUN, (runs[-1] + 1) * self.RUN))[self.RUN - cut :] + list(range(self.RUN)) * 8
        )[:30]
        for side in self.sides:
            sequence = Sequence(self.num_handles, len(tokens), 30, 0, ADAPTERS[adapter], "", tokens, output)
            sequence.cache_salt = salt
            side.waiting.append(sequence)

    @precondition(lambda self: not self.is_planned)
    @rule(budget=st.sampled_from([3, 8, 20]), most=st.integers(0, 3))
    def plan(self, budget: int, most: int) -> None:
        self.is_planned = True
        lengths = []
        for side in self.sides:
            cache, running, left, entered = side.cache, side.running, budget, most
            for sequence in running.prefilling.values():
                left = self._chunk(side, sequence, left)
            if isinstance(cache, ScheduledBlockCache) and cache.notes_changes:
                for sequence in running:
                    cache.schedule_output(sequence)
            while left > 0 and entered and side.waiting:
                entered -= 1
                sequence = side.waiting.pop(0)
                usable = min(cache.reusable(sequence), sequence.input_tokens - self.min_computed_tokens)
                sequence.cached_tokens = sequence.computed_tokens = usable
                lengths.append((cache.num_shareable(sequence), usable))
                cache.acquire(sequence)
                running.admit(sequence)
                left = self._chunk(side, sequence, left)
        assert lengths[: len(lengths) // 2] == lengths[len(lengths) // 2 :]

    def _chunk(self, side: Side, sequence: Sequence, budget: int) -> int:
        new_tokens = min(sequence.input_tokens - sequence.computed_tokens, budget)
        if new_tokens > 0:
            side.cache.schedule(sequence, sequence.computed_tokens + new_tokens)
        side.chunks.append((sequence, max(0, new_tokens)))
        return budget - max(0, new_tokens)

    @precondition(lambda self: self.is_planned)
    @rule(num_steps=st.sampled_from([1, 1, 2, 5]))
    def step(self, num_steps: int) -> None:
        self.is_planned = False
        for side in self.sides:
            running = side.running
            longest = min(
                [30 - one.produced_tokens - one.output_tokens_at(running.decode_step) for one in running], default=0
            )
            if running.num_decoding:
                running.decode_step += max(0, min(1 if side.chunks else num_steps, longest - 1))
            for sequence, new_tokens in side.chunks:
                sequence.computed_tokens += new_tokens
                side.cache.commit(sequence)
                if sequence.computed_tokens == sequence.input_tokens:
                    running.join(sequence)
            side.chunks.clear()

    @precondition(lambda self: self.ours.running.num and not self.is_planned)
    @rule(which=st.integers(0, 20), again=st.booleans())
    def leave(self, which: int, again: bool) -> None:
        for side in self.sides:
            running = side.running
            present = [*running, *running.prefilling.values()]
            sequence = present[which % len(present)]
            output = 0
            if sequence.handle not in running.prefilling:
                output = sequence.output_tokens_at(running.decode_step)
            running.leave(sequence)
            side.cache.release(sequence, output)
            sequence.requeue(output, 0)
            if again and sequence.budget_tokens > 1:
                side.waiting.insert(0, sequence)

    @precondition(lambda self: self.ours.running.num_decoding and not self.is_planned)
    @rule(which=st.integers(0, 20))
    def step_aside(self, which: int) -> None:
        for side in self.sides:
            sequence = list(side.running)[which % side.running.num_decoding]
            side.running.resume_prefill(sequence)
            side.cache.resume(sequence)

    @rule(num_blocks=st.sampled_from([0, 1, 2, 4, 7, 12]), odd=st.integers(-1, 1))
    def shrink(self, num_blocks: int, odd: int) -> None:
        for side in self.sides:
            side.cache.shrink(num_blocks * self.block + odd)

    @precondition(lambda self: self.ours.waiting and self.is_planned)
    @rule(which=st.integers(0, 20))
    def look_up(self, which: int) -> None:
        seen = []
        for side in self.sides:
            sequence = side.waiting[which % len(side.waiting)]
            seen.append((side.cache.reusable(sequence), side.cache.num_shareable(sequence)))
        assert seen[0] == seen[1]

    @precondition(lambda self: not self.is_planned)
    @rule()
    def listen(self) -> None:
        """Begin to note what happens in ours, or end it; that changes nothing."""
        cache = self.ours.cache
        assert isinstance(cache, ScheduledBlockCache)
        cache.note_changes(not cache.notes_changes)
        self.copy = CacheCopy()
        if cache.notes_changes:
            self.copy.apply(cache.contents())

    @invariant()
    def told(self) -> None:
        cache = self.ours.cache
        assert isinstance(cache, ScheduledBlockCache)
        if not cache.notes_changes:
            return
        self.copy.apply(cache.take_changes())
        assert set(self.copy.blocks.values()) == to_be_found(cache)

    @precondition(lambda self: self.is_planned)
    @invariant()
    def same(self) -> None:
        ours, theirs = self.ours.cache, self.oracle.cache
        assert ours.paths() == theirs.paths()
        assert (ours.num_pins, ours.num_pinned) == (theirs.num_pins, theirs.num_pinned)
        assert (ours.num_unpinned, ours.num_evictions) == (theirs.num_unpinned, theirs.num_evictions)


@pytest.mark.parametrize(("block", "min_computed_tokens", "unseen"), [(2, 1, 0), (1, 0, 0), (3, 1, 1)])
def test_extents_with_copies_are_as_blocks_each_by_itself(block: int, min_computed_tokens: int, unseen: int) -> None:
    machine = type(
        "Machine", (CopiesMachine,), {"block": block, "min_computed_tokens": min_computed_tokens, "unseen": unseen}
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None))
