"""The steady state of a closed loop, on steps of a simple form: what holds for every way to share steps."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorrery.worker.device.closed_loop import ClosedLoop, Pieces, PromptTurns, Seconds, Turns


def step(num_decodes: int, pieces: Pieces) -> Seconds:
    """8 ms, 0.05 ms a decode, 0.02 ms a prompt token; by part."""
    return np.array([0.00002 * sum(new for new, _ in pieces), 0.008 + 0.00005 * num_decodes])


ways = st.builds(
    PromptTurns,
    turns=st.sampled_from(Turns),
    step_tokens=st.integers(2_000, 20_000),
    in_pieces=st.booleans(),
    decode_steps=st.just(10),
)


@given(ways, st.integers(1, 5_000), st.integers(2, 500), st.integers(1, 1_000))
@example(PromptTurns(Turns.BESIDE, 2_000, in_pieces=True, decode_steps=10), 2_000, 2, 3)
def test_times_are_those_of_steps(turns, prompt, output, streams):
    loop = ClosedLoop(step, turns, prompt, output)
    found = loop.at(streams)
    ttft, tpot = float(found.ttft.sum()), float(found.tpot.sum())
    assert 0 < found.decoding <= streams
    assert tpot >= 0.008
    assert ttft >= 0.008
    requests = streams / (ttft + (output - 1) * tpot)
    # All prompts are computed, and no step takes less than its floor: throughput is bounded by both.
    assert requests * prompt * 0.00002 <= 1
    assert requests * (output - 1) <= found.decoding / 0.008 * (1 + 1e-6)


@given(ways, st.integers(1, 5_000), st.integers(2, 500))
def test_a_stream_alone_meets_nobody(turns, prompt, output):
    loop = ClosedLoop(step, turns, prompt, output)
    found = loop.at(1)
    assert found.ttft.sum() == pytest.approx(loop.alone(prompt).sum())
    assert found.tpot.sum() == pytest.approx(step(1, ()).sum())


def test_a_prompt_that_does_not_fit_beside_decodes_waits_for_their_end():
    loop = ClosedLoop(step, PromptTurns(Turns.BESIDE, 1_000), 1_000, 50)
    two, four = loop.at(2), loop.at(4)
    assert two.decoding == pytest.approx(1, abs=0.35)
    assert four.decoding == pytest.approx(1, abs=0.35)
