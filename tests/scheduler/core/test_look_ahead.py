"""Adapters are loaded ahead for those who come next, and for nobody else."""

from collections.abc import Iterator

import pytest

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.facts import Failed, Raised
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence

LOAD_PS = 1_000


class Pairs(Fifo):
    """First come first served, but one with an adapter does not enter alone."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return [] if self.at_rest() else super().admit(admission, running, at_ps)

    def at_rest(self) -> bool:
        return len(self._waiting) < 2 and all(sequence.adapter is not None for sequence in self._waiting)


class Unlisted(Fifo):
    """First come first served; fails when it has to say who waits."""

    def __iter__(self) -> Iterator[Sequence]:
        raise ZeroDivisionError("in __iter__")


def replica(queue: Fifo) -> Replica:
    """Return one with two seats."""
    settings = ReplicaSettings("fcfs", 1_000, 80, max_num_seqs=2, max_num_batched_tokens=100)
    return build_replica(settings, make_queue=lambda _: CheckedQueue(queue), load_ps=lambda adapter, tier: LOAD_PS)


def with_adapter(handle: int) -> Sequence:
    return Sequence(handle, 20, 5, adapter=Adapter(f"a{handle}", 8))


def run_step(one: Replica, at_ps: int) -> None:
    decision = one.plan(at_ps)
    if isinstance(decision, Plan):
        one.commit(decision, Ran(1, at_ps + 10))


@pytest.mark.parametrize(("num_running", "arrives_ps"), [(0, 0), (1, 1), (2, 0), (2, 1)])
def test_nothing_is_loaded_for_one_who_waits_in_a_queue_at_rest(num_running: int, arrives_ps: int) -> None:
    """The batch is empty, decodes with a free seat, or is full, in prefill or later."""
    one = replica(Pairs())
    for handle in range(num_running):
        one.submit(Sequence(10 + handle, 20, 5), 0)
    one.submit(with_adapter(1), arrives_ps)
    for at_ps in (0, 10, 20):
        run_step(one, at_ps)
        assert one.num_running == num_running
        assert not one.adapters.loading
    one.submit(with_adapter(2), 30)
    run_step(one, 30)
    assert set(one.adapters.loading) == {"a1", "a2"}


def test_a_queue_that_cannot_say_who_waits_ends_them_in_the_next_decision_and_who_was_let_in_runs() -> None:
    worker = Member("w", replica(Unlisted()))
    for handle in (0, 1):
        worker.submit(Sequence(handle, 20, 5), 0)
    worker.submit(with_adapter(2), 0)
    plan = worker.plan(0)
    assert isinstance(plan, Plan)
    assert [sequence.handle for sequence in plan.joins] == [0, 1]
    assert plan.until_ps == 0
    assert not any(isinstance(event, Raised) for event in plan.events)
    worker.commit(plan, Ran(1, 10))
    events = worker.plan(10).events
    assert [event.sequence.handle for event in events if isinstance(event, Failed)] == [2]
    assert next(event.message for event in events if isinstance(event, Raised)).endswith("in __iter__")
    assert set(worker.sequences) == {0, 1}
