"""Two runs are told apart where they differ, and as often as promised where they do not."""

import heapq

import numpy as np
import pytest

from lorrery.view.reports.compare import compare
from lorrery.view.reports.requests import Requests, read_requests
from tests.view.reports.runs import poisson, row, write


def requests(folder, rows):
    return read_requests(write(folder, rows) / "requests.csv", [])


def columns(sent, ttft, decode, tokens):
    """Completed requests, in memory."""
    size = len(sent)
    numbers = {
        "index": np.arange(size), "intended_seconds": sent, "sent_seconds": sent, "first_token_seconds": sent + ttft,
        "last_token_seconds": sent + ttft + decode, "end_seconds": sent + ttft + decode, "queue_seconds": ttft,
        "prompt_tokens": np.full(size, 100), "output_tokens": tokens,
    }  # fmt: skip
    return Requests(
        {name: np.asarray(values, np.float64) for name, values in numbers.items()},
        {name: np.zeros(size, np.int32) for name in ("status", "adapter_id")},
        {"status": ["OK"], "adapter_id": [""]},
        {},
    )


def closed_loop(seed, factor=1.0, clients=32, size=1000):
    """A closed loop: a first wave whose prefills wait for one another, then a request whenever one ends."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(8, 200, size)
    prefill = factor * rng.lognormal(-4, 0.3, size)
    free = [(0.0, client) for client in range(clients)]
    sent, first, gpu = np.zeros(size), np.zeros(size), 0.0
    for index in range(size):
        sent[index], client = heapq.heappop(free)
        gpu = max(gpu, sent[index]) + prefill[index]
        first[index] = gpu
        heapq.heappush(free, (gpu + factor * 0.01 * tokens[index], client))
    return columns(sent, first - sent, factor * 0.01 * (tokens - 1), tokens)


def single_server(seed, load=0.5, size=2500, factor=1.0):
    """A queue before one server (M/M/1), by Lindley's recursion; the service is the TTFT's second part."""
    rng = np.random.default_rng(seed)
    sent, service = np.cumsum(rng.exponential(1.0, size)), factor * load * rng.exponential(1.0, size)
    ready = np.zeros(size)
    free = 0.0
    for index in range(size):
        free = max(free, sent[index]) + service[index]
        ready[index] = free
    return columns(sent, ready - sent, np.full(size, 0.5), np.full(size, 20))


def by_name(base, other):
    return {one.name: one for one in compare(base, other).differences}


@pytest.mark.parametrize("make", [closed_loop, single_server])
def test_equal_clusters_with_other_seeds_differ_once_in_twenty(make):
    runs = [make(seed) for seed in range(80)]
    found = [by_name(base, other) for base, other in zip(runs[::2], runs[1::2], strict=True)]
    for name in ("output tokens/s", "TTFT mean", "TTFT p50", "TTFT p90", "E2E p50"):
        ours = [one[name] for one in found]
        changes = np.array([one.other - one.base for one in ours])
        half = np.array([(one.high - one.low) / 2 for one in ours])
        assert np.mean([one.verdict != "within noise" for one in ours]) < 0.13, name
        assert 0.7 < half.mean() / (1.96 * np.sqrt(np.mean(changes**2))) < 1.6, name


def test_a_closed_loop_that_is_slower_is_told_in_pairs_and_by_itself():
    base = closed_loop(1)
    for other in (closed_loop(1, 1.08), closed_loop(2, 1.08)):
        found = by_name(base, other)
        assert found["output tokens/s"].verdict == "lower"
        assert found["TPOT p50"].verdict == "higher"
    compared = compare(base, closed_loop(1, 1.08))
    assert (compared.same_requests, compared.same_times) == (True, False)
    assert found["TTFT mean"].verdict == "within noise"
    assert {by_name(base, closed_loop(1, 1.08))[f"TTFT {name}"].verdict for name in ("mean", "p50", "p90")} == {
        "higher"
    }


def test_an_open_loop_with_the_same_requests_is_told_apart_by_3_percent():
    found = by_name(single_server(3), single_server(3, factor=1.03))
    assert found["TTFT mean"].verdict == found["E2E p50"].verdict == "higher"
    assert by_name(single_server(3), single_server(4, factor=1.03))["TTFT mean"].verdict == "within noise"
    much_slower = by_name(single_server(3), single_server(3, factor=1.7))
    assert much_slower["TTFT p99"].verdict == "higher"
    assert much_slower["output tokens/s"].verdict == "within noise"


def test_a_run_is_equal_to_itself_and_to_one_in_another_order_of_sends(tmp_path):
    base = closed_loop(5, size=1400)
    assert {one.verdict for one in compare(base, base).differences} == {"equal"}
    rows = poisson(1500)
    late = [one | {"intended_seconds": "0.000000"} if one["index"] == 700 else one for one in rows]
    compared = compare(requests(tmp_path / "a", rows), requests(tmp_path / "b", late))
    assert (compared.same_requests, compared.same_times) == (True, False)
    assert {one.verdict for one in compared.differences if one.name.startswith("TPOT")} == {"equal"}


def test_runs_with_other_adapters_had_other_requests(tmp_path):
    rows = poisson(300)
    same = requests(tmp_path / "a", rows)
    moved = requests(
        tmp_path / "b", [one | {"adapter_id": "lora-1" if i == 5 else one["adapter_id"]} for i, one in enumerate(rows)]
    )
    assert compare(same, same).same_requests
    assert not compare(same, moved).same_requests
    renamed = requests(tmp_path / "c", [one | {"adapter_id": one["adapter_id"].replace("4", "9")} for one in rows])
    assert not compare(same, renamed).same_requests


def test_intervals_scale_with_time():
    runs = [single_server(seed) for seed in (1, 2)]
    scaled = [
        columns(*(4 * run[name] for name in ("sent_seconds", "queue_seconds")), np.full(2500, 2.0), np.full(2500, 20))
        for run in runs
    ]
    ours, theirs = by_name(*runs), by_name(*scaled)
    for name in ("TTFT mean", "TTFT p99", "E2E p50"):
        assert (theirs[name].low, theirs[name].high) == pytest.approx((4 * ours[name].low, 4 * ours[name].high))
    rate = "output tokens/s"
    assert theirs[rate].low == pytest.approx(ours[rate].low / 4)


def test_a_slower_run_is_higher(tmp_path):
    base = requests(tmp_path / "a", poisson(1500))
    slower = by_name(base, requests(tmp_path / "b", poisson(1500, ttft=0.12)))
    assert slower["TTFT p50"].verdict == "higher"
    assert slower["TTFT p50"].low < 0.02 < slower["TTFT p50"].high
    assert slower["E2E p50"].other > slower["E2E p50"].base


def test_correlated_requests_make_wider_intervals_than_independent_ones():
    """Single requests drawn anew would call this difference certain: both runs are one and the same slow wave."""
    rng = np.random.default_rng(5)
    waves = [0.1 * np.repeat(rng.lognormal(0, 0.8, 50), 40) for _ in range(2)]
    sent, decode, tokens = np.arange(2000) * 0.1, np.full(2000, 0.5), np.full(2000, 11)
    runs = [columns(sent, wave, decode, tokens) for wave in waves]
    shuffled = [columns(sent, rng.permutation(wave), decode, tokens) for wave in waves]
    width = [by_name(*pair)["TTFT mean"] for pair in (runs, shuffled)]
    assert width[0].high - width[0].low > 3 * (width[1].high - width[1].low)


def test_a_queue_that_only_grows_leaves_a_doubt_and_few_or_long_requests_no_interval(tmp_path):
    growing = [row(i, i * 0.1, ttft=0.1 + 0.01 * i) for i in range(1000)]
    faster = [row(i, i * 0.1, ttft=0.1 + 0.005 * i) for i in range(1000)]
    found = by_name(requests(tmp_path / "a", growing), requests(tmp_path / "b", faster))["TTFT p50"]
    assert (found.verdict, found.doubt) == ("drifts", "drifts")
    few = by_name(requests(tmp_path / "c", poisson(50)), requests(tmp_path / "d", poisson(50, seed=2)))["TTFT p50"]
    assert (few.verdict, few.doubt) == ("", "fewer than 100 requests")
    whole = requests(tmp_path / "e", [row(i, i * 0.01, decode=1.0 + i % 7) for i in range(1000)])
    compared = compare(whole, requests(tmp_path / "f", poisson(1000)))
    assert compared.parts is compared.served is None
    assert compared.short is not None
    assert (compared.short.which, compared.short.num_pairs) == (0, 0)
    assert {one.doubt for one in compared.differences} == {"too short"}


def saturated(seed, factor=1.0, size=3000, places=16):
    """An open loop that comes faster than its places can serve it; who is served does not depend on who waits."""
    rng = np.random.default_rng(seed)
    sent, tokens = np.cumsum(rng.exponential(0.02, size)), rng.integers(20, 80, size)
    free, first, last = [0.0] * places, np.zeros(size), np.zeros(size)
    for index in range(size):
        first[index] = max(sent[index], heapq.heappop(free))
        last[index] = first[index] + factor * 0.01 * rng.lognormal(0, 0.1) * tokens[index]
        heapq.heappush(free, last[index])
    return columns(sent, first - sent, last - first, tokens)


def test_where_only_the_queue_is_too_long_tokens_and_tpot_are_told_all_the_same():
    compared = compare(saturated(1), saturated(1, 1.05))
    found = {one.name: one for one in compared.differences}
    assert compared.parts is None
    assert compared.served is not None
    assert found["output tokens/s"].verdict == "lower"
    assert found["TPOT p50"].verdict == "higher"
    assert found["TTFT p50"].doubt == found["E2E p99"].doubt == "too short"
    assert compared.short is not None
    assert compared.short.queue_share > 0.5
    assert (compared.short.num_pairs, compared.short.num_slower + compared.short.num_faster) == (3000, 3000)
    assert compared.short.num_slower > 2900
    equal = by_name(saturated(1), saturated(2))
    assert equal["output tokens/s"].verdict == equal["TPOT p50"].verdict == "within noise"


def test_tokens_of_a_closed_loop_with_the_same_requests_are_compared_in_pairs():
    paired, unpaired = (by_name(closed_loop(1), closed_loop(seed, 1.02))["output tokens/s"] for seed in (1, 2))
    assert (paired.high - paired.low) * 4 < unpaired.high - unpaired.low
    assert paired.verdict == "lower"
