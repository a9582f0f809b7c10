"""What N waiting sequences cost when their worker is lost or drains, or when they are cancelled: calls counted."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence

FEW, MANY = 250, 1000
MOST = 1.5 * MANY / FEW
"""How many times as many calls four times as many sequences may cost: a bit more than four, for N log N."""
POLICIES = ("fcfs", "req_queue", "vtc_fair", "abort", "cluster", "peft")


def count_calls(act: Callable[[], object]) -> int:
    """Return how many calls, of Python or of C, something makes."""
    calls = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def cluster(policy: str, num_waiting: int) -> ClusterCore:
    """Return a cluster of three workers, with so many waiting on w0, later ones on the others, and no batch full."""
    core = ClusterCore(LeastLoaded())
    for number in range(3):
        settings = ReplicaSettings(policy, 2_000_000, 80, running_max_req_size=1, max_num_seqs=1)
        member = Member(f"w{number}", build_replica(settings))
        core.attach(member, 0)
        for handle in range(num_waiting) if not number else (10**6 + number, 2 * 10**6 + number):
            sequence = Sequence(handle, 5, 5, handle, Adapter(f"a{handle % 20}", 4))
            member.submit(sequence, handle)
        member.plan(10**9)
    return core


def requeue(core: ClusterCore, *, drain: bool) -> None:
    first = core.members["w0"]
    (core.drain if drain else core.lose)(first, 2 * 10**9)
    for name in ("w1", "w2"):
        core.members[name].plan(3 * 10**9)


def cancel_all(core: ClusterCore) -> None:
    for sequence in list(core.members["w0"].sequences.values()):
        core.cancel(sequence, 2 * 10**9)
    core.members["w0"].plan(3 * 10**9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["lose", "drain", "cancel"])
def test_calls_grow_as_the_number_that_waits(policy: str, what: str) -> None:
    costs = []
    for num_waiting in (FEW, MANY):
        core = cluster(policy, num_waiting)
        act = (lambda: cancel_all(core)) if what == "cancel" else lambda: requeue(core, drain=what == "drain")  # noqa: B023
        costs.append(count_calls(act))
        assert core.num_open == (4 if what == "cancel" else num_waiting + 4)
    assert costs[1] <= MOST * costs[0]


def test_requests_that_wait_for_a_worker_in_vain_or_are_cancelled_cost_the_same_each() -> None:
    for end in ("expire", "cancel"):
        costs = []
        for num_waiting in (FEW, MANY):
            core = ClusterCore(LeastLoaded())
            sequences = [Sequence(handle, 5, 5, handle) for handle in range(num_waiting)]
            for handle, sequence in enumerate(sequences):
                core.submit(sequence, handle)

            def end_all(core: ClusterCore = core, sequences: list[Sequence] = sequences, end: str = end) -> None:
                for sequence in sequences:
                    at_ps = core.until_ps
                    assert at_ps is not None
                    assert len(core.expire(at_ps) if end == "expire" else core.cancel(sequence, at_ps)) == 1

            costs.append(count_calls(end_all))
            assert core.until_ps is None
        assert costs[1] <= MOST * costs[0], end


def test_one_that_is_older_than_all_that_wait_goes_to_the_front_and_sorts_nothing() -> None:
    waiting = WaitingList()
    for at_ps in range(100, 200):
        waiting.append(Sequence(at_ps, 5, 5, at_ps))
    preempted = [Sequence(at_ps, 5, 5, at_ps) for at_ps in (99, 98, 97)]

    def put_back() -> None:
        for sequence in preempted:
            waiting.append(sequence)
            assert waiting.first is sequence

    assert count_calls(put_back) < 100
    assert [sequence.handle for sequence in waiting] == list(range(97, 200))


def test_sequences_are_in_order_of_arrival_in_whatever_order_they_came_and_equals_in_the_order_they_came() -> None:
    waiting = WaitingList()
    for handle, at_ps in enumerate((5, 9, 7, 5, 1, 7, 9, 0)):
        waiting.append(Sequence(handle, 5, 5, at_ps))
    assert [sequence.handle for sequence in waiting] == [7, 4, 0, 3, 2, 5, 1, 6]
    assert [sequence.handle for sequence in reversed(waiting)] == [6, 1, 5, 2, 3, 0, 4, 7]
    assert waiting.pop(2) is not None
    waiting.append(Sequence(8, 5, 5, 6))
    assert [sequence.handle for sequence in waiting.clear()] == [7, 4, 0, 3, 8, 5, 1, 6]
    assert not len(waiting)
