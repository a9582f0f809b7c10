"""When `abort` drops a request that waits, and whom it serves first."""

import pytest

from lorrery.scheduler.core.facts import Dropped
from lorrery.scheduler.core.plan import Idle
from lorrery.scheduler.core.queues.early_drop import PREFILL_ALLOWANCE_PS, EarlyDrop
from tests.scheduler.core.queues.one_queue import replica_of, request, try_once

SLO_PS = PREFILL_ALLOWANCE_PS + 10_000


def test_early_drop_gives_up_a_waiting_request_at_its_deadline_even_if_nothing_runs() -> None:
    replica = replica_of(EarlyDrop(SLO_PS), pool=20)
    replica.submit(request(0, prompt=50), 0)  # never fits
    decision = replica.plan(0)
    assert isinstance(decision, Idle)
    assert decision.until_ps == 10_000
    (dropped,) = replica.plan(10_000).events
    assert isinstance(dropped, Dropped)
    assert not replica.num_waiting


def test_early_drop_serves_the_newest_first_only_under_overload() -> None:
    replica = replica_of(EarlyDrop(SLO_PS), places=2)
    for handle in range(5):
        replica.submit(request(handle, at_ps=handle), handle)
    assert try_once(replica, 10) == [4, 3]
    calm = replica_of(EarlyDrop(SLO_PS), places=10)
    for handle in range(8):
        calm.submit(request(handle), 0)
    assert len(try_once(calm)) == 8  # a batch of eight, so fewer arrivals are no overload
    for handle in (10, 11):
        calm.submit(request(handle, at_ps=1), 1)
    assert try_once(calm, 1) == [10, 11]


@pytest.mark.parametrize(("strict", "dropped"), [(False, False), (True, True)])
def test_early_drop_never_drops_who_was_in_a_batch_before(strict: bool, dropped: bool) -> None:
    queue = EarlyDrop(SLO_PS, strict=strict)
    replica = replica_of(queue)
    replica.submit(request(0), 0)
    assert try_once(replica) == [0]
    (lost,), _ = replica.lose(0)
    replica.submit(lost, 50_000)
    assert [event for event in replica.plan(50_000).events if isinstance(event, Dropped)] == [Dropped(lost)] * dropped


def test_early_drop_counts_arrivals_once_per_batch_but_once_per_try_in_strict_mode() -> None:
    for strict, changes in ((False, False), (True, True)):
        queue = EarlyDrop(strict=strict)
        replica = replica_of(queue, pool=20, strict=strict)
        for handle in range(9):
            replica.submit(request(handle, prompt=50), 0)
        replica.plan(0)
        before = vars(queue.overload).copy()
        replica.plan(1)
        assert (vars(queue.overload) != before) is changes


def test_strict_early_drop_does_not_tell_twice_of_a_cancelled_request() -> None:
    replica = replica_of(EarlyDrop(SLO_PS, strict=True), pool=20, strict=True)
    replica.submit(request(0, prompt=50), 0)
    replica.cancel(0, 1)
    assert [type(event).__name__ for event in replica.plan(1).events] == ["Cancelled"]
    assert not replica.plan(20_000).events
    assert not replica.num_waiting
