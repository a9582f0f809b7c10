"""Who has the fewest waiting is known without a look at all."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.standings import Standing, Standings

notes = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.booleans())


@given(st.integers(0, 6), st.lists(notes | st.integers(0, 5), max_size=120), st.sets(st.integers(0, 5)))
def test_the_first_is_the_least_of_those_that_suit_whatever_came_before(
    count: int, changes: list[tuple[int, int, int, bool] | int], unsuitable: set[int]
) -> None:
    standings = Standings()
    here: dict[int, Standing] = {}
    blocked: set[int] = set()
    for _ in range(count):
        number = standings.enter()
        here[number] = (0, 0, number)
    for change in changes:
        if isinstance(change, int):
            standings.leave(change)
            here.pop(change, None)
            blocked.discard(change)
        else:
            number, num_waiting, num_running, is_blocked = change
            standings.note(number, num_waiting, num_running, is_blocked=is_blocked)
            if number in here:
                here[number] = (num_waiting, num_running, number)
                (blocked.add if is_blocked else blocked.discard)(number)
        for without in (unsuitable, set[int]()):
            expected = min((one for one in here.values() if one[2] not in without), default=None)
            assert standings.first(lambda number, without=without: number not in without) == expected
    assert standings.blocked == blocked


def test_workers_that_come_and_go_leave_nothing_though_nothing_is_asked() -> None:
    standings = Standings()
    for _ in range(100):
        number = standings.enter()
        standings.note(number, 1, 1, is_blocked=True)
        standings.leave(number)
    assert (standings.current, standings.blocked, standings._changed) == ({}, set(), set())
