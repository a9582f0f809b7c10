"""`vtc_fair` where requests wait for places for their adapters: turns change between steps, and jumping must see it."""

from fractions import Fraction
from random import Random

import pytest

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from tests.simulator.test_engine import ADAPTERS, STEP_TIMES, steps_and_plans


@pytest.mark.parametrize("seed", range(40))
def test_jumping_gives_each_its_turn_when_stepping_does(seed: int) -> None:
    """The cases are drawn by number, and not by Hypothesis, whose draws rarely bring two counters close."""
    rng = Random(seed)
    replica = ReplicaSettings(
        "vtc_fair",
        rng.choice([600, 2_000, 20_000]),
        420,
        rng.choice(["chunked", "continuous", "mixed"]),
        rng.choice(["paged", "peak"]),
        max_num_seqs=rng.choice([3, 8, 64]),
        max_num_batched_tokens=512,
        max_loras=rng.choice([1, 1, 2, 3]),
        max_overtakes=rng.choice([0, 1, 2, 3, 30]),
        fair_by=rng.choice(["tenant", "tenant", "adapter"]),
        fair_max_running=rng.choice([None, None, 1, 3]),
        fair_weights={
            owner: Fraction(rng.randint(1, 5), rng.randint(1, 3))
            for owner in ("a0", "a1", "t0", "t1")
            if rng.random() < 0.5
        },
    )
    num_tenants, load_ps = rng.randint(1, 4), rng.choice([10**7, 10**9, 10**11])
    workload, at = [], 0.0
    for index in range(rng.randint(20, 70)):
        at += rng.choice([0.0, 0.0, 0.01, 0.3, 2.0])
        adapter_id = rng.choice([None, *ADAPTERS])
        tenant_id = f"t{rng.randrange(num_tenants)}"
        lengths = rng.randint(1, 200), rng.randint(1, 200)
        workload.append(WorkloadRequest(index, at, *lengths, adapter_id, tenant_id=tenant_id))
    steps_and_plans(
        replica,
        workload,
        STEP_TIMES["roofline"],
        lambda own: build_replica(own, load_ps=lambda adapter, tier: adapter.rank * load_ps),
    )
