"""The recorder under a real vLLM: fed with the inputs of known records, it gives these records.

Nothing here stands in for vLLM, since the recorder is right only if it drives vLLM's own scheduler as it expects.
"""

import json
import os
from pathlib import Path

import pytest

from lorrery.validation.golden.replay import RULES_OF, changed, interpreter, read_cases, record
from lorrery.validation.golden.vllm_cases import FAMILIES, cases

PROJECT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("LORRERY_SHARED") or PROJECT.parent / "shared") / "golden"
RECORDS = [path for name in ("vllm_scheduler", "vllm_rules") for path in sorted(SHARED.glob(f"{name}.jsonl"))]
VLLM = os.environ.get("LORRERY_VLLM")

pytestmark = [
    pytest.mark.skipif(
        not VLLM, reason="needs vLLM: set LORRERY_VLLM to a folder as of lorrery validate golden --against"
    ),
    pytest.mark.timeout(600),  # importing vLLM from a cold disk takes a minute
]


@pytest.mark.skipif(not RECORDS, reason=f"{SHARED} has no records: set LORRERY_SHARED to the folder that holds golden/")
def test_recording_known_cases_again_gives_the_same_records():
    known = read_cases(RECORDS)
    again = list(record(interpreter(Path(VLLM)), known))
    if json.loads(again[0])["version"] != RULES_OF:
        pytest.skip(f"the records are from vLLM {RULES_OF}")
    assert changed(known, again) == []
    assert [json.loads(line) for line in again] == known


def test_new_cases_of_every_family_can_be_recorded():
    inputs = list(cases(5, len(FAMILIES)))
    for case, line in zip(inputs, record(interpreter(Path(VLLM)), inputs), strict=True):
        made = json.loads(line)
        assert case.items() <= made.items()
        finished = [number for step in made["steps"] for number, _ in step.get("finished", ())]
        assert sorted(finished + made["left_waiting"]) == [request["id"] for request in case["requests"]]
