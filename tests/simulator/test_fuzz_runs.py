"""The first runs that are drawn from what a user can ask for; `make fuzz` makes more of them."""

import pytest

from lorrery.loadgen.options import LoadOptions
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import MEMORIES, QUEUES
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import LOAD_KINDS, REQUEST_KINDS, WORKER_KINDS
from tests.simulator.fuzz_runs import BATCHINGS, ENGINES, check, draw_run, simulate

RUNS, AT_ONCE = 120, 20


@pytest.mark.parametrize("first", range(0, RUNS, AT_ONCE))
def test_jumping_equals_stepping_and_gaps_add_up_in_every_run(first: int) -> None:
    assert [wrong for number in range(first, first + AT_ONCE) if (wrong := check(number)) is not None] == []


def test_the_runs_have_everything_and_few_are_refused() -> None:
    runs = [draw_run(number) for number in range(RUNS)]

    def values(key: str) -> set[object]:
        return {run.overrides[key] for run in runs if key in run.overrides}

    assert values("engine") == set(ENGINES)
    assert values("scheduler.policy") == set(QUEUES)
    assert values("scheduler.batching") == set(BATCHINGS)
    assert values("scheduler.memory") == set(MEMORIES)
    assert values("scheduler.placement") == set(PLACEMENTS)
    assert values("scheduler.fair_by") == {"adapter", "tenant"}
    for key in ("workers", "autoscaler", "scheduler.fair_max_running", "scheduler.fair_weights", "scheduler.prefetch"):
        assert any(key in run.overrides for run in runs), key
    assert {
        fault.partition(",")[0] for run in runs for fault in run.faults
    } == WORKER_KINDS | LOAD_KINDS | REQUEST_KINDS
    loads = {run.workload.workload for run in runs if isinstance(run.workload, LoadOptions)}
    assert loads == {"poisson", "chat", "mooncake", "azure"}
    assert any(not isinstance(run.workload, LoadOptions) for run in runs)
    refused = 0
    for run in runs[:40]:
        try:
            simulate(run, one_step=False)
        except SettingsError:
            refused += 1
    assert refused <= 4
