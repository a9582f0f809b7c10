"""When requests leave the front end, and what becomes of those that are cancelled, or whose worker goes, meanwhile."""

import pytest

from lorrery.scheduler.core.front_end import FrontEndCost
from lorrery.scheduler.core.inbox import Inbox, Recall
from lorrery.scheduler.core.sequence import Sequence

COST = FrontEndCost(request_ps=100, token_ps=10)


def sequence(handle: int, prompt_tokens: int = 1) -> Sequence:
    return Sequence(handle, prompt_tokens, 1, arrived_ps=0)


def taken(inbox: Inbox) -> list[tuple[int, object]]:
    """Return what takes effect when, in order: sequences by their handles."""
    found: list[tuple[int, object]] = []
    while (at_ps := inbox.next_ps) is not None:
        what = inbox.take()
        found.append((at_ps, ("arrives", what.handle) if isinstance(what, Sequence) else what))
    return found


def test_a_request_alone_is_ready_after_its_own_work() -> None:
    inbox = Inbox(COST)
    inbox.put(5, sequence(1, prompt_tokens=3))
    inbox.put(500, sequence(2))
    assert inbox.num_arrivals == 2
    assert taken(inbox) == [(135, ("arrives", 1)), (610, ("arrives", 2))]
    assert inbox.num_arrivals == 0


def test_those_that_come_while_it_works_are_ready_together() -> None:
    inbox = Inbox(COST)
    for handle, at_ps in enumerate((0, 0, 50, 109, 110, 600)):
        inbox.put(at_ps, sequence(handle))
    # 0 until 110; 1, 2 and 3 until 440; 4, which came as their work began, until 550
    assert taken(inbox) == [
        (110, ("arrives", 0)),
        *((440, ("arrives", handle)) for handle in (1, 2, 3)),
        (550, ("arrives", 4)),
        (710, ("arrives", 5)),
    ]


def test_servers_take_turns() -> None:
    inbox = Inbox(COST._replace(servers=2))
    for handle in range(4):
        inbox.put(0, sequence(handle))
    assert taken(inbox) == [(at_ps, ("arrives", handle)) for at_ps, handle in ((110, 0), (110, 1), (220, 2), (220, 3))]


@pytest.mark.parametrize("later", [2, Recall(2, "other")])
def test_what_concerns_a_request_in_the_front_end_takes_effect_right_after_its_arrival(later: int | Recall) -> None:
    inbox = Inbox(COST)
    inbox.put(0, sequence(1))
    inbox.put(0, sequence(2))
    inbox.put(30, later)
    inbox.put(40, 1_000)  # of a sequence that has left the front end
    assert taken(inbox) == [(40, 1_000), (110, ("arrives", 1)), (220, ("arrives", 2)), (220, later)]


def test_a_lost_workers_front_end_gives_back_what_it_has() -> None:
    inbox = Inbox(COST)
    for handle in (1, 2, 3):
        inbox.put(0, sequence(handle))
    inbox.put(20, 3)
    left, gone = inbox.give_back({})
    assert ([one.handle for one in left], [event.sequence.handle for event in gone]) == ([1, 2], [3])
    assert (inbox.num_arrivals, inbox.next_ps) == (0, None)
