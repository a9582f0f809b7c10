"""The columns of many workers never change a choice: worker and reason are those that a look at each gives."""

from collections import Counter
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import numpy as np
import pytest

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.base import Candidate, Choice, table_of
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.placements.worker_table import FEW
from lorrery.scheduler.core.prefix_cache.base import of_runs
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.constant import ConstantSteps, StepConstants
from lorrery.worker.device.output import Ending
from lorrery.worker.device.steptime import pace_of

NUM_WORKERS, NUM_REQUESTS, RUN = FEW + 7, 350, 24
ADAPTERS = [None, None, *(Adapter(f"a{number}", 8) for number in range(6))]
SETTINGS: dict[str, dict[str, Any]] = {
    "waiting": {"memory": "peak", "running_max_req_size": 3},
    "adapters": {"memory": "peak", "max_loras": 1},
    "caches": {"memory": "paged", "batching": "chunked", "prefix_cache": "blocks", "block_size": 4},
    "small caches": {"memory": "paged", "batching": "chunked", "prefix_cache": "blocks", "block_size": 8},
    "shared within plans": {
        "memory": "paged",
        "batching": "chunked",
        "prefix_cache": "blocks",
        "block_size": 4,
        "share_within_plan": True,
    },
}


class BothWays:
    """Asks a placement of one name twice, and the second time about a list that has no table."""

    def __init__(self, name: str) -> None:
        self.fast, self.plain = (PLACEMENTS[name](np.random.default_rng(1)) for _ in range(2))
        self.moves_waiting = True
        self.predicts = getattr(self.fast, "predicts", False)
        self.reasons: Counter[str] = Counter()
        self.num_by_table = 0

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        self.num_by_table += table_of(candidates) is not None
        choice = self.fast.place(sequence, candidates)
        plain = self.plain.place(sequence, list(candidates))
        assert (choice.candidate, choice.why) == (plain.candidate, plain.why)
        self.reasons[choice.why.split(";")[0].rstrip("0123456789")] += 1
        return choice


class OneWay:
    """A placement that is asked about the workers as they are, or about a list that has no table."""

    def __init__(self, name: str, *, kept: bool) -> None:
        self.rule, self.kept = PLACEMENTS[name](np.random.default_rng(1)), kept
        self.moves_waiting = True
        self.predicts = getattr(self.rule, "predicts", False)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        return self.rule.place(sequence, candidates if self.kept else list(candidates))


def make_replica(kind: str) -> Replica:
    pool = 300 if kind == "small caches" else 2_000
    more = {"max_num_batched_tokens": 32} if "batching" in SETTINGS[kind] else {}
    settings = ReplicaSettings("fcfs", pool, 300, **SETTINGS[kind], **more)
    return build_replica(settings, load_ps=lambda adapter, tier: 10**10 * (1 + 3 * (tier.value == "disk")))


