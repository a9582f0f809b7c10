"""Which scheduler a worker attaches to, and when it moves."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lorrery.worker.schedulers import Demand, better, drawn

states = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(0, 8), st.integers(0, 2000)), min_size=1, max_size=6
)


def demands_of(state: dict[str, tuple[int, int]]) -> dict[str, Demand]:
    return {
        name: Demand(workers, requests, f"{name}-{workers}" if workers else "")
        for name, (workers, requests) in state.items()
    }


@given(state=states, at=st.floats(0, 1, exclude_max=True))
def test_a_worker_attaches_where_there_is_none_if_anywhere(state: dict[str, tuple[int, int]], at: float) -> None:
    demands = demands_of(state)
    chosen = drawn(demands, at)
    assert not demands[chosen].num_workers or all(demand.num_workers for demand in demands.values())


def test_workers_that_lose_a_scheduler_together_spread_by_pressure() -> None:
    demands = {"a": Demand(10, 100), "b": Demand(10, 101), "c": Demand(10, 800)}
    chosen = Counter(drawn(demands, (at + 0.5) / 1049) for at in range(1049))
    assert chosen == {"a": 116, "b": 117, "c": 816}


@given(state=states)
def test_moves_come_to_an_end_and_leave_nobody_without_a_worker(state: dict[str, tuple[int, int]]) -> None:
    state = dict(state)
    had_workers = {name for name, (workers, _) in state.items() if workers}
    met: set[tuple[int, ...]] = set()
    while True:
        met.add(tuple(workers for workers, _ in state.values()))
        demands = demands_of(state)
        moves = [(name, to) for name in state if (to := better(name, demands[name].first_to_leave, demands))]
        if not moves:
            break
        name, to = moves[0]
        for which, number in ((name, -1), (to, 1)):
            state[which] = (state[which][0] + number, state[which][1])
        assert state[name][0] > 0
        assert better(to, demands_of(state)[to].first_to_leave, demands_of(state)) != name, "it would go back"
        assert tuple(workers for workers, _ in state.values()) not in met, "the moves go round"
    assert had_workers <= {name for name, (workers, _) in state.items() if workers}
    if sum(workers for workers, _ in state.values()) >= len(state) > 0 and had_workers:
        assert all(workers for workers, _ in state.values())


@given(num_workers=st.integers(1, 40), num_schedulers=st.integers(1, 6))
def test_schedulers_without_requests_share_workers_evenly(num_workers: int, num_schedulers: int) -> None:
    numbers = [num_workers] + [0] * (num_schedulers - 1)
    while True:
        demands = {str(index): Demand(number, 0, str(index)) for index, number in enumerate(numbers)}
        moves = [(index, to) for index in range(num_schedulers) if (to := better(str(index), str(index), demands))]
        if not moves:
            break
        numbers[moves[0][0]] -= 1
        numbers[int(moves[0][1])] += 1
    fewest, most = min(numbers), max(numbers)
    assert most - fewest <= max(1, math.ceil(0.25 * fewest) + 1)


def test_only_the_worker_that_is_missed_least_moves() -> None:
    demands = {"a": Demand(4, 0, "worker-3"), "b": Demand(0, 10)}
    assert better("a", "worker-3", demands) == "b"
    assert better("a", "worker-1", demands) is None
    assert better("gone", "worker-3", demands) is None


def moves_of_all(demands: dict[str, Demand]) -> list[tuple[str, str]]:
    """Return the moves, from and to, if all workers look at the same time."""
    found = [(name, better(name, demand.first_to_leave, demands)) for name, demand in demands.items()]
    return [(name, to) for name, to in found if to is not None]


def test_an_empty_scheduler_gets_from_many_at_once_no_more_workers_than_it_needs() -> None:
    state = dict.fromkeys("abcdefgh", (4, 0)) | {"new": (0, 0)}
    moved = moves_of_all(demands_of(state))
    assert [to for _, to in moved] == 3 * ["new"]
    assert len({name for name, _ in moved}) == 3
    after = state | {name: (3, 0) for name, _ in moved} | {"new": (3, 0)}
    assert not moves_of_all(demands_of(after))


def test_workers_agree_on_the_moves_in_whatever_order_they_know_the_schedulers() -> None:
    demands = demands_of(dict.fromkeys("abcd", (4, 0)) | {"x": (0, 0), "y": (0, 0)})
    assert sorted(moves_of_all(demands)) == sorted(moves_of_all(dict(reversed(demands.items()))))


@given(state=states, delays=st.lists(st.integers(0, 5), min_size=64, max_size=64))
def test_moves_that_take_time_send_no_more_workers_than_are_needed(
    state: dict[str, tuple[int, int]], delays: list[int]
) -> None:
    """All look together, again and again; a move takes some rounds, in which neither scheduler counts the worker."""
    workers = {name: number for name, (number, _) in state.items()}
    requests = {name: number for name, (_, number) in state.items()}
    under_way: list[tuple[int, str, str]] = []  # how many rounds yet, from, to
    got: set[str] = set()
    num_moves = 0
    while True:
        arrived = [to for rounds, _, to in under_way if not rounds]
        under_way = [(rounds - 1, name, to) for rounds, name, to in under_way if rounds]
        for to in arrived:
            workers[to] += 1
        draining = {name for _, name, _ in under_way}
        demands = {
            name: Demand(number, requests[name], f"{name}-{number}" if number and name not in draining else "")
            for name, number in workers.items()
        }
        moved = moves_of_all(demands)
        if not moved and not under_way:
            break
        for name, to in moved:
            workers[name] -= 1
            under_way.append((delays[num_moves % len(delays)], name, to))
            num_moves += 1
            got.add(to)
        assert not got & {name for name, _ in moved}, "it would part with one that it has got"
    assert all(workers[name] for name, (number, _) in state.items() if number)
