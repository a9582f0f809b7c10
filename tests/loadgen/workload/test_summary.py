import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.workload.distribution import distribution
from lorrery.loadgen.workload.outcome import INTERRUPTED, OutcomeTable, RequestOutcome, token_gaps
from lorrery.loadgen.workload.slora import slora_summary
from lorrery.loadgen.workload.summary import BASE_MODEL
from lorrery.loadgen.workload.summary import summarise as summarise_table


def summarise(outcomes):
    return summarise_table(OutcomeTable.of(outcomes))


def outcome(index=0, *, intended=0.0, sent=0.0, at=(), tokens=(), status="OK", adapter=None, prompt=10):
    end = at[-1] if at else sent
    return RequestOutcome(
        index=index,
        prompt_tokens=prompt,
        intended_seconds=intended,
        sent_seconds=sent,
        end_seconds=end,
        status=status,
        adapter_id=adapter,
        message_seconds=np.array(at, np.float64),
        message_tokens=np.array(tokens, np.int64),
    )


def test_slora_figures_are_the_reference_figures(golden_cases):
    for case in golden_cases("run_exp_metrics"):
        found = slora_summary(
            [[math.nan if one is None else one for one in row] for row in case["per_request"]],
            case["benchmark_time"],
            req_rate=case["req_rate"],
            warmup_time=case["warmup_time"],
            warmup_num=case["warmup_num"],
        )
        assert dataclasses.asdict(found) == pytest.approx(case["result"], rel=1e-9, abs=1e-12), case["id"]


def test_slora_warm_up_follows_from_the_rate():
    figures = slora_summary([(1, 1, 1.0, 0.5)] * 50, 30.0, req_rate=1.55)
    assert figures.strip_throughput == pytest.approx((50 - 2 * 15) / 10)


def test_slora_figures_of_nothing_are_none():
    assert slora_summary([], 0.0, req_rate=1.0).throughput is None
    assert slora_summary([(5, 0, 1.0, math.nan)], 20.0, req_rate=1.0).avg_latency is None
    assert slora_summary([(5, 0, 1.0, math.nan)], 20.0, req_rate=1.0).strip_throughput is None


def test_each_latency_by_hand():
    summary = summarise([outcome(intended=1.0, sent=1.5, at=(2.0, 2.1, 2.5), tokens=(1, 1, 1))])
    assert summary.from_intended.ttft_ms.p50 == pytest.approx(1000)
    assert summary.from_sent.ttft_ms.p50 == pytest.approx(500)
    assert summary.from_intended.e2e_ms.p50 == pytest.approx(1500)
    assert summary.from_sent.e2e_ms.p50 == pytest.approx(1000)
    assert summary.tpot_ms.p50 == pytest.approx(250)
    assert summary.from_intended.norm_tpot_ms.p50 == pytest.approx(500)
    assert summary.itl_ms.mean == pytest.approx(250)
    assert summary.itl_ms.count == 2
    assert summary.send_delay_ms.p99 == pytest.approx(500)
    assert summary.duration_seconds == pytest.approx(1.0)
    assert summary.output_tokens_per_second == pytest.approx(3.0)
    assert summary.input_tokens_per_second == pytest.approx(10.0)


def test_one_token_has_no_tpot_and_no_gap():
    summary = summarise([outcome(at=(1.0,), tokens=(1,))])
    assert summary.tpot_ms.count == 0
    assert summary.itl_ms.count == 0
    assert summary.from_sent.ttft_ms.count == 1


def test_a_message_of_several_tokens_shares_its_gap():
    gaps = token_gaps(np.array([1.0, 2.0, 2.5]), np.array([1, 4, 1]))
    assert gaps.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5]


def test_failed_and_interrupted_requests_have_no_latency_but_are_counted():
    summary = summarise(
        [
            outcome(0, at=(1.0, 2.0), tokens=(1, 1), adapter="a"),
            outcome(1, at=(1.0,), tokens=(1,), status="UNAVAILABLE", adapter="a"),
            outcome(2, status="UNAVAILABLE", adapter="b"),
            outcome(3, status=INTERRUPTED),
        ]
    )
    assert (summary.num_requests, summary.num_completed, summary.num_failed, summary.num_interrupted) == (4, 1, 2, 1)
    assert summary.by_status == {INTERRUPTED: 1, "OK": 1, "UNAVAILABLE": 2}
    assert summary.from_sent.ttft_ms.count == 1
    assert summary.output_tokens == 2
    assert [(adapter.adapter_id, adapter.num_requests, adapter.num_failed) for adapter in summary.adapters] == [
        ("a", 2, 1),
        (BASE_MODEL, 1, 0),
        ("b", 1, 1),
    ]


def test_no_requests_give_no_figures():
    summary = summarise([])
    assert summary.num_requests == 0
    assert summary.requests_per_second == 0.0
    assert summary.adapters == ()


def test_percentiles_interpolate():
    values = distribution(np.arange(1.0, 102.0))
    assert (values.count, values.mean, values.p50, values.p90, values.p99) == (101, 51.0, 51.0, 91.0, 100.0)


requests = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.floats(0, 10),
        st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9)), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=10,
)


@given(requests)
def test_gaps_add_up_however_tokens_were_coalesced(rows):
    outcomes = []
    for index, (intended, delay, messages) in enumerate(rows):
        at = (intended + delay + np.cumsum([gap for gap, _ in messages])).tolist()
        outcomes.append(
            outcome(index, intended=intended, sent=intended + delay, at=at, tokens=[count for _, count in messages])
        )
    summary = summarise(outcomes)
    spans = sum(one.message_seconds[-1] - one.message_seconds[0] for one in outcomes)
    assert summary.itl_ms.mean * summary.itl_ms.count / 1e3 == pytest.approx(spans, abs=1e-6)
    assert summary.output_tokens == sum(one.output_tokens for one in outcomes)
    assert summary.from_intended.ttft_ms.mean >= summary.from_sent.ttft_ms.mean - 1e-6
    assert summary.from_sent.e2e_ms.p99 >= summary.from_sent.ttft_ms.p50 - 1e-6
    assert sum(adapter.num_requests for adapter in summary.adapters) == len(rows)


@given(values=st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=1, max_size=40))
def test_percentiles_interpolate_linearly(values):
    described = distribution(np.array(values, np.float64))
    assert described.count == len(values)
    assert described.mean == pytest.approx(np.mean(values))
    quantiles = np.percentile(values, (50, 90, 99))
    assert [described.p50, described.p90, described.p99] == pytest.approx(quantiles.tolist())


def test_figures_do_not_depend_on_the_number_of_threads_that_numpy_may_use():
    script = (
        "import numpy as np; from lorrery.loadgen.workload.distribution import distribution;"
        "print(distribution(np.random.default_rng(1).random(100_000)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(outputs) == 1
