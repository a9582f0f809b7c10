"""The first part of the fuzz corpus; compiled, it is twice as long, and `make fuzz` runs more of it."""

import pytest

from lorrery.scheduler.core import policies
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.placements.worker_table import FEW
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, QUEUES, batching_name, batching_of
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica import Replica
from lorrery.service.installed import core_is_compiled
from tests.scheduler.core.oracle.blocks import BlockCache as Oracle
from tests.scheduler.core.oracle.pool import Pool
from tests.simulator import fuzz
from tests.simulator.fuzz import check
from tests.simulator.fuzz_cases import MODELS, OF_SGLANG, draw_case

CASES, AT_ONCE = 1_500 if core_is_compiled() else 700, 50


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_jumping_equals_stepping_in_every_case(first: int) -> None:
    assert [wrong for number in range(first, first + AT_ONCE) if (wrong := check(number)) is not None] == []


def test_a_cluster_with_runs_of_blocks_equals_one_with_a_node_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_cache_told", _counts)  # by hash ids, nobody knows the tokens of blocks
    cases = [case for number in range(3_000, 3_070) if (case := draw_case(number)).replica.prefix_cache == "blocks"]
    by_runs = [fuzz.run_case(case, one_step=False) for case in cases]
    monkeypatch.setattr(policies, "BlockCache", Oracle)
    monkeypatch.setattr(policies, "ScheduledBlockCache", Pool)
    monkeypatch.setattr(fuzz, "ids_suffice", lambda *_: False)
    for case, ours in zip(cases, by_runs, strict=True):
        assert fuzz.run_case(case, one_step=False) == ours, case.title


def _counts(replica: Replica) -> tuple[int, int, int, int]:
    cache = replica.prefix_cache
    assert isinstance(cache, (BlockCache, Oracle, Pool))
    return cache.num_evictions, cache.num_unpinned, cache.num_pins, cache.num_pinned


def test_the_corpus_has_everything() -> None:
    cases = [draw_case(number) for number in range(CASES)]
    assert {case.replica.policy for case in cases} == set(QUEUES)
    assert {batching_name(case.replica) for case in cases} == set(BATCHINGS)
    assert {case.replica.memory for case in cases} == set(MEMORIES)
    assert {case.placement for case in cases} == set(PLACEMENTS)
    assert {case.placement for case in cases if case.num_workers > FEW} == set(PLACEMENTS)
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
        assert len(ways) >= 4 or policy in OF_SGLANG
        assert batching_of(policy) in ways
    assert any(case.replica.strict for case in cases)
    assert any(case.replica.prefix_cache == "blocks" for case in cases)
    assert any(case.trie for case in cases)
    assert any(case.num_clients for case in cases)
    assert any(case.num_shards > 1 for case in cases)
