"""Whose boundary is next, against a look at all."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.build import ReplicaSettings, build_replica
from lorrery.simulator.loop.membership import Boundaries
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER
from tests.simulator.test_engine import STEP_TIMES

TIMES = st.one_of(st.integers(0, 4), st.just(NEVER), st.just(NEVER + 7))


def worker(order: int) -> SimulatedWorker:
    make_replica = partial(build_replica, ReplicaSettings("fcfs", 100, 100, max_num_batched_tokens=100))
    one = SimulatedWorker(f"worker-{order}", make_replica, STEP_TIMES["llm-mock"])
    one.order = order
    return one


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 11), TIMES)))
def test_the_next_boundary_is_the_earliest_and_of_equal_ones_that_of_the_first_worker(
    num_workers: int, moves: list[tuple[int, int]]
) -> None:
    workers = [worker(order) for order in range(num_workers)]
    boundaries = Boundaries(workers)
    assert boundaries.next_ps == NEVER
    for order, at_ps in moves:
        if order >= len(workers):
            workers.append(worker(len(workers)))
            boundaries.enter(workers)
        else:
            boundaries.move(workers[order], at_ps)
        first = min(workers, key=lambda one: (one.end_ps, one.order))
        assert (boundaries.next_ps, boundaries.first) == (first.end_ps, first)
