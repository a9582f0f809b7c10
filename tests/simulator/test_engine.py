"""Jumping over steps equals running each, with the real mock GPU, placements and several workers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import BATCHINGS
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.outcomes import STATUS
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.profile import read_profile
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.steptime import StepTimeModel
from lorrery.worker.device.table import ProfileTable
from tests.worker.device.known import deployment

ADAPTERS = {f"a{n}": Adapter(f"a{n}", 4 * (n + 1)) for n in range(4)}
STEP_TIMES: dict[str, StepTimeModel] = {
    "roofline": Roofline(deployment("A10G", "Llama-2-7B", engine="present-day")),
    "llm-mock": LlmMock(),
}

workloads = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.3, 2.0]),
        st.integers(1, 300),
        st.integers(1, 120),
        st.sampled_from([None, *ADAPTERS]),
    ),
    min_size=1,
    max_size=12,
)


def run(
    drawn: list[tuple[float, int, int, str | None]],
    cancels: list[tuple[int, int]],
    batching: str,
    placement: str,
    step_time: str,
    *,
    one_step: bool,
) -> list[tuple[object, ...]]:
    replica = ReplicaSettings(
        policy="fcfs",
        batching=batching,
        max_total_token_num=1_500,
        max_req_total_len=420,
        max_num_seqs=6,
        max_num_batched_tokens=64 if batching in ("chunked", "prefill_first") else 500,
        max_loras=2,
    )
    workers = build_workers(
        2,
        replica,
        STEP_TIMES[step_time],
        lambda chosen: build_replica(chosen, load_ps=lambda a, tier: 10**9 * a.rank * (1 if tier is Tier.HOST else 9)),
    )
    at, workload = 0.0, []
    for index, (gap, prompt, output, adapter) in enumerate(drawn):
        at += gap
        workload.append(WorkloadRequest(index, at, prompt, output, adapter))
    requests = build_requests(workload, "Llama-2-7B", ADAPTERS)
    simulation = Simulation(workers, PLACEMENTS[placement](np.random.default_rng(1)), one_step=one_step)
    return [
        (r.handle, r.outcome, r.worker, r.admitted_ps, r.sequence.phases(r.finished_ps or 0), r.output_tokens)
        for r in simulation.run(requests, cancels)
    ]


@pytest.mark.parametrize("step_time", STEP_TIMES)
@pytest.mark.parametrize("batching", sorted(BATCHINGS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(  # what could not start on worker-1 moves away; then that one waits out its 10 steps with nobody to try
    drawn=[
        (0.0, 1, 1, None),
        (0.0, 12, 35, "a3"),
        (0.3, 1, 1, "a1"),
        (0.0, 1, 1, "a0"),
        (2.0, 1, 1, None),
        (0.0, 1, 1, None),
        (0.0, 1, 1, None),
    ],
    cancels=[],
    placement="predicted_finish",
)
@given(
    drawn=workloads,
    cancels=st.lists(st.tuples(st.integers(0, 6 * 10**12), st.integers(0, 11)), max_size=3),
    placement=st.sampled_from(sorted(PLACEMENTS)),
)
def test_jumping_equals_stepping(
    step_time: str,
    batching: str,
    drawn: list[tuple[float, int, int, str | None]],
    cancels: list[tuple[int, int]],
    placement: str,
) -> None:
    cancels = sorted(cancels)
    stepped = run(drawn, cancels, batching, placement, step_time, one_step=True)
    assert run(drawn, cancels, batching, placement, step_time, one_step=False) == stepped
    assert sorted(handle for handle, *_ in stepped) == list(range(len(drawn)))
    for handle, outcome, *_, output_tokens in stepped:
        assert outcome != "finished" or output_tokens == drawn[handle][2]


def steps_and_plans(
    replica: ReplicaSettings,
    workload: list[WorkloadRequest],
    step_time: StepTimeModel,
    make_replica: Callable[[ReplicaSettings], Replica] = build_replica,
) -> tuple[int, int]:
    """Return the steps and plans of one worker that jumps; stepping gives the same times in as many steps."""

    def simulate(*, one_step: bool) -> tuple[list[tuple[int, int | None, int | None]], int, int]:
        (worker,) = build_workers(1, replica, step_time, make_replica)
        simulation = Simulation([worker], PLACEMENTS["least_loaded"](np.random.default_rng(1)), one_step=one_step)
        ended = simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS))
        times = [(request.handle, request.first_token_ps, request.finished_ps) for request in ended]
        return times, worker.totals.num_steps, worker.totals.num_plans

    (stepped, num_steps, _), (jumped, num_jumped, num_plans) = simulate(one_step=True), simulate(one_step=False)
    assert jumped == stepped
    assert num_jumped == num_steps
    return num_steps, num_plans


@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
def test_a_long_prompt_is_planned_as_often_as_others_come(batching: str) -> None:
    replica = ReplicaSettings("fcfs", 200_000, 150_000, batching, max_num_seqs=8, max_num_batched_tokens=512)
    lengths = [(0.0, 100_000, 3), (0.5, 900, 40), (3.0, 400, 3)]
    workload = [WorkloadRequest(n, at, prompt, output) for n, (at, prompt, output) in enumerate(lengths)]

    num_steps, num_plans = steps_and_plans(replica, workload, STEP_TIMES["roofline"])
    assert num_steps > 200
    assert num_plans < 20


@pytest.mark.parametrize("step_time", STEP_TIMES)
def test_a_static_batch_is_planned_as_often_as_its_sequences_end(step_time: str) -> None:
    replica = ReplicaSettings("fcfs", 20_000, 2_000, "static", max_num_seqs=4, max_num_batched_tokens=2_000)
    # The longest prompt ends first; another sequence grows past it, and one ends before it does.
    lengths = [(700, 5), (50, 900), (300, 100), (20, 650)] * 2
    workload = [WorkloadRequest(n, 0.0, prompt, output, f"a{n % 3}") for n, (prompt, output) in enumerate(lengths)]

    num_steps, num_plans = steps_and_plans(replica, workload, STEP_TIMES[step_time])
    assert num_steps > 1_500
    assert num_plans < 30


def test_steps_without_a_closed_form_are_not_planned_one_by_one() -> None:
    rows = ["phase,batch_size,kv_len,step_ms,prefill_chunk", "decode,1,0,10,", "decode,1,900,11,", "decode,8,900,17,"]
    profile = read_profile([*rows, "prefill,,,20,100", "prefill,,,90,900"])
    table = ProfileTable(deployment("A10G", "Llama-2-7B", profile=profile))
    replica = ReplicaSettings("fcfs", 20_000, 2_000, "chunked", max_num_seqs=4, max_num_batched_tokens=512)
    workload = [WorkloadRequest(n, n * 0.7, 40 + 90 * n, 30 + 110 * (n % 3)) for n in range(10)]

    num_steps, num_plans = steps_and_plans(replica, workload, table)
    assert num_steps > 500
    assert num_plans < 150


@pytest.mark.parametrize("policy", ["req_queue", "fcfs", "vtc_fair", "vtc_fair by tenant"])
def test_requests_that_wait_for_a_place_for_their_adapter_cost_no_decision_at_each_step(policy: str) -> None:
    replica = ReplicaSettings(
        policy.split()[0], 200_000, 1_000, "chunked", "paged", max_num_seqs=64, max_num_batched_tokens=512, max_loras=1
    )
    if policy.endswith("tenant"):
        replica = replace(replica, fair_by="tenant")
    names = [*ADAPTERS]
    workload = [
        WorkloadRequest(n, n / 100, 50, 200, names[n // 5 % len(names)], tenant_id=f"t{n % 3}") for n in range(100)
    ]

    num_steps, num_plans = steps_and_plans(
        replica,
        workload,
        STEP_TIMES["roofline"],
        lambda own: build_replica(own, load_ps=lambda adapter, tier: adapter.rank * 10**9),
    )
    assert num_steps > 1_000
    assert num_plans < 500


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "mixed"])
def test_who_looks_between_two_steps_finds_no_block_that_the_running_step_takes(batching: str, share: bool) -> None:
    replica = ReplicaSettings(
        "fcfs",
        300,
        300,
        batching,
        max_num_batched_tokens=64 if batching != "mixed" else 300,
        memory="paged",
        block_size=4,
        prefix_cache="blocks",
        share_within_plan=share,
    )
    rng = np.random.default_rng(3)
    workload = [WorkloadRequest(n, n / 2, int(rng.integers(1, 150)), int(rng.integers(1, 60))) for n in range(25)]

    def looks(*, one_step: bool) -> list[tuple[int, ...]]:
        (worker,) = build_workers(1, replica, STEP_TIMES["llm-mock"])
        simulation = Simulation([worker], PLACEMENTS["least_loaded"](np.random.default_rng(1)), one_step=one_step)
        seen: list[tuple[int, ...]] = []

        def look(at_ps: int) -> int:
            cache, use = worker.replica.prefix_cache, worker.replica.memory.block_use(worker.replica.running)
            assert isinstance(cache, BlockCache)
            assert use is not None
            assert use.free >= 0
            seen.append((cache.num_evictions, use.used, use.cached, use.free))
            return at_ps + 10**11 // 3

        simulation.tick(0, look)
        requests = build_requests(workload, "Llama-2-7B", ADAPTERS, with_prompts=True)
        assert all(request.outcome == "finished" for request in simulation.run(requests))
        return seen

    jumped = looks(one_step=False)
    assert jumped == looks(one_step=True)
    assert jumped[-1][0] > 100


def test_a_cancelled_request_has_the_tokens_that_had_come() -> None:
    workload = [WorkloadRequest(0, 0.0, 50, 40), WorkloadRequest(1, 0.0, 50, 40), WorkloadRequest(2, 0.0, 50, 40)]

    def outputs(cancels: list[tuple[int, int]], *, one_step: bool = False) -> dict[int, tuple[str | None, int]]:
        replica = ReplicaSettings("fcfs", 1_500, 420, max_num_seqs=2, max_num_batched_tokens=500)
        workers = build_workers(1, replica, STEP_TIMES["llm-mock"])
        simulation = Simulation(workers, PLACEMENTS["least_loaded"](np.random.default_rng(1)), one_step=one_step)
        ended = simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS), cancels)
        return {request.handle: (request.outcome, request.output_tokens) for request in ended}

    first_ps = LlmMock().step_ps(Batch((PrefillChunk(50, 0, samples=True),) * 2))
    # After the prefill both decode with 50, 51, ... tokens cached: seven such steps, and a bit of the eighth.
    decodes_ps = sum(LlmMock().step_ps(Batch((), 2, 2 * kv, kv)) for kv in range(50, 57))
    for one_step in (False, True):
        at_ps = first_ps + decodes_ps + 1
        assert outputs([(at_ps, 0), (at_ps, 2)], one_step=one_step) == {
            0: ("cancelled", 8),
            1: ("finished", 40),
            2: ("cancelled", 0),  # still waiting
        }
        # A step that ends just then has not given its token yet; in its prefill a request has none.
        assert outputs([(at_ps - 1, 0)], one_step=one_step)[0] == ("cancelled", 7)
        assert outputs([(1, 0)], one_step=one_step)[0] == ("cancelled", 0)


def test_a_cancel_at_the_time_of_its_requests_arrival_cancels_it() -> None:
    at_ps = 300 * 10**9
    drawn = [(0.0, 50, 40, None), (0.3, 50, 40, None)]
    ended = run(drawn, [(at_ps, 1)], "continuous", "round_robin", "llm-mock", one_step=False)
    outcomes = {handle: (outcome, output_tokens) for handle, outcome, *_, output_tokens in ended}
    assert outcomes == {0: ("finished", 40), 1: ("cancelled", 0)}


def test_a_placement_counts_a_request_that_only_one_worker_can_take() -> None:
    small, large = (
        SimulatedWorker(
            f"pool-{pool}",
            partial(build_replica, ReplicaSettings("fcfs", pool, 420, max_num_batched_tokens=500)),
            STEP_TIMES["llm-mock"],
        )
        for pool in (100, 1_500)
    )
    workload = [WorkloadRequest(0, 0.0, 300, 2), WorkloadRequest(1, 0.0, 10, 2), WorkloadRequest(2, 0.0, 10, 2)]
    simulation = Simulation([small, large], PLACEMENTS["round_robin"](np.random.default_rng(1)))
    ended = simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS))
    # The first has the first turn, though it has no choice; so the second is the large worker's turn.
    assert {request.handle: request.worker for request in ended} == {0: "pool-1500", 1: "pool-1500", 2: "pool-100"}


def test_a_queue_that_raises_fails_its_requests_and_the_run_goes_on() -> None:
    class Broken(Fifo):
        def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
            if any(sequence.prompt_tokens == 13 for sequence in self):
                raise ZeroDivisionError("no such luck")
            return super().admit(admission, running, at_ps)

    replica = ReplicaSettings("fcfs", 1_500, 420, max_num_batched_tokens=500)
    workers = build_workers(
        2,
        replica,
        STEP_TIMES["llm-mock"],
        lambda chosen: build_replica(chosen, make_queue=lambda _: CheckedQueue(Broken())),
    )
    workload = [WorkloadRequest(index, index * 0.5, prompt, 4) for index, prompt in enumerate((10, 13, 10, 13, 10))]
    simulation = Simulation(workers, PLACEMENTS["round_robin"](np.random.default_rng(1)))
    ended = {request.handle: request for request in simulation.run(build_requests(workload, "Llama-2-7B", ADAPTERS))}
    outcomes = ["finished", "failed", "finished", "failed", "finished"]
    assert [ended[handle].outcome for handle in range(5)] == outcomes
    assert "Broken under " in ended[1].detail
    assert ended[1].detail.endswith("raised ZeroDivisionError: no such luck")
    assert STATUS[outcomes[1]] == "INTERNAL"