def simulate(placement: Any, kind: str, seed: int) -> list[tuple[int, str, int | None, str | None]]:
    """Run a load in which workers are lost and come back, and requests are cancelled; return each request's end."""
    rng = np.random.default_rng(seed)
    paces = [ConstantSteps(StepConstants(7.0, 1.0, 0.1)), ConstantSteps(StepConstants(9.0, 0.5, 0.2))]
    workers = [
        SimulatedWorker(f"worker-{n}", partial(make_replica, kind), paces[n % 2], pace=pace_of(paces[n % 2]))
        for n in range(NUM_WORKERS)
    ]
    simulation = Simulation(workers, placement)
    for number, worker in enumerate(workers[: 4 * (seed % 2)]):
        simulation.at(number * 10**12, partial(simulation.membership.lose, worker))
        simulation.at(number * 10**12 + 3 * 10**12 // 2, partial(simulation.membership.attach, worker))
    later = [paces[0], ConstantSteps(StepConstants(2.0, 0.2, 0.01))]  # than they announced
    for number, worker in enumerate(workers[9:]):
        simulation.at(10**11 * (5 + number), partial(simulation.change_pace, worker, later[number // 2 % 2]))
    at_ps = np.cumsum(rng.exponential(10**10 if seed % 3 else 10**9, NUM_REQUESTS)).astype(np.int64).tolist()
    arrivals = []
    for handle, at in enumerate(at_ps):
        runs = [int(rng.integers(3)), *rng.integers(0, 2, int(rng.integers(8))).tolist()]
        prompt_tokens = len(runs) * RUN - int(rng.integers(RUN))
        output = int(rng.integers(1, 60))
        adapter = ADAPTERS[int(rng.integers(len(ADAPTERS)))]
        request = SimulatedRequest(
            handle, prompt_tokens, output, at, Ending(output, FinishReason.LENGTH), adapter, "", ()
        )
        request.sequence.content = of_runs([sum(runs[: n + 1]) * 8 + n for n in range(len(runs))], RUN, prompt_tokens)
        arrivals.append((at, request))
    cancels = sorted((at + int(rng.integers(10**12)), handle) for handle, at in enumerate(at_ps) if handle % 9 == 0)
    ended = list(simulation.run(arrivals, cancels))
    assert len(ended) == NUM_REQUESTS
    return sorted((one.handle, one.worker, one.finished_ps, one.outcome) for one in ended)


CASES = [
    ("least_loaded", "waiting"),
    ("least_loaded", "adapters"),
    ("prefix_match", "caches"),
    ("prefix_match", "small caches"),
    ("prefix_match", "shared within plans"),
    ("prefix_match", "waiting"),
    ("predicted_finish", "waiting"),
    ("predicted_finish", "adapters"),
    ("predicted_finish", "caches"),
    ("predicted_finish", "small caches"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_choice_is_that_of_a_look_at_each_worker(name: str, kind: str) -> None:
    for seed in (1, 2):
        placement = BothWays(name)
        simulate(placement, kind, seed)
        assert placement.num_by_table > NUM_REQUESTS / 2
        if name == "least_loaded" and kind == "adapters":
            assert sum(count for why, count in placement.reasons.items() if why.startswith("has adapter")) > 50
        if name == "prefix_match" and kind != "waiting":
            assert sum(count for why, count in placement.reasons.items() if "tokens cached" in why) > 50


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_run_is_the_same_though_workers_are_not_brought_up_to_date(name: str, kind: str) -> None:
    assert simulate(OneWay(name, kept=True), kind, 5) == simulate(OneWay(name, kept=False), kind, 5)


def long_prompts(name: str, seed: int, *, kept: bool, one_step: bool = False) -> list[tuple[int, str, int | None]]:
    """Run prompts of many chunks while a worker that has nothing goes and comes back; return each request's end."""
    rng, pace = np.random.default_rng(seed), ConstantSteps(StepConstants(7.0, 1.0, 0.1))
    replica = partial(
        build_replica,
        ReplicaSettings(
            "fcfs",
            5_000,
            3_000,
            memory="paged",
            batching="chunked",
            prefix_cache="blocks",
            max_num_batched_tokens=32,
        ),
    )
    workers = [SimulatedWorker(f"w{n:02}", replica, pace, pace=pace_of(pace)) for n in range(FEW + 4)]
    simulation = Simulation(workers, OneWay(name, kept=kept), one_step=one_step)
    simulation.at(1, partial(simulation.membership.lose, workers[-1]))
    simulation.at(200 * 10**9, partial(simulation.membership.attach, workers[-1]))
    arrivals = []
    for handle, at_ps in enumerate(np.cumsum(rng.exponential(2e10, 60)).astype(np.int64).tolist()):
        request = SimulatedRequest(handle, 1_000, 20, at_ps, Ending(20, FinishReason.LENGTH))
        shared = int(rng.integers(3)) * 1_000
        own = [*range(shared, shared + 30), *range(5_000 + handle * 97, 5_012 + handle * 97)]
        request.sequence.content = of_runs(own, RUN, 1_000)
        arrivals.append((at_ps, request))
    return sorted((one.handle, one.worker, one.finished_ps) for one in simulation.run(arrivals))


@pytest.mark.parametrize("name", ["prefix_match", "predicted_finish"])
def test_a_worker_that_comes_back_while_others_compute_long_prompts_changes_no_other_choice(name: str) -> None:
    for seed in range(3):
        kept = long_prompts(name, seed, kept=True)
        assert kept == long_prompts(name, seed, kept=False)
    assert kept == long_prompts(name, seed, kept=True, one_step=True)
