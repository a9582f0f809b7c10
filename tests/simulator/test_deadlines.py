"""What a client that gives up sees, whatever its scheduler has done by then."""

from typing import Any

import pytest

import lorrery

STEP_SECONDS = 3.0
CUTS = {"cut,after=1", "cut,after=0"}
SETTINGS = {
    "scheduler": {"policy": "fcfs"},
    "worker": {"step_time": "constant", "constant": {"prefill_ms": 1e3 * (STEP_SECONDS - 1.0), "step_ms": 1e3}},
}


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize("output_tokens", [1, 2])
def test_tokens_after_the_deadline_do_not_count(output_tokens: int, *, one_step: bool) -> None:
    requests = lorrery.Requests([0.0, 100.0], [8, 8], [output_tokens, output_tokens])
    early, late = (
        lorrery.simulate(
            SETTINGS, lorrery.LoadOptions(timeout=timeout), requests=requests, workers=1, one_step=one_step
        ).columns
        for timeout in (STEP_SECONDS - 0.5, STEP_SECONDS + 1.5)
    )
    assert early.status.tolist() == ["DEADLINE_EXCEEDED"] * 2
    assert early.end_seconds.tolist() == [2.5, 102.5]
    assert early.output_tokens.tolist() == [0, 0]
    assert all(seconds != seconds for seconds in early.ttft_seconds.tolist())
    assert late.status.tolist() == ["OK"] * 2
    assert late.output_tokens.tolist() == [output_tokens] * 2


def test_a_deadline_that_has_passed_counts_where_the_simulation_ends_before_the_step() -> None:
    settings = {**SETTINGS, "worker": {"step_time": "constant", "constant": {"prefill_token_ms": 1e6}}}
    result = lorrery.simulate(
        settings,
        lorrery.LoadOptions(timeout=4e6),
        requests=lorrery.Requests([0.0, 0.01, 0.02, 0.03], [2000] * 4, [10] * 4),
        workers=1,
    )
    assert result.columns.status.tolist() == ["DEADLINE_EXCEEDED"] * 4


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize(
    "fault", ["cut,after=100", "cut,after=1", "cut,after=0", "stall,after=100,seconds=1", "delay,seconds=0.001"]
)
def test_tokens_after_the_deadline_do_not_count_where_a_fault_applies(fault: str, *, one_step: bool) -> None:
    def found(timeout: float) -> Any:
        options, requests = lorrery.LoadOptions(timeout=timeout), lorrery.Requests([0.0, 100.0], [8, 8], [1, 1])
        return lorrery.simulate(
            SETTINGS, options, requests=requests, workers=1, one_step=one_step, faults=[fault]
        ).columns

    early = found(STEP_SECONDS - 0.5)
    assert early.status.tolist() == ["DEADLINE_EXCEEDED"] * 2
    assert early.end_seconds.tolist() == [2.5, 102.5]
    assert early.output_tokens.tolist() == [0, 0]
    assert found(STEP_SECONDS + 2.5).status.tolist() == ["UNAVAILABLE" if fault in CUTS else "OK"] * 2


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize("output_tokens", [6, 60])
def test_what_a_stall_holds_back_at_the_deadline_does_not_count(output_tokens: int, *, one_step: bool) -> None:
    found = lorrery.simulate(
        SETTINGS,
        lorrery.LoadOptions(timeout=9.5),
        requests=lorrery.Requests([0.0, 100.0], [8, 8], [output_tokens, output_tokens]),
        workers=1,
        one_step=one_step,
        faults=["stall,after=2,seconds=1", "stall,after=3,seconds=60"],
    ).columns
    assert found.status.tolist() == ["DEADLINE_EXCEEDED"] * 2
    assert found.end_seconds.tolist() == [9.5, 109.5]
    assert found.output_tokens.tolist() == [3, 3]


def test_a_cut_counts_where_static_batching_holds_the_request_beyond_its_deadline() -> None:
    found = lorrery.simulate(
        {**SETTINGS, "scheduler": {"policy": "fcfs", "batching": "static"}},
        lorrery.LoadOptions(timeout=6.5),
        requests=lorrery.Requests([0.0, 0.0], [8, 8], [20, 4], tenant_id=["", "cut"]),
        workers=1,
        faults=["cut,after=2,tenant=cut"],
    ).columns
    assert found.status.tolist() == ["DEADLINE_EXCEEDED", "UNAVAILABLE"]
    assert found.output_tokens[1] == 2
