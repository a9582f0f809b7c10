"""What waits moves between simulated workers, at the same time whether steps are jumped over or run one by one."""

import random
from functools import partial

import numpy as np
import pytest

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.by_load import RoundRobin
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.worker.device.constant import LlmMock

S = 10**12
ADAPTERS = {f"a{n}": Adapter(f"a{n}", 8) for n in range(4)}
BATCHINGS = ("continuous", "chunked", "prefill_first", "mixed", "static", "slora_loop")


def run(batching: str, placement: str, seed: int, *, one_step: bool) -> tuple[list[tuple[object, ...]], int]:
    """Run a burst on three workers, of which one joins late and another is lost for a while."""
    rng = random.Random(seed)
    replica = ReplicaSettings(
        policy="fcfs",
        batching=batching,
        max_total_token_num=900,
        max_req_total_len=420,
        max_num_seqs=3,
        max_num_batched_tokens=64 if batching in ("chunked", "prefill_first") else 500,
        max_loras=2,
    )
    load_ps = rng.choice([0, 10**10])
    workers = build_workers(
        3, replica, LlmMock(), lambda chosen: build_replica(chosen, load_ps=lambda adapter, tier: load_ps)
    )
    at, workload = 0.0, []
    for index in range(60):
        at += rng.choice([0.0, 0.0, 0.02, 0.3])
        adapter = rng.choice([None, *ADAPTERS])
        workload.append(WorkloadRequest(index, at, rng.randint(1, 200), rng.randint(1, 90), adapter))
    simulation = Simulation(workers, PLACEMENTS[placement](np.random.default_rng(1)), one_step=one_step)
    simulation.membership.lose(workers[2])
    simulation.at(1 * S, partial(simulation.membership.attach, workers[2]))
    simulation.at(2 * S, partial(simulation.membership.lose, workers[0]))
    simulation.at(5 * S, partial(simulation.membership.attach, workers[0]))
    cancels = sorted((rng.randint(0, 6 * S), rng.randrange(60)) for _ in range(6))
    ended = [
        (r.handle, r.outcome, r.worker, r.admitted_ps, r.first_token_ps, r.finished_ps, r.output_tokens)
        for r in simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS), cancels)
    ]
    return ended, simulation.num_moved


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("placement", ["least_loaded", "power_of_two", "adapter_hash", "prefix_match"])
def test_moves_are_the_same_whether_steps_are_jumped_over_or_run_one_by_one(batching: str, placement: str) -> None:
    num_moved = 0
    for seed in range(4):
        stepped, moved = run(batching, placement, seed, one_step=True)
        assert run(batching, placement, seed, one_step=False) == (stepped, moved)
        assert sorted(handle for handle, *_ in stepped) == list(range(60))
        assert {outcome for _, outcome, *_ in stepped} <= {"finished", "cancelled"}
        num_moved += moved
    assert num_moved > 4


def test_nothing_moves_in_turns() -> None:
    assert run("continuous", "round_robin", 0, one_step=False)[1] == 0


class MovingRoundRobin(RoundRobin):
    """Each in turn; what waits may move."""

    moves_waiting = True


@pytest.mark.parametrize("one_step", [True, False])
def test_a_request_whose_new_worker_is_lost_first_is_back_in_its_queue_a_step_later(one_step: bool) -> None:
    replica = ReplicaSettings("fcfs", 900, 420, max_num_seqs=4, max_num_batched_tokens=500, max_loras=1)
    workers = build_workers(
        2, replica, LlmMock(), lambda chosen: build_replica(chosen, load_ps=lambda adapter, tier: 10**9)
    )
    workload = [WorkloadRequest(n, n // 2 * 0.5, 20, 60, adapter) for n, adapter in enumerate(("a0", "a1", "a1"))]
    simulation = Simulation(workers, MovingRoundRobin(), one_step=one_step)
    simulation.at(57 * S // 100, partial(simulation.membership.lose, workers[1]))  # the last is about to move there
    ended = {r.handle: r for r in simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS))}
    assert simulation.num_moved == 0
    # A step takes 60 ms. It waits for its adapter when its queue is read, and is in the queue until then.
    assert ended[2].finished_ps is not None
    phases = ended[2].sequence.phases(ended[2].finished_ps)
    assert phases.queue_ps < 2 * S * 6 // 100
    assert phases.adapter_load_ps > 3 * S


def test_a_worker_that_joins_under_load_runs_what_waited_and_all_is_over_sooner() -> None:
    workload = [WorkloadRequest(index, 0.0, 100, 100) for index in range(40)]

    def simulate(placement: str) -> tuple[int, int]:
        replica = ReplicaSettings("fcfs", 2_000, 420, max_num_seqs=4, max_num_batched_tokens=500)
        workers = build_workers(2, replica, LlmMock())
        simulation = Simulation(workers, PLACEMENTS[placement](np.random.default_rng(1)))
        simulation.membership.lose(workers[1])
        simulation.at(S, partial(simulation.membership.attach, workers[1]))
        ended = list(simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS)))
        return sum(request.worker == "worker-1" for request in ended), max(
            request.finished_ps or 0 for request in ended
        )

    none, late_ps = simulate("round_robin")
    some, early_ps = simulate("least_loaded")
    assert none == 0
    assert 14 <= some <= 20
    assert early_ps < 0.65 * late_ps
