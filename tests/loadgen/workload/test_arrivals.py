import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.workload import arrivals
from lorrery.loadgen.workload.popularity import assign, power_indices, uniform_indices, zipf_indices
from lorrery.loadgen.workload.prompts import FIRST_WORD_ID, LAST_WORD_ID, output_seed, prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest


def rng():
    return np.random.default_rng(7)


def cv_of(times):
    gaps = np.diff(times, prepend=0.0)
    return gaps.std() / gaps.mean()


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_arrivals_have_the_rate_and_the_variation_asked_for(cv):
    times = arrivals.gamma(5.0, cv, 40_000, rng())
    assert 40_000 / times[-1] == pytest.approx(5.0, rel=0.05)
    assert cv_of(times) == pytest.approx(cv, rel=0.05)


def test_poisson_is_gamma_with_variation_one_and_constant_has_none():
    assert arrivals.poisson(2.0, 9, rng()).tolist() == arrivals.gamma(2.0, 1.0, 9, rng()).tolist()
    assert arrivals.constant(4.0, 3).tolist() == [0.0, 0.25, 0.5]


def test_synthetic_lengths_reach_both_bounds():
    workload = arrivals.synthetic(np.zeros(500), (3, 5), (7, 7), rng())
    assert {request.prompt_tokens for request in workload} == {3, 4, 5}
    assert {request.output_tokens for request in workload} == {7}


@pytest.mark.parametrize("bounds", [(0, 5), (6, 5)])
def test_an_impossible_range_is_refused(bounds):
    with pytest.raises(ValueError, match="input_range"):
        arrivals.synthetic(np.zeros(1), bounds, (1, 1), rng())


def test_scale_divides_times_and_limit_cuts_by_count_and_time():
    workload = arrivals.synthetic(arrivals.constant(1.0, 10), (1, 1), (1, 1), rng())
    fast = arrivals.scale(workload, 4.0)
    assert fast[-1].at_seconds == 2.25
    assert len(arrivals.limit(fast, 3)) == 3
    assert [request.at_seconds for request in arrivals.limit(fast, duration_seconds=0.5)] == [0.0, 0.25]
    with pytest.raises(ValueError, match="speed_up"):
        arrivals.scale(workload, 0.0)


def test_fitting_keeps_what_just_fits():
    lengths = [(10, 5), (11, 1), (10, 6)]
    workload = [WorkloadRequest(index, 0.0, *pair) for index, pair in enumerate(lengths)]
    assert [request.index for request in arrivals.fitting(workload, 10, 15)] == [0]


def test_zipf_follows_its_law_and_exponent_zero_is_uniform():
    counts = np.bincount(zipf_indices(4, 100_000, 1.0, rng()), minlength=4) / 100_000
    assert counts == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.01)
    flat = np.bincount(zipf_indices(4, 100_000, 0.0, rng()), minlength=4) / 100_000
    assert flat == pytest.approx(np.full(4, 0.25), abs=0.01)
    assert set(uniform_indices(3, 100, rng()).tolist()) == {0, 1, 2}


def test_power_follows_its_law_which_is_not_zipfs():
    indices = power_indices(10, 100_000, 0.5, rng())
    assert (indices < 5).mean() == pytest.approx(0.5**0.5, abs=0.01)


@given(st.integers(1, 50), st.floats(0, 5), st.integers(0, 2**32 - 1))
def test_zipf_never_leaves_the_list(num_adapters, exponent, seed):
    indices = zipf_indices(num_adapters, 200, exponent, np.random.default_rng(seed))
    assert indices.min() >= 0
    assert indices.max() < num_adapters


@pytest.mark.parametrize("law", [lambda: zipf_indices(0, 1, 1.0, rng()), lambda: power_indices(2, 1, 0.0, rng())])
def test_laws_refuse_what_they_cannot_draw(law):
    with pytest.raises(ValueError, match="num_adapters"):
        law()


