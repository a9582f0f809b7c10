"""What waits moves to where it would start first, and nothing else moves."""

from dataclasses import replace

import pytest

from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed
from lorrery.scheduler.core.facts import Cancelled, Recalled
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.balance import MOST_MOVES
from lorrery.scheduler.core.placements.by_load import LeastLoaded, RoundRobin
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.endings import FinishReason
from tests.scheduler.core.clusters import had

TWO_SEATS = ReplicaSettings("fcfs", 10_000, 200, max_num_seqs=2, max_num_batched_tokens=1000)


def cluster(*settings: ReplicaSettings, placement: Placement | None = None) -> ClusterCore:
    core = ClusterCore(placement or LeastLoaded(), ClusterRules(worker_wait_seconds=10))
    for one in settings:
        attach(core, one)
    return core


def attach(core: ClusterCore, settings: ReplicaSettings = TWO_SEATS) -> tuple[Member, list[ClusterEvent]]:
    member = Member(f"w{len(core.members)}", build_replica(settings), settings.max_total_token_num)
    return member, core.attach(member, 0)


def fill(core: ClusterCore, name: str, handles: range, prompt: int = 5, adapter: Adapter | None = None) -> Member:
    """Let a worker have these, of which as many run as have a seat."""
    member = core.members[name]
    for handle in handles:
        member.submit(Sequence(handle, prompt, 5, handle, adapter), handle)
    run(member, 1000)
    return member


def run(member: Member, at_ps: int) -> Plan:
    """Let a worker plan, and run the prefill."""
    plan = member.plan(at_ps)
    assert isinstance(plan, Plan)
    member.commit(plan, Ran(1, at_ps + 1))
    return plan


def settle(core: ClusterCore, at_ps: int = 2000) -> dict[int, str]:
    """Balance until nothing moves, while nobody ends; return where what has moved is."""
    moved: dict[int, str] = {}
    while found := core.balance(at_ps):
        for donor in {move.donor.name: move.donor for move in found}.values():
            for event in recalled(donor, at_ps):
                for placed in core.take_recalled(event, donor, at_ps):
                    assert isinstance(placed, Placed)
                    assert placed.moved_from == donor.name
                    assert placed.why == f"moved from {donor.name}, where it could not start"
                    moved[placed.sequence.handle] = placed.member.name
        for taker in {move.taker.name: move.taker for move in found}.values():
            run(taker, at_ps)
    return moved


def recalled(donor: Member, at_ps: int) -> list[Recalled]:
    return [event for event in donor.plan(at_ps).events if isinstance(event, Recalled)]


def test_a_worker_that_joins_under_load_gets_who_can_start_there_and_half_of_the_rest() -> None:
    core = cluster(TWO_SEATS)
    fill(core, "w0", range(12))
    attach(core)
    moved = settle(core)
    assert list(moved) == [2, 3, 5, 7, 9, 11]  # 0 and 1 run at w0; 2 and 3 start at w1
    assert set(moved.values()) == {"w1"}
    assert [len(member.sequences) for member in core.members.values()] == [6, 6]


def test_after_a_restart_the_first_worker_does_not_keep_everything() -> None:
    core = cluster()
    for handle in range(40):
        assert core.submit(Sequence(handle, 5, 5, handle), handle) == []
    member, events = attach(core)
    while core.is_placing:
        events += core.place_again(0)
    assert len(events) == 40
    run(member, 1000)
    for number in range(3):
        attach(core)
        settle(core)
        shares = sorted(len(member.sequences) for member in core.members.values())
        assert shares[-1] <= 2 * (shares[0] + 1), number
    assert sum(len(member.sequences) for member in core.members.values()) == 40


def test_a_long_queue_moves_a_part_at_a_time() -> None:
    core = cluster(TWO_SEATS)
    fill(core, "w0", range(5 * MOST_MOVES))
    attach(core)
    assert len(core.balance(2000)) == MOST_MOVES
    settle(core)
    shares = [len(member.sequences) for member in core.members.values()]
    assert max(shares) <= 2 * min(shares)


def test_the_only_one_that_waits_moves_to_a_worker_that_can_start_it() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    fill(core, "w0", range(3))
    fill(core, "w1", range(10, 11))
    assert settle(core) == {2: "w1"}


@pytest.mark.parametrize("taker", [range(10, 12), range(10, 13)])
def test_one_that_would_not_start_earlier_elsewhere_stays(taker: range) -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    fill(core, "w0", range(3))
    fill(core, "w1", taker)
    assert settle(core) == {}


def test_one_that_its_worker_can_start_itself_stays() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    member = fill(core, "w0", range(1))
    member.submit(Sequence(1, 5, 5, 1000), 1000)  # it has not been tried yet
    assert settle(core) == {}


def test_one_of_exactly_twice_as_many_that_wait_moves() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    fill(core, "w0", range(6))
    fill(core, "w1", range(10, 14))
    assert settle(core) == {3: "w1"}


