"""Residency: places, tiers, loads, failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.adapters.loads import THRASH_PS, WELL, AdapterLog, AdapterOptions, Ahead, LoadFault, Tier
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Activated, Evicted, LoadBegan, LoadEnded
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.endings import FinishReason

A, B, C = Adapter("a", 1), Adapter("b", 2), Adapter("c", 3)


@contextmanager
def in_use(held: Residency, *adapters: Adapter) -> Iterator[None]:
    """Let sequences of the batch use adapters meanwhile."""
    for adapter in adapters:
        held.use.pin(adapter)
    yield
    for adapter in adapters:
        held.use.unpin(adapter)


def residency(options: AdapterOptions, fails: tuple[int, ...] = ()) -> Residency:
    return Residency(
        options,
        load_ps=lambda adapter, tier: adapter.rank * (10 if tier is Tier.HOST else 100),
        load_faults=lambda adapter, attempt, at_ps: LoadFault(attempt in fails),
    )


def test_an_adapter_is_usable_when_its_load_has_ended_and_asking_again_changes_nothing() -> None:
    held = residency(AdapterOptions())
    assert not held.require(A, 5)
    assert not held.require(A, 6)
    assert (held.num_loads, held.next_event_ps) == (1, 105)
    held.advance(104)
    assert not held.gpu
    held.advance(105)
    assert held.require(A, 105)


def test_the_least_recently_used_unpinned_adapter_makes_room_and_comes_back_faster_from_host_memory() -> None:
    held = residency(AdapterOptions(max_loras=2))
    for adapter in (A, B):
        held.require(adapter, 0)
    held.advance(1_000)
    assert held.require(A, 1_000)
    with in_use(held, A):
        assert not held.require(C, 1_000)
    assert held.take_evicted() == ("b",)
    held.advance(2_000)
    with in_use(held, A, C):
        assert not held.require(B, 2_000)
    assert held.num_loads == 3
    with in_use(held, A):
        assert not held.require(B, 2_000)
    assert (held.next_event_ps, held.take_evicted()) == (2_020, ("c",))


def test_a_placement_sees_a_whole_load_half_of_one_that_runs_wherever_it_goes_and_none_on_the_gpu() -> None:
    held = residency(AdapterOptions(max_loras=2, max_concurrent_loads=1))
    assert [held.load_ps(adapter) for adapter in (A, B, C)] == [100, 200, 300]
    held.require(A, 0)
    held.require(B, 0)  # waits for the load of A
    held.load(C, 0)  # on request, into host memory
    assert [held.load_ps(adapter) for adapter in (A, B, C)] == [50, 200, 150]
    held.advance(100)
    assert [held.load_ps(adapter) for adapter in (A, B, C)] == [0, 100, 150]
    held.advance(300)
    held.settle(300)
    assert held.take_evicted() == ("a",)
    assert [held.load_ps(adapter) for adapter in (A, B, C)] == [10, 0, 0]
    held.require(A, 300)
    assert held.load_ps(A) == 5


@pytest.mark.parametrize("options", [AdapterOptions(max_loras=4), AdapterOptions(max_slots=40)])
def test_asking_again_for_an_adapter_whose_load_waits_evicts_none(options: AdapterOptions) -> None:
    a, b, c, d = (Adapter(name, 1, 10) for name in "abcd")
    held = residency(replace(options, max_concurrent_loads=1))
    for at_ps, adapter in ((0, a), (1_000, b), (2_000, c)):
        held.advance(at_ps)
        held.require(adapter, at_ps)
    for at_ps in range(2_000, 2_005):
        assert not held.require(d, at_ps)  # after c
    assert held.has_place(d, ["a", "b"])
    held.advance(3_000)
    assert (list(held.gpu), held.num_loads, held.take_evicted()) == (["a", "b", "c", "d"], 4, ())


def test_asking_again_for_an_adapter_whose_load_waits_takes_no_more_slots() -> None:
    a, b, c, d = (Adapter(name, 1, 10) for name in "abcd")
    held = residency(AdapterOptions(max_slots=40, max_concurrent_loads=1))
    for at_ps, adapter in ((0, a), (0, b), (0, b), (1_000, c), (1_000, d), (1_000, d)):
        held.advance(at_ps)
        held.require(adapter, at_ps)
    held.advance(2_000)
    assert (list(held.gpu), held.take_evicted()) == (["a", "b", "c", "d"], ())


def test_loads_beyond_the_limit_wait_for_one_to_end() -> None:
    held = residency(AdapterOptions(max_concurrent_loads=1))
    for adapter in (C, A):
        held.require(adapter, 0)
    assert (held.num_loads, held.next_event_ps) == (1, 300)
    held.advance(300)
    assert (held.num_loads, held.next_event_ps) == (2, 400)


def test_a_load_that_fails_begins_anew_and_is_given_up_after_the_last_attempt() -> None:
    held = residency(AdapterOptions(max_load_attempts=2), fails=(0,))
    held.require(A, 0)
    held.advance(1_000)
    assert held.require(A, 1_000)
    assert (held.num_loads, held.num_failed_loads) == (2, 1)
    lost = residency(AdapterOptions(max_load_attempts=2), fails=(0, 1))
    lost.require(A, 0)
    lost.advance(1_000)
    assert lost.take_given_up() == {"a"}
    assert not lost.take_given_up()
    assert lost.next_event_ps is None


def test_blocking_loads_let_the_step_wait_for_what_is_left() -> None:
    held = residency(AdapterOptions(blocking=True))
    held.prefetch(C, 0)
    assert held.require(C, 250)
    assert held.require(A, 250)
    assert held.wait_ps([A, C], 250) == 100
    assert set(held.gpu) == {"a", "c"}
    assert held.wait_ps([A, C], 350) == 0


def test_host_memory_forgets_the_least_recently_used() -> None:
    held = residency(AdapterOptions(max_cpu_loras=2, max_loras=2))
    for at_ps, adapter in ((0, A), (100, B)):
        held.require(adapter, at_ps)
    held.advance(300)
    with in_use(held, A):
        assert held.require(B, 300)
    held.require(C, 300)  # in place of B: A was in use until now
    held.advance(600)
    assert (list(held.host), held.take_evicted()) == (["a", "c"], ("b",))


def test_a_use_on_the_gpu_refreshes_an_adapter_in_host_memory_too() -> None:
    held = residency(AdapterOptions(max_cpu_loras=2, max_loras=3))
    for at_ps, adapter in ((0, A), (100, B)):
        held.require(adapter, at_ps)
    held.advance(300)
    assert held.require(A, 300)
    held.require(C, 300)
    held.advance(600)
    assert (list(held.host), sorted(held.gpu)) == (["a", "c"], ["a", "b", "c"])


def test_host_memory_never_forgets_an_adapter_in_use() -> None:
    held = residency(AdapterOptions(max_cpu_loras=2, max_loras=2))
    held.require(A, 0)
    held.advance(100)
    with in_use(held, A):
        for at_ps, adapter in ((100, B), (300, C), (600, B)):
            assert not held.require(adapter, at_ps)
            assert held.next_event_ps is not None
            held.advance(held.next_event_ps)
            assert "a" in held.host


def test_host_memory_of_one_place_has_the_last_adapter() -> None:
    held = residency(AdapterOptions(max_cpu_loras=1, max_loras=1))
    at_ps = 0
    for adapter, loading_ps in ((A, 100), (B, 200), (A, 100)):
        assert not held.require(adapter, at_ps)
        assert held.next_event_ps == at_ps + loading_ps
        at_ps += loading_ps
        held.advance(at_ps)


def test_use_refreshes_an_adapter_so_that_another_makes_room() -> None:
    held = residency(AdapterOptions(max_loras=2))
    for adapter in (A, B):
        held.require(adapter, 0)
    held.advance(1_000)
    assert held.require(A, 1_000)
    assert not held.require(C, 1_000)
    assert held.take_evicted() == ("b",)


def test_a_load_from_host_memory_refreshes_the_adapter_there() -> None:
    held = residency(AdapterOptions(max_loras=1, max_cpu_loras=2))
    at_ps = 0
    for adapter, loading_ps in ((A, 100), (B, 200), (A, 10), (C, 300), (A, 10), (B, 200)):
        assert not held.require(adapter, at_ps)
        assert held.next_event_ps == at_ps + loading_ps
        at_ps += loading_ps
        held.advance(at_ps)


def test_a_load_that_waits_for_another_to_end_takes_a_place() -> None:
    held = residency(AdapterOptions(max_loras=2, max_concurrent_loads=1))
    for adapter in (A, B, C):
        assert not held.require(adapter, 0)
    held.advance(10_000)
    assert set(held.gpu) == {"a", "b"}
    assert held.num_loads == 2


def test_attempts_count_anew_after_a_load_that_succeeded() -> None:
    outcomes = iter([True, False, True, False])  # whether the load fails
    attempts: list[int] = []

    def fails(adapter: Adapter, attempt: int, at_ps: int) -> LoadFault:
        attempts.append(attempt)
        return LoadFault(next(outcomes))

    held = Residency(AdapterOptions(max_load_attempts=2), load_faults=fails)
    assert held.require(A, 0)
    held.keep_only((), 1_000)
    assert held.require(A, 0)
    assert attempts == [0, 1, 0, 1]
    assert not held.take_given_up()


def ahead(held: Residency, *adapters: Adapter) -> list[str]:
    """Look ahead at time 0, and return whose loads are under way."""
    held.load_ahead(Ahead(adapters), 0)
    return list(held.loading)


def test_looking_ahead_begins_as_many_loads_as_may_be_under_way_and_again_changes_nothing() -> None:
    held = residency(AdapterOptions(max_concurrent_loads=2))
    assert ahead(held, A, A, B, C) == ["a", "b"]
    assert ahead(held, A, B, C) == ["a", "b"]
    held.require(C, 0)  # who asks waits for no load that was begun ahead and has not begun
    held.advance(100)
    assert list(held.loading) == ["b", "c"]


def test_looking_ahead_puts_out_only_what_nobody_uses_or_needs() -> None:
    held = residency(AdapterOptions(max_loras=2))
    for adapter in (A, B):
        held.require(adapter, 0)
    held.advance(1_000)
    with in_use(held, A, B):
        assert ahead(held, C) == []
    assert ahead(held, A, C, B) == []
    assert ahead(held, A, C) == ["c"]
    assert held.take_evicted() == ("b",)


MANY = [Adapter(f"m{number}", 4 + number) for number in range(6)]
CHANGES = st.tuples(
    st.sampled_from(["look", "look", "require", "pin", "unpin", "advance", "settle", "keep"]),
    st.integers(0, 5),
    st.integers(1, 900),
)


@given(
    options=st.builds(
        AdapterOptions,
        max_loras=st.none() | st.integers(1, 4),
        max_slots=st.none() | st.integers(16, 80),
        max_concurrent_loads=st.integers(1, 3),
        max_load_attempts=st.integers(1, 2),
    ),
    fails=st.sets(st.integers(0, 1)),
    coming=st.lists(st.lists(st.sampled_from(MANY), max_size=5), min_size=1, max_size=3),
    changes=st.lists(CHANGES, max_size=40),
)
def test_what_is_remembered_of_the_adapters_ahead_changes_nothing(
    options: AdapterOptions, fails: set[int], coming: list[list[Adapter]], changes: list[tuple[str, int, int]]
) -> None:
    remembering, other = residency(options, tuple(fails)), residency(options, tuple(fails))
    known = [Ahead(adapters) for adapters in coming]
    pinned: list[Adapter] = []
    at_ps = 0
    for what, number, later_ps in changes:
        adapter = MANY[number]
        wants: list[bool] = []
        for held in (remembering, other):
            if what == "look":
                which = number % len(coming)
                ahead_of = known[which] if held is remembering else Ahead(coming[which])
                wants.append(held.load_ahead(ahead_of, at_ps))
            elif what == "require":
                wants.append(held.require(adapter, at_ps))
            elif what == "pin" and adapter.key in held.gpu:
                held.use.pin(adapter)
            elif what == "unpin" and adapter in pinned:
                held.use.unpin(adapter)
            elif what == "advance":
                held.advance(at_ps + later_ps)
            elif what == "settle":
                held.settle(at_ps)
            elif what == "keep":
                held.keep_only([*held.use.pins], at_ps)
        if what == "pin" and adapter.key in other.gpu:
            pinned.append(adapter)
        elif what == "unpin" and adapter in pinned:
            pinned.remove(adapter)
        elif what == "advance":
            at_ps += later_ps
        assert wants[:1] == wants[1:]
        for shown in ("gpu", "loading", "aside", "staged", "given_up", "evicted", "next_event_ps", "num_loads"):
            assert getattr(remembering, shown) == getattr(other, shown)


def test_without_a_number_the_slots_of_all_bound_what_is_on_the_gpu() -> None:
    big = Adapter("big", 10)  # 40 slots; a has 4, b 8, c 12
    held = residency(AdapterOptions(max_slots=24))
    assert ahead(held, A, B, C) == ["a", "b", "c"]
    held.advance(1_000)
    assert not held.require(Adapter("d", 3), 1_000)  # a and b have to go for it
    assert (held.take_evicted(), list(held.gpu)) == (("a", "b"), ["c"])
    held.advance(2_000)
    with in_use(held, C):
        assert not held.require(big, 2_000)
    assert (held.take_evicted(), list(held.gpu)) == ((), ["c", "d"])  # it would not do
    assert not held.require(big, 2_000)
    assert held.take_evicted() == ("d", "c")  # alone it may have more
    held.advance(9_000)
    assert held.require(big, 9_000)
    with in_use(held, big):
        assert not held.require(A, 9_000)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_load_that_fails_or_hangs_takes_no_place_and_no_other_load_waits_for_it(blocking: bool) -> None:
    held = Residency(
        AdapterOptions(max_loras=2, max_concurrent_loads=1, max_load_attempts=2, blocking=blocking),
        load_ps=lambda adapter, tier: 100,
        load_faults=lambda adapter, attempt, at_ps: {
            "a": LoadFault(fails=True),
            "b": LoadFault(factor=Fraction(1_000)),
        }.get(adapter.key, WELL),
    )
    d = Adapter("d", 4)
    for adapter in (A, B):
        assert not held.require(adapter, 0)
    assert [held.require(adapter, 0) for adapter in (C, d)] == [blocking] * 2
    assert held.wait_ps([C], 0) == 100
    held.advance(200)
    assert (set(held.gpu), held.take_given_up()) == ({"c", "d"}, {"a"})
    held.advance(100_000)
    with in_use(held, C, d):
        assert not held.require(B, 100_000)  # read, but there is no place
        held.settle(100_000)
    assert ("b" in held.host, held.take_evicted()) == (True, ())


def test_an_adapter_that_was_read_aside_gets_the_place_of_an_unused_one() -> None:
    held = residency(AdapterOptions(max_loras=1, blocking=True), fails=(0,))
    assert not held.require(C, 0)
    held.advance(600)
    held.settle(600)
    assert list(held.gpu) == ["c"]


@pytest.mark.parametrize(("memory_tokens", "slots"), [(0, 900), (5_000, 4_900)])
def test_an_unset_max_loras_follows_from_the_memory_that_the_longest_request_leaves(
    memory_tokens: int, slots: int
) -> None:
    settings = ReplicaSettings("fcfs", 1_000, 100, memory_tokens=memory_tokens)
    assert (settings.adapter_options.max_loras, settings.adapter_options.max_slots) == (None, slots)
    assert replace(settings, max_loras=3).adapter_options.max_loras == 3


def test_log_has_loads_and_evictions_with_tier_and_times() -> None:
    held = residency(AdapterOptions(max_loras=1, max_cpu_loras=1), fails=(0,))
    held.log = AdapterLog()
    held.require(A, 0)
    held.advance(1_000)
    held.settle(1_000)
    held.require(B, 1_000)
    held.advance(2_000)
    assert held.log.take() == [
        LoadBegan(A, "disk", 0, thrash=False),
        LoadEnded(A, "disk", 100, 100, failed=True),
        LoadBegan(A, "disk", 100, thrash=False),
        LoadEnded(A, "disk", 200, 100, failed=False),
        Activated(A, 1_000),
        Evicted(A, "gpu", 1_000, stayed_ps=0),
        LoadBegan(B, "disk", 1_000, thrash=False),
        LoadEnded(B, "disk", 1_200, 200, failed=True),
        LoadBegan(B, "disk", 1_200, thrash=False),
        LoadEnded(B, "disk", 1_400, 200, failed=False),
        Evicted(A, "host", 1_400),
    ]
    assert held.log.take() == []


@pytest.mark.parametrize(("after_ps", "thrashes"), [(1, True), (THRASH_PS, True), (THRASH_PS + 1, False)])
def test_adapter_loaded_again_within_a_minute_of_its_eviction_thrashes(after_ps: int, thrashes: bool) -> None:
    held = residency(AdapterOptions(keep_unused=False))
    held.log = AdapterLog()
    held.require(A, 0)
    held.advance(1_000)
    held.keep_only((), 1_000)
    held.log.take()
    held.require(A, 1_000 + after_ps)
    assert held.log.take() == [LoadBegan(A, "host", 1_000 + after_ps, thrash=thrashes)]


def test_log_remembers_evictions_for_a_minute_only() -> None:
    log = AdapterLog()
    for number in range(100):
        log.evicted(Adapter(str(number), 1), "gpu", number * THRASH_PS // 10)
    assert len(log._evicted_ps) == 11


def test_an_adapter_out_of_use_leaves_gpu_and_host_at_once_if_nobody_has_it() -> None:
    replica = build_replica(ReplicaSettings("fcfs", 1000, 100), load_ps=lambda adapter, tier: 10)
    held = replica.adapters
    held.log = AdapterLog()
    for adapter in (A, B):
        held.require(adapter, 0)
    held.advance(100)
    held.log.take()
    replica.retire(A.key, 100)
    assert list(held.gpu) == ["a", "b"]
    decision = replica.plan(100)
    assert decision.adapter_evictions == ("a",)
    assert (list(held.gpu), list(held.host)) == (["b"], ["b"])
    assert held.log.take() == [Evicted(A, "gpu", 100, stayed_ps=90), Evicted(A, "host", 100)]
    replica.retire(C.key, 200)  # not there, nor known
    assert not replica.plan(200).adapter_evictions


def test_an_adapter_out_of_use_stays_for_those_who_have_it_and_goes_when_it_came_for_the_last() -> None:
    replica = build_replica(
        ReplicaSettings("fcfs", 1000, 100, max_num_seqs=1),
        load_ps=lambda adapter, tier: 10,
    )
    running, waiting = (Sequence(handle, 5, 2, adapter=A) for handle in (1, 2))
    for sequence in (running, waiting):
        replica.submit(sequence, 0)
    assert isinstance(replica.plan(0), Idle)  # its load has begun
    replica.retire(A.key, 5)
    at_ps = 10
    for handle in (1, 2):
        for ended in ([], [(handle, FinishReason.LENGTH)]):
            plan = replica.plan(at_ps)
            assert isinstance(plan, Plan)
            assert list(replica.resident_adapters) == ["a"], at_ps
            at_ps += 100
            replica.commit(plan, Ran(1, at_ps, ended))
    decision = replica.plan(at_ps)
    assert (decision.adapter_evictions, len(replica.adapters.host)) == (("a",), 0)
    again = Sequence(3, 5, 2, adapter=A)  # resumed; it began before
    replica.submit(again, at_ps)
    assert isinstance(replica.plan(at_ps), Idle)
    plan = replica.plan(at_ps + 10)
    assert isinstance(plan, Plan)
    replica.commit(plan, Ran(1, at_ps + 20, [(3, FinishReason.STOP)]))
    assert replica.plan(at_ps + 20).adapter_evictions == ("a",)
    assert not replica.adapters.retiring


def test_a_load_on_request_evicts_what_is_unused_once_it_is_over_and_else_ends_in_host_memory() -> None:
    replica = build_replica(
        ReplicaSettings("fcfs", 1000, 100, max_loras=1), load_ps=lambda adapter, tier: 10 if tier is Tier.HOST else 100
    )
    held = replica.adapters
    replica.load(A, 0)
    assert replica.plan(0).until_ps == 100
    assert (held.take_answers(), list(held.gpu)) == ([], [])
    replica.load(B, 100)
    replica.plan(100)
    assert (held.take_answers(), list(held.gpu)) == ([("a", True)], ["a"])
    assert replica.plan(200).adapter_evictions == ("a",)
    assert (held.take_answers(), list(held.gpu)) == ([("b", True)], ["b"])
    replica.submit(Sequence(1, 5, 100, adapter=B), 300)
    replica.load(C, 300)
    plan = replica.plan(300)
    assert isinstance(plan, Plan)
    assert plan.until_ps == 400  # the batch need not wait
    replica.commit(plan, Ran(1, 400))
    replica.plan(400)
    assert (held.take_answers(), list(held.gpu), "c" in held.host) == ([("c", True)], ["b"], True)
    replica.load(C, 400)
    assert replica.plan(400).until_ps == 410


class CountingFifo(Fifo):
    """Counts the sequences that a look at all of them reads."""

    num_read = 0

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in super().__iter__():
            self.num_read += 1
            yield sequence


def test_adapters_out_of_use_cost_one_pass_of_the_queue_however_many_they_are() -> None:
    queue = CountingFifo()
    settings = ReplicaSettings("fcfs", 10_000, 10_000, max_num_seqs=1)
    replica = build_replica(settings, make_queue=lambda _: queue)
    adapters = [Adapter(f"a{number}", 1) for number in range(40)]
    for number, adapter in enumerate([*adapters[:20], *adapters[:20]]):
        replica.submit(Sequence(number, 5, 100, adapter=adapter), 0)
    assert isinstance(replica.plan(0), Plan)
    for adapter in adapters:
        replica.adapters.require(adapter, 0)
    queue.num_read = 0
    replica.plan(0)
    otherwise, queue.num_read = queue.num_read, 0
    for adapter in adapters:
        replica.retire(adapter.key, 0)
    plan = replica.plan(0)
    assert set(plan.adapter_evictions) == {adapter.key for adapter in adapters[20:]}
    assert set(replica.adapters.gpu) == {adapter.key for adapter in adapters[:20]}
    assert queue.num_read <= otherwise + len(queue)
