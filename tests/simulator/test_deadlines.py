"""What a client that gives up sees, whatever its scheduler has done by then."""

import pytest

import lorrery

STEP_SECONDS = 3.0
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
