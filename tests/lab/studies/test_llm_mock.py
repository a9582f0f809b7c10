"""llm-mock's benchmark over a synthetic corpus, at a small size."""

from itertools import pairwise

import numpy as np
import pytest

from lab.studies import llm_mock
from lab.studies.corpus import MAX_TOKENS, MIN_TOKENS, draw_prompts
from lab.studies.llm_mock_benchmark import CACHE_SIZES, Point, study, tpot, tpot_gpt2, ttft


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return study(draws=4, corpus_prompts=400)


def of(points: list[Point], batch_size: int) -> list[Point]:
    return [point for point in points if point.batch_size == batch_size and not point.system_tokens]


def test_hit_length_never_falls_with_the_caches_size(points: list[Point]) -> None:
    for smaller, larger in pairwise(of(points, 10)):
        assert smaller.cache_size < larger.cache_size
        assert np.all(smaller.values(lambda run: run.hit_tokens) <= larger.values(lambda run: run.hit_tokens))
    assert not np.any(of(points, 10)[0].values(lambda run: run.hit_tokens))


def test_a_cache_saves_a_little_and_shared_system_prompts_much(points: list[Point]) -> None:
    cached = of(points, 10)[-1]
    assert np.all((cached.gains(ttft) > 0) & (cached.gains(ttft) < 0.05))
    longer = [point for point in points if point.cache_size == CACHE_SIZES[-1] and point.batch_size == 10]
    for before, after in pairwise(longer):
        assert float(np.median(before.gains(ttft))) < float(np.median(after.gains(ttft)))


def test_larger_batches_have_worse_ttft_and_tpot_against_the_readmes_claim(points: list[Point]) -> None:
    ten, twenty = of(points, 10)[0], of(points, 20)[0]
    for figure in (ttft, tpot_gpt2, tpot):
        assert float(np.median(ten.values(figure))) < float(np.median(twenty.values(figure)))


def test_the_originals_own_chart_says_so_too() -> None:
    original = llm_mock.read_original()
    for size in CACHE_SIZES:
        assert original["p99_ttft", 10, size] < original["p99_ttft", 20, size]


def test_the_corpus_has_the_lengths_and_openings_that_it_states() -> None:
    prompts = draw_prompts(4_000, np.random.default_rng(0))
    lengths = np.array([len(prompt) for prompt in prompts])
    assert lengths.min() >= MIN_TOKENS
    assert lengths.max() <= MAX_TOKENS
    assert lengths.mean() == pytest.approx(167, rel=0.05)
    first = np.bincount([prompt[0] for prompt in prompts])
    assert first.max() / len(prompts) == pytest.approx(0.22, abs=0.03)  # Zipf, exponent 1.2, over 1,905 words


def test_a_system_prompt_is_shared_by_all_and_comes_on_top() -> None:
    plain = draw_prompts(20, np.random.default_rng(5))
    longer = draw_prompts(20, np.random.default_rng(5), system_tokens=64)
    assert [prompt[64:] for prompt in longer] == plain
    assert len({tuple(prompt[:64]) for prompt in longer}) == 1
