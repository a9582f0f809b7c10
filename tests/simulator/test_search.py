"""The search of `lorrery plan` finds what trying everything finds, and says what it has seen."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.service.settings.cluster import Settings, changed
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.plan.level import Judge, level_of
from lorrery.simulator.plan.search import Answer, Task, cheapest, summed_up
from lorrery.simulator.plan.shapes import Shape
from lorrery.simulator.plan.trials import Trial
from lorrery.worker.device.output import Ending, FinishReason

LEVEL = level_of((("ttft_p95", 1.0),))
SETTINGS: Settings = changed({}, {})


def trial(number: int, needed: int, seed: int = 42) -> Trial:
    """A run of a shape that needs so many replicas: the more are missing, the later the first token."""
    value = 0.5 + needed / number / 2 if number >= needed else 1.0 + needed / number
    return Trial(number, seed, {"ttft_p95": value}, number >= needed, 100, 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([1.0, 2.0, 2.69, 21.5]), st.integers(0, 9)), min_size=1, max_size=9
    ),
    st.integers(1, 3),
)
def test_it_is_as_cheap_as_what_trying_everything_finds(shapes: list[tuple[int, float, int]], at_once: int):
    made = [Shape((f"a={index}",), SETTINGS, "X", 1, usd, 1.0, least) for index, (least, usd, _) in enumerate(shapes)]
    needs = {id(shape): least + more for shape, (least, _, more) in zip(made, shapes, strict=True)}

    def run_all(tasks: Sequence[Task]) -> Iterator[Trial]:
        return (trial(number, needs[id(shape)], seed) for shape, number, seed, _ in tasks)

    answer = Answer()
    cheapest(made, LEVEL, run_all, answer, num_seeds=2, at_once=at_once)
    costs = [needs[id(shape)] * shape.usd_per_hour for shape in made if shape.usd_per_hour is not None]
    lowest = min(shape.least * usd for shape, (_, usd, _) in zip(made, shapes, strict=True))
    if min(costs) <= 16 * lowest:
        assert answer.usd_per_hour == pytest.approx(min(costs))
        assert [proof.met for proof in answer.proofs][-1]
        assert all(not proof.met for proof in answer.proofs[:-1])
        assert len(answer.rejected) == len(made) - 1
    else:
        assert answer.shape is None or answer.usd_per_hour >= min(costs)
    assert answer.finished


def test_an_interval_that_holds_the_limit_is_told():
    runs = [Trial(3, seed, {"ttft_p95": value}, value <= 1, 9, 0) for seed, value in enumerate((0.8, 0.9, 1.0))]
    proof = summed_up(3, runs, LEVEL)
    assert proof.means["ttft_p95"] == pytest.approx(0.9)
    assert proof.margins["ttft_p95"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert (proof.met, proof.is_clear) == (True, False)
    assert summed_up(3, [trial(9, 1, seed) for seed in range(3)], LEVEL).is_clear


def request(
    handle: int, ttft: float, tokens: int = 11, tpot: float = 0.1, outcome: str = "finished"
) -> SimulatedRequest:
    made = SimulatedRequest(handle, 5, tokens, 0, Ending(tokens, FinishReason.LENGTH))
    made.outcome, made.output_tokens = outcome, tokens
    made.sequence.first_token_ps = round(ttft * 1e12)
    made.finished_ps = round((ttft + (tokens - 1) * tpot) * 1e12)
    return made


def test_a_run_is_lost_as_soon_as_too_many_requests_are_late():
    judge = Judge(level_of((("ttft_p90", 1.0), ("tpot_mean", 0.2))), 20)
    assert all(judge.add(request(number, 0.5)) for number in range(8))
    assert judge.add(request(8, 1.5))
    assert judge.add(request(9, 1.0, outcome="timeout"))
    assert not judge.add(request(10, 1.1))
    assert (judge.num_failed, judge.lost_first) == (1, False)
    assert judge.figures()["ttft_p90"] == 1.5


def test_goodput_counts_requests_that_keep_all_bounds():
    judge = Judge(level_of((("ttft_p50", 1.0), ("tpot_p50", 0.2), ("goodput", 0.5))), 4)
    for number, (ttft, tpot) in enumerate(product((0.5, 1.5), (0.1, 0.3))):
        judge.add(request(number, ttft, tpot=tpot))
    assert judge.figures() == {"ttft_p50": pytest.approx(0.5), "tpot_p50": pytest.approx(0.1), "goodput": 0.25}
