"""Who waits first, as a list that stays the same while they do."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.queues.base import goes_by_arrival
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.waiting import WaitingByAdapter, WaitingList
from lorrery.scheduler.core.sequence import Sequence

CHANGES = st.tuples(
    st.sampled_from(["come", "come", "come", "pop", "remove", "remove all", "clear", "mark", "look"]),
    st.integers(0, 9),
)


@pytest.mark.parametrize("kind", [WaitingList, WaitingByAdapter])
@given(changes=st.lists(CHANGES, max_size=40), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_the_front_is_what_comes_first_and_the_same_list_while_nothing_changes(
    kind: type[WaitingList], changes: list[tuple[str, int]], lengths: list[int]
) -> None:
    waiting = kind()
    for handle, (what, number) in enumerate(changes):
        there = list(waiting)
        length = lengths[number % len(lengths)]
        one = there[number % len(there)] if there else None
        front = waiting.front(length)
        if what == "come":
            waiting.append(Sequence(handle, 5, 5, number))
        elif what == "look" or one is None:
            assert waiting.front(length) is front
        elif what == "pop":
            assert waiting.pop(one.handle) is one
        elif what == "remove":
            waiting.remove(one.handle)
        elif what == "remove all":
            waiting.remove_all(there[: number + 1])
        elif what == "clear":
            waiting.clear()
        else:
            waiting.mark(one.handle)
        assert waiting.front(length) == list(waiting)[:length]


def test_one_that_comes_behind_the_front_leaves_it_the_same_list() -> None:
    waiting = WaitingList()
    for handle in range(4):
        waiting.append(Sequence(handle, 5, 5, handle))
    front = waiting.front(3)
    waiting.append(Sequence(4, 5, 5, 4))
    assert waiting.front(3) is front


class Backwards(Fifo):
    """Has an order of its own."""

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(list(super().__iter__()))


def test_a_queue_with_an_order_of_its_own_is_not_taken_for_one_that_goes_by_arrival() -> None:
    assert goes_by_arrival(Fifo())
    assert not goes_by_arrival(Backwards())
