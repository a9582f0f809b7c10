"""The first part of the fuzz corpus; compiled, it is three times as long, and `make fuzz` runs more of it."""

import pytest

from lorrery.chassis.version import core_is_compiled
from lorrery.scheduler.core.batchings import BATCHINGS
from lorrery.scheduler.core.memories import MEMORIES
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import QUEUES, batching_name, batching_of
from tests.simulator.fuzz import MODELS, check, draw_case

CASES, AT_ONCE = 3_000 if core_is_compiled() else 1_000, 50


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_jumping_equals_stepping_in_every_case(first: int) -> None:
    assert [wrong for number in range(first, first + AT_ONCE) if (wrong := check(number)) is not None] == []


def test_the_corpus_has_everything() -> None:
    cases = [draw_case(number) for number in range(CASES)]
    assert {case.replica.policy for case in cases} == set(QUEUES)
    assert {batching_name(case.replica) for case in cases} == set(BATCHINGS)
    assert {case.replica.memory for case in cases} == set(MEMORIES)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    assert {case.model for case in cases} == set(MODELS)
    assert {fault.kind for case in cases for fault in case.faults} == {
        "worker_loss",
        "slow_worker",
        "adapter_load_failure",
        "slow_adapter_load",
        "freeze_worker",
    }
    assert any(case.rules.deadline_admission and case.timeout_ps is not None for case in cases)
    for policy in QUEUES:
        ways = {batching_name(case.replica) for case in cases if case.replica.policy == policy}
        assert len(ways) >= 4
        assert batching_of(policy) in ways
    assert any(case.replica.strict for case in cases)
    assert any(case.replica.prefix_cache == "blocks" for case in cases)
    assert any(case.trie for case in cases)
    assert any(case.num_clients for case in cases)
    assert any(case.num_shards > 1 for case in cases)
