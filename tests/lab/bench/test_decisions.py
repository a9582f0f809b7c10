"""The table of what decisions cost has every policy, way to batch and memory rule, and its worlds run."""

from dataclasses import asdict

import pytest
from rich.console import Console

from lab.bench import decisions, loaded_replica
from lab.bench.decisions import decision_table
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, QUEUES


def test_every_policy_way_to_batch_and_memory_rule_has_a_row() -> None:
    rows = list(decisions.combinations())
    assert {row.policy for row in rows} == set(QUEUES)
    assert {row.batching for row in rows} == set(BATCHINGS)
    assert {row.memory for row in rows} == set(MEMORIES)
    assert len({(row.policy, row.batching, row.memory) for row in rows}) == len(rows)


def test_the_cost_of_each_entry_is_compared_between_plans_that_admit_few_and_many() -> None:
    assert decisions._growth([(100, 1), (100, 1), (800, 4), (2400, 8)]) == 2.5
    assert decisions._growth([(30, 3), (60, 3)]) is None
    assert decisions._growth([]) is None


def test_a_table_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NUM_WAITING", 100)
    monkeypatch.setattr(decisions, "BATCH", 8)
    monkeypatch.setattr(decisions, "_NUM_WEIGHED", 200)
    for module in (decisions, loaded_replica):
        monkeypatch.setattr(module, "MAX_OUTPUT_TOKENS", 36)
    chosen = [next(decisions.combinations())]
    monkeypatch.setattr(decisions, "combinations", lambda: chosen)
    monkeypatch.setattr(decisions, "COMPILED", decisions.PROJECT / "no such folder")
    (result,) = decisions.measure(40)
    assert [row.pressure for row in result.rows] == ["seats", "memory"]
    assert all(row.num_running and row.commit_p50_us <= row.commit_p99_us for row in result.rows)
    assert min(result.waiting_bytes.values()) > 0
    console = Console(width=160, record=True)
    console.print(decision_table([result]))
    assert "slora_loop" in console.export_text()
    assert asdict(result)["rows"][0]["policy"] == "req_queue"
