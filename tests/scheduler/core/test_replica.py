"""The core's contract, over every policy: nothing lost, nothing left behind, and skipping equals stepping."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core import policies
from lorrery.scheduler.core.adapters.loads import AdapterOptions, LoadFault, Tier
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.adapters.slots import AdapterSlots
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Dropped, Finished, Preempted
from lorrery.scheduler.core.front_end import NO_FRONT_END, FrontEndCost
from lorrery.scheduler.core.memory.base import UnlimitedMemory
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.queues.early_drop import PREFILL_ALLOWANCE_PS
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.pets import Profile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings, SglangRules
from lorrery.scheduler.core.sequence import Adapter, Phases, Sequence
from lorrery.validation.policy.drive import Device, Log, World, jump, step_by_step

QUEUES = ["req_queue", "fcfs"]
BATCHINGS = ["slora_loop", "continuous", "mixed", "chunked", "static"]
IN_PIECES = ("chunked", "prefill_first", "sglang")
POLICIES = [f"{queue} {batching}" for queue in QUEUES for batching in BATCHINGS]
POLICIES += ["req_queue slora_loop strict", "req_queue slora_loop prefetch"]
POLICIES += [f"{queue} {batching} loads" for queue in QUEUES for batching in BATCHINGS]
POLICIES += ["req_queue slora_loop blocking", "fcfs chunked blocking", "fcfs prefill_first blocking"]
POLICIES += [f"fcfs {batching} cached" for batching in ("continuous", "mixed", "chunked")]
POLICIES += [f"{queue} {batching} paged" for queue in QUEUES for batching in BATCHINGS if batching != "static"]
POLICIES += [f"{queue} {batching} blocks" for queue in QUEUES for batching in BATCHINGS]
POLICIES += [f"fcfs {batching} paged blocks" for batching in BATCHINGS if batching != "static"]
POLICIES += [f"fcfs {batching} paged blocks share" for batching in ("continuous", "mixed", "chunked")]
POLICIES += ["req_queue slora_loop paged blocks loads", "fcfs chunked paged blocks loads", "fcfs mixed paged cached"]
POLICIES += ["req_queue slora_loop strict blocks"]
POLICIES += ["fcfs mixed no_evict loads", "fcfs chunked no_evict blocks"]
POLICIES += [
    "req_queue prefill_first blocking",
    "fcfs prefill_first paged blocks share",
    "vtc_fair prefill_first loads",
]
NEVER_FREED_FROM_CANCELLED = {"peft slora_loop strict"}
"""A cancelled request at the head chooses the adapter, and stays; all that use others wait for good."""
PREFERENCES = ["vtc_fair", "abort", "cluster", "peft", "pets"]
POLICIES += [f"{queue} {way}" for queue in PREFERENCES for way in BATCHINGS if (queue, way) != ("pets", "chunked")]
POLICIES += [f"{queue} slora_loop strict" for queue in PREFERENCES]
POLICIES += [f"{queue} mixed paged loads" for queue in PREFERENCES]
POLICIES += [f"vtc_fair {batching} tenants" for batching in ("slora_loop", "continuous", "mixed", "chunked")]
POLICIES += [f"vtc_fair {batching} places" for batching in ("slora_loop", "continuous")]
POLICIES += [f"vtc_fair {batching} tenants places" for batching in ("mixed", "chunked")]
SGLANG = [
    "fcfs_tail sglang estimated",
    "fcfs_tail sglang estimated radix beside",
    "fcfs_tail sglang estimated radix loads drain overlap",
    "fcfs_tail sglang estimated whole interval overlap",
    "fcfs_tail sglang estimated radix beside loads overlap",
    "lpm sglang estimated radix",
    "lpm sglang estimated radix beside overlap",
    "lpm sglang estimated radix whole loads",
]
POLICIES += SGLANG
POLICIES += [
    "fcfs vllm on_demand",
    "fcfs vllm on_demand ahead",
    "fcfs vllm on_demand blocks share",
    "fcfs vllm on_demand blocks share ahead loads",
    "fcfs vllm on_demand blocks blocking",
    "vtc_fair vllm on_demand blocks share ahead",
    "priority vllm on_demand",
    "priority vllm on_demand blocks share ahead loads",
    "priority continuous paged",
]
POLICIES += ["vtc_fair slora_loop prefetch", "cluster slora_loop prefetch", "fcfs llm_mock unlimited"]
POLICIES += [
    "fcfs chunked loads front",
    "fcfs vllm on_demand blocks share ahead loads front",
    "req_queue slora_loop strict front",
    "vtc_fair continuous front",
    "fcfs_tail sglang estimated radix beside loads overlap front",
]
_LISTED = {policy.split()[0] for policy in POLICIES}
POLICIES += [f"{name} {row.batching}" for name, row in policies.QUEUES.items() if name not in _LISTED]


class LinearProfile(Profile):
    def prefill(self, num_sequences: int, tokens: int) -> int:
        return 100 + num_sequences * tokens

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> int:
        return rank * (3 + num_sequences * tokens)


def build(policy: str, pool: int, batch_tokens: int, most: int) -> Replica:
    name, batching, *variant = policy.split()
    if {"paged", "no_evict", "estimated", "on_demand"} & set(variant):
        pool = 56 + pool % 13  # little more than one sequence may take, so that blocks run out
    unblocked = "none" if "unlimited" in variant else "peak"
    settings = ReplicaSettings(
        policy=name,
        batching=batching,
        max_total_token_num=pool,
        max_req_total_len=40,
        running_max_req_size=most,
        max_num_seqs=most,
        max_num_batched_tokens=most + 7 if batching in IN_PIECES else batch_tokens + most,
        batch_max_tokens=batch_tokens + most,
        prefetch="prefetch" in variant,
        front_end=FrontEndCost(150, 20, 1 + pool % 2) if "front" in variant else NO_FRONT_END,
        strict="strict" in variant,
        max_loras=1 + pool % 2 if {"loads", "blocking"} & set(variant) and pool % 5 else None,
        max_cpu_loras=1,
        max_concurrent_loads=1 + pool % 2,
        max_overtakes=pool % 3,
        look_ahead=pool % 4,
        blocking_loads="blocking" in variant,
        fair_weights={"a1": Fraction(3, 2), "a2": Fraction(2)},
        fair_by="tenant" if "tenants" in variant else "adapter",
        fair_max_running=1 + pool % 2 if "places" in variant else None,
        batch_num_adapters=1 + pool % 2,
        first_token_slo_ps=PREFILL_ALLOWANCE_PS + 20_000,
        profile=LinearProfile(),
        memory=next(
            (memory for memory in ("no_evict", "paged", "estimated", "on_demand") if memory in variant), unblocked
        ),
        block_size=4,
        watermark=0.1 if pool % 3 else 0.0,
        prefix_cache="blocks" if "blocks" in variant else "radix" if "radix" in variant else "none",
        share_within_plan="share" in variant,
        async_scheduling="ahead" in variant,
        long_prefill_token_threshold=(0, 5)[pool % 2],
        scheduler_reserve_full_isl=bool(pool % 3),
        sglang=SglangRules(
            max_prefill_tokens=30,
            chunked="whole" not in variant,
            enable_mixed_chunk="beside" in variant,
            schedule_conservativeness=(0.1, 0.5, 1.0)[pool % 3],
            new_token_ratio_decay_steps=10,
            retract_decode_steps=1 + pool % 3,
            prefill_max_requests=2 if pool % 4 == 0 else None,
            prefill_decode_interval=2 if "interval" in variant else 0,
            lora_drain_wait_threshold=5_000 if "drain" in variant else 0,
            pinned_loras=frozenset({"a0"}) if pool % 7 == 0 and pool % 2 else frozenset(),
            overlap="overlap" in variant,
        ),
    )
    cache = StaticTrie.build([[0, 1, 2, 3, 4], [0, 1, 9]]) if "cached" in variant else None
    if not {"loads", "blocking"} & set(variant):
        return build_replica(settings, cache)
    return build_replica(
        settings,
        cache,
        load_ps=lambda adapter, tier: adapter.rank * (300 if tier is Tier.HOST else 2_500),
        load_faults=lambda adapter, attempt, at_ps: LoadFault(adapter.rank == 2 and attempt == 0),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num = draw(st.integers(1, 14))
    ranks = {f"a{index}": draw(st.sampled_from([1, 2, 4])) for index in range(3)}
    arrivals = []
    at_ps = 0
    for handle in range(num):
        at_ps += draw(st.sampled_from([0, 0, 1, 500, 3_000, 40_000, 10_000_000_000]))
        max_new = draw(st.one_of(st.integers(1, 20), st.just(20)))
        name = draw(st.sampled_from([None, *ranks]))
        prompt = draw(st.integers(1, 20))
        fork = draw(st.sampled_from([40, 9, 4]))  # where its tokens leave those of the others
        token_ids = [index if index < fork else 100 * handle + index for index in range(40)]
        sequence = Sequence(
            handle,
            prompt_tokens=prompt,
            max_new_tokens=max_new,
            arrived_ps=at_ps,
            adapter=None if name is None else Adapter(name, ranks[name]),
            tenant_id=f"a{handle % 3}",
            prompt_token_ids=token_ids[:prompt],
            output_token_ids=token_ids[prompt:],
        )
        sequence.priority = draw(st.sampled_from([0, 0, 1, -1]))
        arrivals.append((at_ps, sequence, draw(st.one_of(st.integers(1, max_new), st.just(max_new)))))
    cancels = draw(
        st.lists(
            st.tuples(st.integers(0, at_ps + 60_000), st.integers(0, num - 1)), max_size=5, unique_by=lambda c: c[1]
        )
    )
    arrived = {sequence.handle: at for at, sequence, _ in arrivals}
    return World(arrivals, [(max(at, arrived[handle]), handle) for at, handle in cancels])


def nothing_is_negative_or_over(replica: Replica, pool: int, most: int) -> None:
    running = replica.running
    held = sum(s.input_tokens + s.output_tokens_at(running.decode_step) - 1 for s in running)
    held += sum(s.input_tokens for s in running.prefilling.values())
    held += sum(s.input_tokens + s.held_output_tokens - 1 for s in running.held.values())
    assert running.kv_tokens == held
    use = replica.memory.block_use(running)
    if use is None:
        cached = cache.num_unpinned * cache.block_size if isinstance(cache := replica.prefix_cache, BlockCache) else 0
        in_pool = replica.kv_tokens + running.adapter_slots + cached
        assert 0 <= in_pool <= pool or isinstance(replica.memory, UnlimitedMemory)
    else:  # after a commit the next step may lack blocks, which preemption will find
        assert use.used + use.cached + use.free == (56 + pool % 13) // 4
        assert use.used >= 0
        assert use.free >= -use.cached - (0 if replica.memory.reserved else running.num_decoding)
    assert replica.num_running <= most
    sequences = [*running, *running.prefilling.values(), *running.held.values()]
    ended = replica.ended if isinstance(replica.memory, OnDemandMemory) else ()
    sequences = [one for one in sequences if not (one.handle in ended and one.handle in running.held)]
    adapters = {s.adapter for s in sequences if s.adapter is not None}
    assert running.adapter_slots == sum(adapter.slots for adapter in adapters)
    assert running.adapter_keys == {adapter.key for adapter in adapters}
    assert running.adapter_pins == sum(s.adapter is not None for s in sequences)
    if any(s.handle in running.prefilling for s in replica._context.admitted):
        return  # admitted, not planned yet
    if isinstance(replica.adapters, AdapterSlots):
        return  # a prefill may evict an adapter of sequences that decode
    for adapter in adapters:
        assert replica.resident_adapters[adapter.key] == adapter


def phases(log: Log, world: World) -> dict[int, Phases]:
    """Return where the time went of each that has ended, which adds up."""
    sequences = {sequence.handle: sequence for _, sequence, _ in world.arrivals}
    found: dict[int, Phases] = {}
    for kind, end_ps, *rest in log:
        if kind in ("finished", "cancelled", "dropped"):
            sequence = sequences[rest[0]]
            found[sequence.handle] = parts = sequence.phases(end_ps)
            assert sum(parts) == end_ps - sequence.arrived_ps
            assert min(parts) >= 0
            if sequence.first_admitted_ps is not None:  # not that sums are made to fit
                assert sequence.queue_load_ps <= sequence.first_admitted_ps - sequence.arrived_ps
    return found


def test_an_arrival_during_a_load_is_known_when_the_load_ends_if_steps_are_decided_ahead() -> None:
    """The decision at the end of the load was taken a step before, when the arrival was there."""

    def sequence(handle: int, at_ps: int, adapter: Adapter | None = None) -> tuple[int, Sequence, int]:
        ids = list(range(1, 21))
        return at_ps, Sequence(handle, 1, 20, at_ps, adapter, prompt_token_ids=[0], output_token_ids=ids), 20

    world = World([sequence(0, 0), sequence(1, 1, Adapter("a0", 1)), sequence(2, 3_001)], step_ps=1_000, token_ps=7)
    stepped, skipped = (build("fcfs vllm on_demand blocks share ahead loads", 134, 40, 3) for _ in range(2))
    log = step_by_step(stepped, world.anew(), lambda _replica: None)
    assert [entry[1:3] for entry in log if entry[0] == "admitted"] == [(0, 0), (5_077, 1), (5_077, 2)]
    assert jump(skipped, world.anew()) == log


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=worlds(), pool=st.integers(60, 150), batch_tokens=st.integers(40, 60), most=st.integers(1, 6))
def test_skipping_equals_stepping_and_nothing_is_lost(
    policy: str, world: World, pool: int, batch_tokens: int, most: int
) -> None:
    stepped = build(policy, pool, batch_tokens, most)
    world_stepped, world_skipped = world.anew(), world.anew()
    log = step_by_step(stepped, world_stepped, lambda replica: nothing_is_negative_or_over(replica, pool, most))
    skipped = build(policy, pool, batch_tokens, most)
    assert jump(skipped, world_skipped) == log
    assert phases(log, world_stepped) == phases(log, world_skipped)
    if isinstance(stepped.prefix_cache, BlockCache) and isinstance(skipped.prefix_cache, BlockCache):
        assert skipped.prefix_cache.paths() == stepped.prefix_cache.paths()
        assert skipped.prefix_cache.num_evictions == stepped.prefix_cache.num_evictions

    ends = Counter(entry[2] for entry in log if entry[0] in ("finished", "cancelled", "dropped"))
    given_up = {handle for _, handle in world.cancels} | {entry[2] for entry in log if entry[0] == "dropped"}
    assert policy.startswith("abort") or all(entry[0] != "dropped" for entry in log)
    for _, sequence, length in world.arrivals:
        end = next((entry for entry in log if entry[0] == "finished" and entry[2] == sequence.handle), None)
        if end is None and policy in NEVER_FREED_FROM_CANCELLED:
            continue
        if sequence.handle not in given_up:
            assert end is not None
            assert ends[sequence.handle] == 1
            assert end[3:] == ("eos", length)
        else:
            assert ends[sequence.handle] == 1
    for replica in (stepped, skipped):
        assert not len(replica.running)
        assert not replica.kv_tokens
        assert replica.adapters.options.keep_unused or not replica.resident_adapters
        if "strict" not in policy:  # which never sweeps a queue that holds cancelled requests only
            assert not replica.num_waiting


def test_the_pool_holds_those_who_decode_while_a_prompt_is_computed_in_pieces() -> None:
    prompts = [(3_000, 15, 18), (3_001, 9, 20), (3_001, 17, 8), (3_002, 15, 4), (43_002, 2, 10)]
    arrivals = [
        (at_ps, Sequence(handle, tokens, most, arrived_ps=at_ps), most)
        for handle, (at_ps, tokens, most) in enumerate(prompts)
    ]
    log = step_by_step(
        build("fcfs chunked", 65, 40, 4),
        World(arrivals, []),
        lambda replica: nothing_is_negative_or_over(replica, 65, 4),
    )
    assert sum(entry[0] == "finished" for entry in log) == len(prompts)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, deadline=None)
@given(world=worlds(), num_steps=st.integers(0, 12))
def test_lose_gives_back_every_unfinished_sequence_with_what_it_produced(
    policy: str, world: World, num_steps: int
) -> None:
    replica = build(policy, 150, 60, 6)
    for at_ps, sequence, _ in world.arrivals:
        replica.submit(sequence, at_ps)
    at_ps = world.arrivals[-1][0]

    device = Device({sequence.handle: length for _, sequence, length in world.arrivals})
    produced: dict[int, int] = {}
    decision = replica.plan(at_ps)
    finished = {event.sequence.handle for event in decision.events if isinstance(event, Dropped)}
    for _ in range(num_steps):
        if not isinstance(decision, Plan):
            break
        ran = device.run(decision, at_ps, 1, None)
        at_ps = ran.end_ps
        finished |= {event.sequence.handle for event in replica.commit(decision, ran) if isinstance(event, Finished)}
        decision = replica.plan(at_ps)
        device.forget(decision.leaves)
        finished |= {event.sequence.handle for event in decision.events if isinstance(event, Dropped | Finished)}
        preempted = [event.sequence for event in decision.events if isinstance(event, Preempted)]
        produced |= {sequence.handle: sequence.produced_tokens for sequence in preempted}
    produced |= device.produced
    unfinished, events = replica.lose(at_ps)
    finished |= {event.sequence.handle for event in events if isinstance(event, Finished)}
    assert {s.handle for s in unfinished} == {s.handle for _, s, _ in world.arrivals} - finished
    assert [s.arrived_ps for s in unfinished] == sorted(s.arrived_ps for s in unfinished)
    for sequence in unfinished:
        assert sequence.produced_tokens == produced.get(sequence.handle, 0)
    assert not len(replica.running)
    assert not replica.kv_tokens
    assert not replica.num_waiting


def test_cancel_while_a_plan_runs_takes_effect_at_the_next_boundary_and_returns_every_kv_token() -> None:
    replica = build("fcfs continuous", 150, 60, 6)
    world = World([(0, Sequence(1, 10, 20), 20)], [(2_000, 1)])
    log = jump(replica, world)
    assert [entry[0] for entry in log] == ["admitted", "first", "cancelled"]
    assert not replica.kv_tokens


def test_cancel_of_a_running_sequence_puts_out_the_adapter_that_it_alone_used() -> None:
    adapters = Residency(AdapterOptions(keep_unused=False))
    replica = Replica(Fifo(), Continuous(BatchLimits(4, 60)), PeakMemory(150), adapters=adapters)
    for handle, name in ((1, "a"), (2, "b"), (3, "a")):
        replica.submit(Sequence(handle, 10, 20, adapter=Adapter(name, 1)), 0)
    plan = replica.plan(0)
    assert isinstance(plan, Plan)
    replica.commit(plan, Device({1: 20, 2: 20, 3: 20}).run(plan, 0, 1, None))
    evictions = []
    for at_ps, handle in enumerate((1, 3, 2), start=2_000):
        replica.cancel(handle, at_ps)
        evictions.append(replica.plan(at_ps).adapter_evictions)
    assert evictions == [(), ("a",), ("b",)]
    assert not replica.resident_adapters


def test_req_queue_waits_ten_decode_steps_between_prefills() -> None:
    replica = build("req_queue slora_loop", 150, 60, 6)
    first, second = Sequence(1, 10, 20), Sequence(2, 10, 3, arrived_ps=1)
    log = jump(replica, World([(0, first, 20), (1, second, 3)]))
    admitted = {entry[2]: entry[1] for entry in log if entry[0] == "admitted"}
    prefill_ps = 1_000 + 7 * 10
    ten_steps_ps = sum(1_000 + 7 * (10 + step) for step in range(10))
    assert admitted == {1: 0, 2: prefill_ps + ten_steps_ps}


def test_strict_req_queue_polls_ten_milliseconds_after_it_became_empty() -> None:
    replica = build("req_queue slora_loop strict", 150, 60, 6)
    log = jump(replica, World([(0, Sequence(1, 10, 1), 1), (5_000, Sequence(2, 10, 1, arrived_ps=5_000), 1)]))
    admitted = {entry[2]: entry[1] for entry in log if entry[0] == "admitted"}
    assert admitted == {1: 0, 2: 1_070 + 10_000_000_000}
