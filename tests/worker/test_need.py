"""Which scheduler a worker attaches to, and when it moves."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lorrery.worker.need import Demand, better, drawn

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
