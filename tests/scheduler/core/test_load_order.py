"""The least loaded of many workers is the one that a look at all of them finds."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.load_order import LoadOrder
from lorrery.scheduler.core.many_workers import FEW
from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.build import build_workers
from lorrery.simulator.engine import Simulation
from lorrery.simulator.request import SimulatedRequest
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.worker.device.constant import ConstantSteps, StepConstants
from lorrery.worker.device.output import Ending


@dataclass
class Worker:
    """A worker whose tokens may have become more since it was noted."""

    load: int = 0
    noted_tokens: int = 0
    further_tokens: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.noted_tokens + self.further_tokens


NUM_WORKERS = 5
CHANGES = st.tuples(
    st.integers(0, NUM_WORKERS - 1), st.booleans(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)
)


@given(st.lists(CHANGES, max_size=60), st.integers(1, 2**NUM_WORKERS - 1))
def test_it_is_the_least_whatever_has_been_noted(changes: list[tuple[int, bool, int, int, int]], some: int) -> None:
    workers = [Worker() for _ in range(NUM_WORKERS)]
    order = LoadOrder(workers)
    for number, is_noted, load, tokens, further_tokens in changes:
        worker = workers[number]
        if is_noted:
            worker.load, worker.noted_tokens, worker.further_tokens = load, tokens if load else 0, 0
            order.note(number, worker.load, worker.noted_tokens)
        elif worker.load:
            worker.further_tokens += further_tokens
        figures = [(one.load, one.kv_tokens, index) for index, one in enumerate(workers)]
        of_some = min(one for one in figures if some >> one[2] & 1)
        assert order.total == sum(one[0] for one in figures)
        assert order.least_load == min(figures)[0]
        assert order.with_at_most(load) == sum(1 << one[2] for one in figures if one[0] <= load)
        assert order.least_among(some, load) == (of_some[2] if of_some[0] <= load else None)
        assert order.least() == min(figures)[2]


class LooksAtAll:
    """Least loaded, by both ways."""

    moves_waiting = True

    def __init__(self) -> None:
        self.num_tied = 0

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        chosen = least_loaded(candidates)
        figures = [(one.load, one.kv_tokens, number) for number, one in enumerate(candidates)]
        assert chosen is candidates[min(figures)[2]]
        self.num_tied += sum(load == min(figures)[0] > 0 for load, _, _ in figures) > 1
        return Choice(chosen, "")


def test_a_simulation_places_as_if_it_looked_at_all() -> None:
    for seed, cancels, losses in ((1, False, False), (2, True, False), (3, True, True)):
        rng = np.random.default_rng(seed)
        settings = ReplicaSettings("fcfs", 4_000, 400, running_max_req_size=3)
        workers = build_workers(FEW + 8, settings, ConstantSteps(StepConstants(7.0, 1.0, 0.1)))
        placement = LooksAtAll()
        simulation = Simulation(workers, placement)
        if losses:
            for number, worker in enumerate(workers[:5]):
                simulation.at(number * 10**12, partial(simulation.membership.lose, worker))
        at_ps = np.cumsum(rng.exponential(2 * 10**10, 700)).astype(np.int64).tolist()
        lengths = rng.integers(1, 150, (2, 700)).tolist()
        arrivals = [
            (at, SimulatedRequest(handle, prompt, output, at, Ending(output, FinishReason.LENGTH)))
            for handle, (at, prompt, output) in enumerate(zip(at_ps, *lengths, strict=True))
        ]
        times = [(at + int(rng.integers(10**12)), handle) for handle, at in enumerate(at_ps) if handle % 7 == 0]
        ended = list(simulation.run(arrivals, sorted(times) if cancels else ()))
        assert len(ended) == 700
        assert placement.num_tied > 100
