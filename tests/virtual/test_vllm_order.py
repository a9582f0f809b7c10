"""A live scheduler decides as vLLM's recorded one does, step by step, and its journal replays.

The services' own code in virtual time: with the settings of the preset `vllm-0.32` and of a record they are sent its
requests, each in the step in which it has to come (`tests.cluster.vllm_record`). Whole records take some tenths of a
second here and minutes on a real clock, on which a machine that stands still would move requests to other steps;
`tests/cluster/test_vllm_order.py` has a few on real processes.
"""

import json
import os
from pathlib import Path

import pytest

from lorrery.scheduler.core.record import Record
from lorrery.simulator.journal import read_journal
from lorrery.simulator.replay import replay
from lorrery.simulator.replay_parts import parts_of
from tests.cluster.vllm_record import VllmRecord
from tests.virtual.recorded import run_record, without_slots

TESTS = Path(__file__).parents[1]
SHARED = Path(os.environ.get("LORRERY_SHARED") or TESTS.parents[1] / "shared") / "golden" / "vllm_scheduler.jsonl"
MOST_STEPS = 150
"""In a record that is played: a client of these tests waits for 100 seconds at most."""


def read(path: Path) -> list[Record]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "steps" in record]


def playable(records: list[Record]) -> list[VllmRecord]:
    read = [VllmRecord(record) for record in records]
    return [record for record in read if not record.why_not and len(record.steps) <= MOST_STEPS]


EXCERPTS = playable([record for path in sorted(TESTS.glob("golden/vllm_*.jsonl")) for record in read(path)])


def differences(record: VllmRecord, journal: Path) -> list[object]:
    """Play a record; return what is wrong with its streams, its decisions, and the replay of its journal."""
    wrong: list[object] = [*run_record(record, journal)]
    wrong += record.misplaced(journal) or record.check(journal)
    with without_slots():
        content = read_journal(journal)
        result = replay(content, parts_of(content, journal))
    assert result.num_steps == len(record.steps)
    return [*wrong, *result.differences, *(["an input took effect late"] if result.num_late else [])]


@pytest.mark.parametrize("record", EXCERPTS, ids=lambda record: record.name)
def test_a_live_scheduler_decides_as_recorded(tmp_path: Path, record: VllmRecord) -> None:
    assert differences(record, tmp_path / "journal.jsonl") == []


def test_the_records_have_every_rule_that_a_live_run_can_have() -> None:
    families = {record.name.rpartition("-")[2] if "-rule-" not in record.name else "rule" for record in EXCERPTS}
    expected = {"preemption", "lora", "lora_preemption", "prefix", "long_prefill", "async_preemption", "rule"}
    assert families >= expected | {"priority_preemption"}
    assert any(len(record.steps) > 50 for record in EXCERPTS if record.config["async_scheduling"])
    assert any(step.preempted for record in EXCERPTS for step in record.steps)


def test_a_live_scheduler_decides_a_step_ahead_as_recorded(tmp_path: Path) -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is missing: set LORRERY_SHARED to the folder that holds golden/")
    records = playable([record for record in read(SHARED) if record["config"]["async_scheduling"]])
    assert len(records) > 5
    for record in records:
        assert differences(record, tmp_path / f"{record.name}.jsonl") == [], record.name
