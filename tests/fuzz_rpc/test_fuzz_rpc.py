"""Every RPC under malformed and hostile messages; a part of what `make fuzz-rpc` sends."""

from pathlib import Path

import pytest

from tests.fuzz_rpc.cases import METHODS, draw_case
from tests.fuzz_rpc.fuzz import fuzz

NUM_CASES = 5000
MAX_GROWTH_BYTES = 24 * 2**20


@pytest.mark.cluster
@pytest.mark.timeout(240)
async def test_whatever_is_sent_ends_with_a_documented_status_and_disturbs_nobody(tmp_path: Path) -> None:
    outcome = await fuzz(tmp_path, 1, NUM_CASES)
    assert outcome.wrong == []
    assert {method for method, _ in outcome.statuses} == {method.name for method in METHODS}
    assert outcome.num_innocents > 0
    for name, (before, after) in outcome.memory.items():
        assert after - before < MAX_GROWTH_BYTES, name


def test_a_case_is_the_same_again() -> None:
    assert [draw_case(7, number) for number in range(50)] == [draw_case(7, number) for number in range(50)]
    assert draw_case(7, 3) != draw_case(8, 3)
