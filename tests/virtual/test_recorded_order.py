"""A live scheduler decides as the recorded ones of vLLM and SGLang do, step by step, and its journal replays.

The services' own code in virtual time: with the settings of an engine's preset and of a record they are sent its
requests, each in the step in which it has to come (`tests.cluster.live_record`). Whole records take some tenths of a
second here and minutes on a real clock, on which a machine that stands still would move requests to other steps;
`tests/cluster/test_vllm_order.py` has a few on real processes.
"""

import json
import os
from pathlib import Path

import pytest

from lorrery.scheduler.subscribers.record import Record
from tests.cluster.live_record import LiveRecord
from tests.cluster.vllm_record import VllmRecord
from tests.virtual.recorded import MOST_STEPS, STEP_SECONDS, differences
from tests.virtual.sglang_record import SglangRecord

TESTS = Path(__file__).parents[1]
SHARED = Path(os.environ.get("LORRERY_SHARED") or TESTS.parents[1] / "shared") / "golden" / "vllm_scheduler.jsonl"


def read(path: Path) -> list[Record]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "steps" in record or "iterations" in record]


def live(record: Record) -> LiveRecord:
    return VllmRecord(record) if "steps" in record else SglangRecord(record, STEP_SECONDS)


def playable(records: list[Record]) -> list[LiveRecord]:
    return [one for one in map(live, records) if not one.why_not and len(one.steps) <= MOST_STEPS]


def excerpts(engine: str) -> list[LiveRecord]:
    return playable([record for path in sorted(TESTS.glob(f"golden/{engine}_*.jsonl")) for record in read(path)])


VLLM, SGLANG = excerpts("vllm"), excerpts("sglang")


@pytest.mark.parametrize("record", [*VLLM, *SGLANG], ids=lambda record: record.name)
def test_a_live_scheduler_decides_as_recorded(tmp_path: Path, record: LiveRecord) -> None:
    assert differences(record, tmp_path / "journal.jsonl") == []


def test_vllms_records_have_every_rule_that_a_live_run_can_have() -> None:
    families = {record.name.rpartition("-")[2] if "-rule-" not in record.name else "rule" for record in VLLM}
    expected = {"preemption", "lora", "lora_preemption", "prefix", "long_prefill", "async_preemption", "rule"}
    assert families >= expected | {"priority_preemption"}
    assert any(len(record.steps) > 50 for record in VLLM if record.config["async_scheduling"])
    assert any(step.preempted for record in VLLM for step in record.steps)


def test_sglangs_records_have_every_rule_that_a_live_run_can_have() -> None:
    families = {record.name.split("-")[1] for record in SGLANG}
    assert families >= {"chunked", "everything", "evict", "interval", "lora_drain", "lora_pinned_lpm", "lpm", "paged"}
    assert any(record.config["overlap"] for record in SGLANG)
    assert any(step.preempted for record in SGLANG for step in record.steps)


def test_a_live_scheduler_decides_a_step_ahead_as_recorded(tmp_path: Path) -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is missing: set LORRERY_SHARED to the folder that holds golden/")
    records = playable([record for record in read(SHARED) if record["config"]["async_scheduling"]])
    assert len(records) > 5
    for record in records:
        assert differences(record, tmp_path / f"{record.name}.jsonl") == [], record.name