def test_assign_names_the_drawn_adapters():
    workload = [WorkloadRequest(index, 0.0, 1, 1) for index in range(3)]
    named = assign(workload, ["a", "b"], np.array([1, 0, 1]))
    assert [request.adapter_id for request in named] == ["b", "a", "b"]


def test_a_prompt_is_words_of_the_length_asked_for_and_depends_on_seed_and_index():
    request = WorkloadRequest(3, 0.0, 5000, 1)
    prompt = prompt_token_ids(request, 9)
    assert prompt.shape == (5000,)
    assert prompt.min() == FIRST_WORD_ID
    assert prompt.max() == LAST_WORD_ID
    assert prompt.tolist() == prompt_token_ids(request, 9).tolist()
    assert prompt.tolist() != prompt_token_ids(request, 10).tolist()
    assert output_seed(request, 9) != output_seed(WorkloadRequest(4, 0.0, 5000, 1), 9)


def test_prompts_share_exactly_the_prefix_that_their_block_ids_share():
    first = prompt_token_ids(WorkloadRequest(0, 0.0, 1500, 1, hash_ids=(0, 1, 2)), 9)
    second = prompt_token_ids(WorkloadRequest(1, 0.0, 1100, 1, hash_ids=(0, 1, 8)), 9)
    assert len(second) == 1100
    assert first[:1024].tolist() == second[:1024].tolist()
    assert first[1024:1100].tolist() != second[1024:].tolist()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_bursts_keep_the_rate_and_have_their_dispersion(share):
    bursts = arrivals.Bursts(8.0, 2.0, share)
    times = arrivals.mmpp(10.0, bursts, 400_000, np.random.default_rng(5))
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.05)
    window = 200.0  # long beside the bursts
    counts = np.bincount((times // window).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(bursts.dispersion(10.0), rel=0.3)


def test_bursts_of_factor_one_are_a_poisson_process():
    bursts = arrivals.Bursts(1.0, 5.0, 0.3)
    gaps = np.diff(arrivals.mmpp(4.0, bursts, 100_000, np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    assert bursts.dispersion(4.0) == 1.0


def test_bursts_have_a_burst_rate_and_a_calm_one():
    bursts = arrivals.Bursts(20.0, 50.0, 0.2)
    calm, burst = bursts.rates(10.0)
    assert burst == 20 * calm
    assert 0.8 * calm + 0.2 * burst == pytest.approx(10.0)
    times = arrivals.mmpp(10.0, bursts, 200_000, np.random.default_rng(2))
    counts = np.bincount((times // 5.0).astype(int)) / 5.0
    # Seconds are calm or burst, with hardly anything between: the states last ten windows and more.
    between = (counts > 3 * calm) & (counts < burst / 2)
    assert between.mean() < 0.05
    assert np.median(counts[counts > burst / 2]) == pytest.approx(burst, rel=0.05)


def test_a_run_begins_in_a_burst_as_often_as_bursts_have_of_the_time():
    bursts = arrivals.Bursts(1000.0, 1e6, 0.25)  # longer than the run
    calm, burst = bursts.rates(10.0)
    firsts = [arrivals.mmpp(10.0, bursts, 1, np.random.default_rng(seed))[0] for seed in range(400)]
    # The first gap is below half a second in nearly every burst, and in one calm time of fifty.
    assert (1 / burst, 1 / calm) == (pytest.approx(0.025, abs=0.001), pytest.approx(25.1, abs=0.1))
    assert np.mean(np.array(firsts) < 0.5) == pytest.approx(0.25 + 0.75 * 0.02, abs=0.06)


def test_many_short_bursts_take_no_more_memory_than_the_arrivals():
    bursts = arrivals.Bursts(4.0, 1e-4)
    tracemalloc.start()
    times = arrivals.mmpp(0.2, bursts, 100, rng())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 100 / times[-1] == pytest.approx(0.2, rel=0.4)
    assert (np.diff(times) > 0).all()
    assert most < 1_000_000
