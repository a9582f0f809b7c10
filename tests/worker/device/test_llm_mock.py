"""llm-mock's formula and lengths against values of the original (tests/golden)."""

import json
from pathlib import Path

import pytest

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.output import LlmMockLength

GOLDEN = Path(__file__).parents[2] / "golden"


def records(name: str) -> list[dict]:
    lines = (GOLDEN / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def as_prefills(tasks: list[list[int]]) -> Batch:
    return Batch(tuple(PrefillChunk(length - first_new, first_new, True) for length, first_new in tasks))


def as_mixed(tasks: list[list[int]]) -> Batch:
    """Sequences with one new token as decodes."""
    cached = [first_new for length, first_new in tasks if length == first_new + 1]
    prefills = as_prefills([task for task in tasks if task[0] != task[1] + 1]).prefills
    return Batch(prefills, len(cached), sum(cached), max(cached, default=0))


@pytest.mark.parametrize("batch_of", [as_prefills, as_mixed])
def test_step_time_is_the_originals(batch_of):
    cases = records("llmmock_step_time.jsonl")
    assert cases
    for case in cases:
        assert LlmMock().step_ps(batch_of(case["tasks"])) / 1e12 == pytest.approx(case["step_time_s"], rel=1e-6)


def test_output_length_is_the_originals():
    cases = records("llmmock_decode_length.jsonl")
    assert cases
    for case in cases:
        end = LlmMockLength().draw(0, case["prompt_len"])
        assert end.output_tokens == case["decode_length"]
        assert (end.reason, end.extra_step) == (FinishReason.LENGTH, True)


def test_empty_step_costs_the_constant():
    assert LlmMock().step_ps(Batch()) == 60_000_000_000
