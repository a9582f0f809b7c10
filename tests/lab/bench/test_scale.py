"""How the benchmark of growing clusters sums up."""

import pytest

from lab.bench.scale import CASES, TOKENS_PER_SECOND, Case, Scaled, Use, Window


def _window(cpu_seconds: float, client_share: float = 0.2) -> Window:
    uses = {"router": Use(2, cpu_seconds, 0.002), "scheduler": Use(1, 2 * cpu_seconds, None)}
    return Window(2.0, 1000, 100, uses, client_share)


def test_a_services_share_is_the_median_of_the_rounds():
    scaled = Scaled(Case(4, 128), [_window(0.1), _window(0.2), _window(0.9)])
    assert scaled.cores("router") == pytest.approx(0.1)
    assert scaled.us_per_token("router") == pytest.approx(200)
    assert scaled.us_per_step("scheduler") == pytest.approx(4000)
    assert (scaled.lag_ms("router"), scaled.lag_ms("scheduler"), scaled.void) == (2, 0, "")


def test_a_client_that_takes_a_core_voids_the_figures():
    assert Scaled(Case(4, 128), [_window(0.1), _window(0.1, 0.9)]).void == "the client took 90% of a core"


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_gpus_for_its_shards_and_the_same_rate_of_tokens(case: Case):
    assert not case.gpus % case.shards
    assert case.streams / case.step_ms * 1000 == pytest.approx(TOKENS_PER_SECOND)
