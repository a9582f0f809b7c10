"""The core's contract, over every policy: nothing lost, nothing left behind, and skipping equals stepping."""

import copy
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.core.catalogue import ReplicaLimits, build_replica
from scheduler.core.plan import Finished, Plan
from scheduler.core.prefix_cache.static_trie import StaticTrie
from scheduler.core.replica import Replica
from scheduler.core.sequence import Adapter, Sequence
from tests.scheduler.core.drive import Device, World, jump, step_by_step

POLICIES = ["req_queue", "req_queue strict", "req_queue prefetch", "fcfs", "fcfs cached"]


def build(policy: str, pool: int, batch_tokens: int, most: int) -> Replica:
    name, _, variant = policy.partition(" ")
    limits = ReplicaLimits(
        max_total_token_num=pool,
        max_req_total_len=40,
        running_max_req_size=most,
        max_num_seqs=most,
        max_num_batched_tokens=batch_tokens,
        batch_max_tokens=batch_tokens,
        prefetch=variant == "prefetch",
        strict=variant == "strict",
    )
    cache = StaticTrie.build([[0, 1, 2, 3, 4], [0, 1, 9]]) if variant == "cached" else None
    return build_replica(name, limits, cache)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num = draw(st.integers(1, 14))
    ranks = {f"a{index}": draw(st.sampled_from([1, 2, 4])) for index in range(3)}
    arrivals = []
    at_ps = 0
    for handle in range(num):
        at_ps += draw(st.sampled_from([0, 0, 1, 500, 3_000, 40_000, 10_000_000_000]))
        max_new = draw(st.integers(1, 20))
        name = draw(st.sampled_from([None, *ranks]))
        prompt = draw(st.integers(1, 20))
        sequence = Sequence(
            handle,
            prompt_tokens=prompt,
            max_new_tokens=max_new,
            arrived_ps=at_ps,
            adapter=None if name is None else Adapter(name, ranks[name]),
            prompt_token_ids=list(range(prompt)),
        )
        arrivals.append((at_ps, sequence, draw(st.integers(1, max_new))))
    cancels = draw(
        st.lists(
            st.tuples(st.integers(0, at_ps + 60_000), st.integers(0, num - 1)), max_size=5, unique_by=lambda c: c[1]
        )
    )
    arrived = {sequence.handle: at for at, sequence, _ in arrivals}
    return World(arrivals, [(max(at, arrived[handle]), handle) for at, handle in cancels])


def nothing_is_negative_or_over(replica: Replica, pool: int, most: int) -> None:
    running = replica.running
    held = sum(s.input_tokens + s.output_tokens(running.decode_step) for s in running)
    assert running.kv_tokens == held
    assert 0 <= replica.kv_tokens < pool
    assert replica.num_running <= most
    pins = Counter(s.adapter for s in running if s.adapter is not None)
    assert running.adapter_slots == sum(4 * adapter.rank for adapter in pins)
    assert running.adapter_ids == {adapter.adapter_id for adapter in pins}
    assert running.adapter_ids <= set(replica.resident_adapters)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=worlds(), pool=st.integers(60, 150), batch_tokens=st.integers(40, 60), most=st.integers(1, 6))
def test_skipping_equals_stepping_and_nothing_is_lost(
    policy: str, world: World, pool: int, batch_tokens: int, most: int
) -> None:
    stepped = build(policy, pool, batch_tokens, most)
    log = step_by_step(stepped, copy.deepcopy(world), lambda replica: nothing_is_negative_or_over(replica, pool, most))
    skipped = build(policy, pool, batch_tokens, most)
    assert jump(skipped, copy.deepcopy(world)) == log

    ends = Counter(entry[2] for entry in log if entry[0] in ("finished", "cancelled"))
    cancelled = {handle for _, handle in world.cancels}
    for _, sequence, length in world.arrivals:
        end = next((entry for entry in log if entry[0] == "finished" and entry[2] == sequence.handle), None)
        if sequence.handle not in cancelled:
            assert end is not None
            assert ends[sequence.handle] == 1
            assert end[3:] == ("eos", length)
        else:
            assert ends[sequence.handle] == 1
    for replica in (stepped, skipped):
        assert not len(replica.running)
        assert not replica.kv_tokens
        assert not replica.resident_adapters
        if policy != "req_queue strict":  # which never sweeps a queue that holds cancelled requests only
            assert not replica.num_waiting


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(world=worlds(), num_steps=st.integers(0, 12))
def test_lose_gives_back_every_unfinished_sequence_with_what_it_produced(
    policy: str, world: World, num_steps: int
) -> None:
    replica = build(policy, 150, 60, 6)
    for at_ps, sequence, _ in world.arrivals:
        replica.submit(sequence, at_ps)
    at_ps = world.arrivals[-1][0]

    device = Device({sequence.handle: length for _, sequence, length in world.arrivals})
    finished: set[int] = set()
    decision = replica.plan(at_ps)
    for _ in range(num_steps):
        if not isinstance(decision, Plan):
            break
        ran = device.run(decision, at_ps, 1, None)
        at_ps = ran.end_ps
        finished |= {event.sequence.handle for event in replica.commit(decision, ran) if isinstance(event, Finished)}
        decision = replica.plan(at_ps)
    produced = dict(device.produced)
    unfinished, events = replica.lose(at_ps)
    assert not events
    assert {s.handle for s in unfinished} == {s.handle for _, s, _ in world.arrivals} - finished
    assert [s.arrived_ps for s in unfinished] == sorted(s.arrived_ps for s in unfinished)
    for sequence in unfinished:
        assert sequence.produced_tokens == produced.get(sequence.handle, 0)
    assert not len(replica.running)
    assert not replica.kv_tokens
    assert not replica.num_waiting


def test_cancel_while_a_plan_runs_takes_effect_at_the_next_boundary_and_returns_every_kv_token() -> None:
    replica = build("fcfs", 150, 60, 6)
    world = World([(0, Sequence(1, 10, 20), 20)], [(2_000, 1)])
    log = jump(replica, world)
    assert [entry[0] for entry in log] == ["admitted", "first", "kept", "kept", "cancelled"] or log[-3][
        0
    ] == "cancelled"
    assert not replica.kv_tokens


def test_req_queue_waits_ten_decode_steps_between_prefills() -> None:
    replica = build("req_queue", 150, 60, 6)
    first, second = Sequence(1, 10, 20), Sequence(2, 10, 3, arrived_ps=1)
    log = jump(replica, World([(0, first, 20), (1, second, 3)]))
    admitted = {entry[2]: entry[1] for entry in log if entry[0] == "admitted"}
    prefill_ps = 1_000 + 7 * 10
    ten_steps_ps = sum(1_000 + 7 * (10 + step) for step in range(10))
    assert admitted == {1: 0, 2: prefill_ps + ten_steps_ps}


def test_strict_req_queue_polls_ten_milliseconds_after_it_became_empty() -> None:
    replica = build("req_queue strict", 150, 60, 6)
    log = jump(replica, World([(0, Sequence(1, 10, 1), 1), (5_000, Sequence(2, 10, 1, arrived_ps=5_000), 1)]))
    admitted = {entry[2]: entry[1] for entry in log if entry[0] == "admitted"}
    assert admitted == {1: 0, 2: 1_070 + 10_000_000_000}