def test_memory_counts_as_seats_do() -> None:
    small = replace(TWO_SEATS, max_total_token_num=200, max_num_seqs=9)
    core = cluster(small, small, small)
    fill(core, "w0", range(3), prompt=80)
    fill(core, "w1", range(10, 12), prompt=80)
    assert core.members["w0"].replica.num_waiting == 1
    assert settle(core) == {2: "w2"}


def test_a_place_for_the_adapter_counts_too() -> None:
    one_adapter = replace(TWO_SEATS, max_loras=1, max_num_seqs=9)
    core = cluster(one_adapter, one_adapter, one_adapter)
    for number, name in enumerate(core.members):
        if number < 2:
            fill(core, name, range(10 * number, 10 * number + 1), adapter=Adapter(f"a{number}", 8))
    waiting = Sequence(5, 5, 5, 5, Adapter("b", 8))
    core.members["w0"].submit(waiting, 1500)
    core.members["w0"].plan(1500)
    assert core.members["w0"].replica.num_waiting == 1
    assert settle(core) == {5: "w2"}


def test_one_that_only_its_own_worker_can_hold_stays_and_those_behind_it_move() -> None:
    core = cluster(TWO_SEATS, replace(TWO_SEATS, max_total_token_num=100))
    fill(core, "w0", range(2))
    donor = core.members["w0"]
    donor.submit(Sequence(2, 150, 5, 2), 1500)
    for handle in (3, 4):
        donor.submit(Sequence(handle, 5, 5, handle), 1500)
    donor.plan(1500)
    assert settle(core) == {}  # the first that waits has nowhere to go: the others are behind it
    donor.cancel(2, 1600)
    donor.plan(1600)
    assert settle(core) == {3: "w1", 4: "w1"}


def test_nothing_moves_under_a_placement_that_heeds_no_load_nor_under_strict() -> None:
    for core in (
        cluster(TWO_SEATS, TWO_SEATS, placement=RoundRobin()),
        cluster(replace(TWO_SEATS, strict=True), replace(TWO_SEATS, strict=True)),
    ):
        fill(core, "w0", range(9))
        assert settle(core) == {}


def test_a_worker_that_drains_gets_nothing() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS, TWO_SEATS)
    core.drain(core.members["w1"], 0)
    fill(core, "w0", range(3))
    assert settle(core) == {2: "w2"}


def test_one_that_is_cancelled_on_its_way_ends_once() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    donor = fill(core, "w0", range(3))
    core.balance(2000)
    core.cancel(had(core, 2), 3000)
    (event,) = recalled(donor, 2500)  # at a boundary before the cancel
    (cancelled,) = core.take_recalled(event, donor, 3100)
    assert isinstance(cancelled, Cancelled)
    assert core.num_open == 2
    assert not any(isinstance(event, Cancelled) for event in donor.plan(4000).events)


def test_one_that_has_been_admitted_meanwhile_stays() -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    donor = fill(core, "w0", range(3))
    plan = donor.plan(1500)
    assert isinstance(plan, Plan)
    core.balance(2000)
    donor.commit(plan, Ran(1, 1900, ((0, FinishReason.EOS),)))
    joins = donor.plan(1900).joins  # type: ignore[union-attr]
    assert [sequence.handle for sequence in joins] == [2]
    assert recalled(donor, 2100) == []
    assert core.balance(2200) == []
    assert core.num_open == 2


@pytest.mark.parametrize("drains", [False, True])
def test_one_whose_new_worker_is_gone_goes_where_it_can(drains: bool) -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    donor = fill(core, "w0", range(3))
    core.balance(2000)
    (core.drain if drains else core.lose)(core.members["w1"], 2050)
    (event,) = recalled(donor, 2100)
    (placed,) = core.take_recalled(event, donor, 2100)
    assert isinstance(placed, Placed)
    assert placed.member is donor
    assert core.num_open == 3


@pytest.mark.parametrize("drains", [False, True])
def test_one_whose_old_worker_is_gone_is_placed_once(drains: bool) -> None:
    core = cluster(TWO_SEATS, TWO_SEATS)
    donor = fill(core, "w0", range(3))
    core.balance(2000)
    gave_back, events = (core.drain if drains else core.lose)(donor, 2050)
    assert [event.sequence.handle for event in events] == [s.handle for s in gave_back.sequences]
    assert 2 in {event.sequence.handle for event in events}
    if drains:
        assert recalled(donor, 3000) == []
    assert core.num_open == 3


def test_what_is_looked_for_does_not_grow_with_the_queue() -> None:
    looked: list[int] = []

    class Counted(dict[int, Sequence]):
        def items(self):  # type: ignore[no-untyped-def]
            for entry in super().items():
                looked.append(entry[0])
                yield entry

    core = cluster(TWO_SEATS, replace(TWO_SEATS, max_total_token_num=100))
    donor = fill(core, "w0", range(6 * MOST_MOVES), prompt=150)
    donor.sequences = Counted(donor.sequences)
    assert core.balance(2000) == []
    assert len(looked) <= 5 * MOST_MOVES
