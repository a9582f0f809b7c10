"""Paged memory: growth against counting one by one, block accounting under any history, and its rules one by one."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Admitted, Cancelled, Event, Finished, Preempted
from lorrery.scheduler.core.memory.paged import BlockGrowth, PagedMemory
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import Device, World, jump, step_by_step


@given(
    lengths=st.lists(st.integers(-30, 60), min_size=1, max_size=12),
    block_size=st.integers(1, 7),
    decode_step=st.integers(30, 70),
    spare_blocks=st.integers(0, 40),
    limit=st.integers(1, 30),
)
def test_growth_is_what_counting_each_sequence_gives(
    lengths: list[int], block_size: int, decode_step: int, spare_blocks: int, limit: int
) -> None:
    growth = BlockGrowth(block_size)
    for length in (*lengths, 17):
        growth.add(length)
    growth.remove(17)

    def blocks(step: int) -> int:
        return sum(-(-(step + length) // block_size) for length in lengths)

    assert len(growth) == len(lengths)
    assert growth.blocks(decode_step) == blocks(decode_step)
    last_step = growth.last_step_surely_within(blocks(decode_step) + spare_blocks)
    assert last_step < 0 or blocks(last_step) <= blocks(decode_step) + spare_blocks
    assert blocks(last_step + 2 * block_size) > blocks(decode_step) + spare_blocks
    steps = growth.steps_within(decode_step, spare_blocks, limit)
    assert steps <= limit
    assert blocks(decode_step + steps) - blocks(decode_step) <= spare_blocks
    assert steps == limit or blocks(decode_step + steps + 1) - blocks(decode_step) > spare_blocks


# --- any history ------------------------------------------------------------------------------------------------------

BLOCK = 4
BATCHINGS = ("continuous", "mixed", "chunked", "prefill_first", "slora_loop")


class PagedMachine(RuleBasedStateMachine):
    """A replica with paged memory and a block cache: submit, cancel, plan, run, commit and lose, in any order."""

    @initialize(
        batching=st.sampled_from(BATCHINGS),
        pool=st.integers(52, 70),
        watermark=st.sampled_from([0.0, 0.1]),
        cached=st.sampled_from(["no", "blocks", "share"]),
    )
    def begin(self, batching: str, pool: int, watermark: float, cached: str) -> None:
        self.replica = build_replica(
            ReplicaSettings(
                policy="fcfs",
                batching=batching,
                memory="paged",
                block_size=BLOCK,
                watermark=watermark,
                prefix_cache="none" if cached == "no" else "blocks",
                share_within_plan=cached == "share",
                max_total_token_num=pool,
                max_req_total_len=40,
                max_num_seqs=6,
                max_num_batched_tokens=13 if batching in ("chunked", "prefill_first") else 46,
            )
        )
        self.num_blocks = pool // BLOCK
        self.at_ps = 0
        self.device = Device({})
        self.ends: Counter[int] = Counter()
        self.submitted: set[int] = set()
        self.plan: Plan | None = None
        self.steps_left = 0

    @rule(
        prompt=st.sampled_from([1, 4, 7, 12, 16, 20]),
        max_new=st.sampled_from([1, 2, 9, 20, 20]),
        fork=st.sampled_from([40, 9, 4]),
        rank=st.sampled_from([None, 1, 3]),
        share=st.sampled_from([1, 1, 2, 20]),
    )
    def submit(self, prompt: int, max_new: int, fork: int, rank: int | None, share: int) -> None:
        handle = len(self.submitted)
        self.submitted.add(handle)
        self.device.true_lengths[handle] = -(-max_new // share)
        token_ids = [index if index < fork else 100 * handle + index for index in range(40)]
        sequence = Sequence(
            handle,
            prompt,
            max_new,
            arrived_ps=self.at_ps,
            adapter=Adapter(f"r{rank}", rank) if rank is not None else None,
            prompt_token_ids=token_ids[:prompt],
            output_token_ids=token_ids[prompt:],
        )
        assert self.replica.never_fits_reason(sequence) is None
        self.replica.submit(sequence, self.at_ps)

    @precondition(lambda self: len(self.submitted) % 3 == 2)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        self.replica.cancel(which % len(self.submitted), self.at_ps)

    @rule(num_steps=st.integers(1, 9))
    def run(self, num_steps: int) -> None:
        self._decide()
        if self.plan is not None:
            ran = self.device.run(self.plan, self.at_ps, min(num_steps, self.plan.max_steps), self.plan.until_ps)
            self.at_ps = ran.end_ps
            self._note(self.replica.commit(self.plan, ran))

    def _decide(self) -> None:
        decision = self.replica.plan(self.at_ps)
        self._note(decision.events)
        self.device.forget(decision.leaves)
        self.plan = decision if isinstance(decision, Plan) else None
        use = self.replica.memory.block_use(self.replica.running)
        assert use is not None
        assert min(use.used, use.cached, use.free) >= 0, "a step was planned that lacks blocks"

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | Cancelled):
                self.ends[event.sequence.handle] += 1

    @precondition(lambda self: len(self.submitted) % 6 == 5)  # seldom, or there would be little to lose
    @rule()
    def lose(self) -> None:
        unfinished, events = self.replica.lose(self.at_ps)
        self._note(events)
        self.device.produced.clear()
        self.device.cached.clear()
        assert self._use() == (0, 0, self.num_blocks)
        for sequence in unfinished:
            self.replica.submit(sequence, self.at_ps)

    def _use(self) -> tuple[int, int, int]:
        use = self.replica.memory.block_use(self.replica.running)
        assert use is not None
        return use.used, use.cached, use.free

    @invariant()
    def no_block_is_lost(self) -> None:
        running, cache = self.replica.running, self.replica.prefix_cache
        used, cached, free = self._use()
        assert used + cached + free == self.num_blocks
        held = {s.handle: s.input_tokens + s.output_tokens_at(running.decode_step) for s in running}
        held |= {s.handle: s.input_tokens + (s.budget_tokens > 1) for s in running.prefilling.values()}
        distinct = -(-running.adapter_slots // BLOCK) + sum(-(-tokens // BLOCK) for tokens in held.values())
        if isinstance(cache, BlockCache):
            pins = [pins for _, _, pins in cache.paths()]
            assert min(pins, default=0) >= 0
            assert cached == pins.count(0)
            distinct -= sum(pins) - sum(num > 0 for num in pins)
            assert sum(pins) <= sum(tokens // BLOCK for tokens in held.values())
        assert used == distinct

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        for _ in range(2_000):
            self.run(100)
            if self.plan is None:
                break
        assert self.ends == Counter(self.submitted)
        assert self._use()[0] == 0


PagedMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBlockAccounting = PagedMachine.TestCase


# --- one by one -------------------------------------------------------------------------------------------------------


def paged(pool: int = 40, batching: str = "continuous", **options: object) -> Replica:
    chosen: dict[str, object] = {"watermark": 0.0, "max_num_batched_tokens": 64, **options}
    return build_replica(
        ReplicaSettings(  # type: ignore[arg-type]
            policy="fcfs",
            batching=batching,
            memory="paged",
            block_size=BLOCK,
            max_total_token_num=pool,
            max_req_total_len=64,
            **chosen,
        )
    )


def entries(log: list[tuple[object, ...]], kind: str) -> list[object]:
    return [entry[2] for entry in log if entry[0] == kind]


def test_the_last_arrived_gives_way_when_blocks_run_out_and_finishes_later() -> None:
    replica = paged(pool=40)
    first, second = Sequence(1, 16, 12), Sequence(2, 16, 12, arrived_ps=1)
    log = jump(replica, World([(0, first, 12), (1, second, 12)]))
    assert entries(log, "preempted") == [2]
    assert entries(log, "admitted") == [1, 2, 2]
    assert entries(log, "first") == [1, 2]
    assert [entry[2:] for entry in log if entry[0] == "finished"] == [(1, "eos", 12), (2, "eos", 12)]
    assert (first.num_requeues, second.num_requeues) == (0, 1)


def test_a_preempted_sequence_finds_its_own_blocks_again_if_nobody_needed_them() -> None:
    token_ids = list(range(100))
    first = Sequence(1, 16, 12)
    second = Sequence(2, 16, 12, arrived_ps=1, prompt_token_ids=token_ids[:16], output_token_ids=token_ids[16:])
    # When the first one has ended, 3 of the second's blocks have not been taken.
    log = jump(paged(pool=44, prefix_cache="blocks"), World([(0, first, 12), (1, second, 12)]))
    cached = [entry[3] for entry in log if entry[0] == "admitted" and entry[2] == 2]
    assert cached[0] == 0
    assert cached[1] == 16


def test_a_sequence_as_large_as_the_pool_is_served_and_one_token_more_is_refused() -> None:
    replica = paged(pool=40, watermark=0.5)
    assert replica.never_fits_reason(Sequence(1, 20, 21)) is None  # the last token is never cached
    reason = replica.never_fits_reason(Sequence(1, 20, 22))
    assert reason is not None
    assert "41 tokens" in reason
    assert "max_total_token_num is 40" in reason
    log = jump(replica, World([(0, Sequence(1, 20, 21), 21), (5, Sequence(2, 20, 21, arrived_ps=5), 21)]))
    assert entries(log, "finished") == [1, 2]


def test_the_watermark_stays_free_beside_a_batch_but_not_in_an_empty_pool() -> None:
    replica = paged(pool=40, watermark=0.2)
    replica.submit(Sequence(1, 31, 2), 0)  # 8 of 10 blocks, and 2 stay free
    replica.submit(Sequence(2, 1, 2), 0)
    assert [event for event in replica.plan(0).events if isinstance(event, Admitted)][-1].sequence.handle == 1
    assert replica.num_running == 1
    roomier = paged(pool=44, watermark=0.2)
    roomier.submit(Sequence(1, 31, 2), 0)
    roomier.submit(Sequence(2, 1, 2), 0)
    roomier.plan(0)
    assert roomier.num_running == 2


def test_adapters_take_blocks_from_the_same_pool() -> None:
    sequence = Sequence(1, 16, 1, adapter=Adapter("a", 6))  # 24 slots: 6 blocks
    assert paged(pool=40).never_fits_reason(sequence) is None
    assert paged(pool=36).never_fits_reason(sequence) is not None
    replica = paged(pool=40)
    replica.submit(sequence, 0)
    replica.submit(Sequence(2, 1, 1), 0)
    replica.plan(0)
    assert replica.num_running == 1
    use = replica.memory.block_use(replica.running)
    assert use is not None
    assert (use.used, use.free) == (10, 0)


def test_a_shared_block_counts_once_and_lets_more_sequences_in() -> None:
    def running_with(**options: object) -> int:
        replica = paged(pool=40, **options)
        token_ids = list(range(16))
        replica.submit(Sequence(1, 17, 3, prompt_token_ids=[*token_ids, 1]), 0)
        plan = replica.plan(0)
        assert isinstance(plan, Plan)
        replica.commit(plan, Device({1: 3}).run(plan, 0, 1, None))
        for handle in (2, 3, 4):
            replica.submit(Sequence(handle, 17, 3, arrived_ps=handle, prompt_token_ids=[*token_ids, handle]), 1)
        replica.plan(2)
        return replica.num_running

    assert running_with() == 2
    assert running_with(prefix_cache="blocks") == 4


def test_admission_leaves_the_blocks_of_the_coming_decode_step() -> None:
    for batching in ("mixed", "chunked", "continuous"):
        replica = paged(pool=24, batching=batching)  # 6 blocks
        first = Sequence(1, 8, 8)
        replica.submit(first, 0)
        plan = replica.plan(0)
        assert isinstance(plan, Plan)
        device = Device({1: 8})
        ran = device.run(plan, 0, 1, None)
        replica.commit(plan, ran)
        # The first holds 8 tokens in 2 blocks; its coming step takes a third. 3 are left, not 4.
        replica.submit(Sequence(2, 13, 1, arrived_ps=1), 1)
        replica.plan(ran.end_ps)
        assert replica.num_running == 1, batching
        replica.submit(Sequence(3, 12, 1, arrived_ps=0), 1)  # comes first in the queue, and needs 3
        replica.plan(ran.end_ps)
        assert replica.num_running == 2, batching


def test_steps_before_full_ends_at_the_step_that_lacks_a_block() -> None:
    memory, running = PagedMemory(48, block_size=BLOCK), Running()
    for handle, prompt in ((1, 5), (2, 7), (3, 8)):
        sequence = Sequence(handle, prompt, 100)
        running.admit(sequence)
        memory.admitted(sequence)
        running.join(sequence)
        memory.joined(sequence)
    steps = memory.steps_before_full(running, 1_000)
    assert memory.needed_blocks(running, steps - 1) <= memory.num_blocks < memory.needed_blocks(running, steps)
    running.decode_step += steps - 1
    assert memory.victim(running) is None
    running.decode_step += 1
    victim = memory.victim(running)
    assert victim is not None
    assert victim.handle == 3


def test_preempting_whoever_arrived_last_frees_an_adapter_too() -> None:
    small = Adapter("a", 1)
    first, second = Sequence(1, 15, 12), Sequence(2, 15, 12, arrived_ps=1, adapter=small)
    replica = paged(pool=40)
    log = jump(replica, World([(0, first, 12), (1, second, 12)]))
    assert entries(log, "preempted") == [2]
    assert replica.running.adapter_slots == 0


@pytest.mark.parametrize(("output_tokens", "num_evictions"), [(9, 0), (10, 1)])
def test_the_cache_gives_up_what_the_last_decode_step_takes_and_no_more(output_tokens: int, num_evictions: int) -> None:
    for drive in (jump, step_by_step):
        replica = paged(pool=40, prefix_cache="blocks")
        cache = replica.prefix_cache
        assert isinstance(cache, BlockCache)
        first, second = list(range(100, 121)), list(range(200, 222))
        for handle, tokens, length in ((1, first, 9), (2, second, output_tokens)):
            sequence = Sequence(handle, 12, length, prompt_token_ids=tokens[:12], output_token_ids=tokens[12:])
            drive(replica, World([(0, sequence, length)]))
        # The first leaves 5 of 10 blocks. The last output is never cached: 12 + 8 fill the others, 12 + 9 take a sixth.
        assert cache.num_evictions == num_evictions
        assert cache.match(first, None) == 20 - BLOCK * num_evictions


def test_under_peak_memory_the_cache_has_what_nobody_holds() -> None:
    replica = build_replica(
        ReplicaSettings("fcfs", max_total_token_num=40, max_req_total_len=40, block_size=BLOCK, prefix_cache="blocks")
    )
    cache = replica.prefix_cache
    assert isinstance(cache, BlockCache)
    for handle in range(1, 4):
        token_ids = [100 * handle + index for index in range(40)]
        sequence = Sequence(
            handle, 12, 9, arrived_ps=handle, prompt_token_ids=token_ids[:12], output_token_ids=token_ids[12:]
        )
        jump(replica, World([(0, sequence, 9)]))
        assert cache.match(token_ids, None) == 20
    # Two sequences leave 5 blocks each, and the third had taken 20 of the 40 tokens.
    assert cache.num_unpinned == 10
    assert cache.num_evictions == 5


def test_preempted_is_told_and_keeps_arrival() -> None:
    replica = paged(pool=40)
    first, second = Sequence(1, 16, 12), Sequence(2, 16, 12, arrived_ps=1)
    replica.submit(first, 0)
    replica.submit(second, 1)
    device = Device({1: 12, 2: 12})
    at_ps = 1
    events: list[Event] = []
    while not any(isinstance(event, Preempted) for event in events):
        plan = replica.plan(at_ps)
        events = plan.events
        assert isinstance(plan, Plan)
        device.forget(plan.leaves)
        ran = device.run(plan, at_ps, plan.max_steps, plan.until_ps)
        at_ps = ran.end_ps
        replica.commit(plan, ran)
    assert plan.leaves == [second]
    assert second.arrived_ps == 1
    assert second.input_tokens == second.prompt_tokens + second.produced_tokens
    assert list(replica.queue) == [second]
