"""Sessions under the virtual clock: each turn after the answer before it, and what a prefix cache makes of them."""

import itertools

import numpy as np
import pytest

import lorrery
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.source import build_workload
from lorrery.loadgen.workload.request import sessions
from lorrery.vocabulary.units import LAST_SECONDS

SETTINGS = {
    "scheduler.policy": "fcfs",
    "scheduler.memory": "paged",
    "scheduler.batching": "mixed",
    "scheduler.max_num_batched_tokens": 10240,
    "scheduler.prefix_cache.kind": "blocks",
}
BLOCK = 16


def options(**more):
    return LoadOptions(
        **{"workload": "chat", "num_requests": 60, "rate": 2.0, "think": 1.0, "input_range": (8, 200)} | more
    )


def played(asked, **more):
    report = lorrery.simulate(None, asked, overrides=SETTINGS | more.pop("overrides", {}), workers=1, **more).report
    known = [adapter for adapter in report.outcomes.adapter_id if adapter]
    return report, build_workload(asked, sorted(set(known))).requests


def test_a_turn_is_sent_when_its_think_time_has_passed_since_the_answer():
    report, workload = played(options())
    table = report.outcomes
    assert report.summary.by_status == {"OK": 60}
    for turns in sessions(workload):
        assert table.sent_seconds[turns[0].index] == pytest.approx(turns[0].at_seconds, abs=1e-9)
        for before, request in itertools.pairwise(turns):
            gap = table.sent_seconds[request.index] - table.end_seconds[before.index]
            assert gap == pytest.approx(request.turn.think_seconds, abs=1e-9)


@pytest.mark.parametrize("shared", [None, (512, 1)])
def test_a_turn_finds_the_whole_conversation_in_the_cache(shared):
    report, workload = played(options(shared_prefix=shared, rate=0.2, num_requests=30))
    table = report.outcomes
    for number, turns in enumerate(sessions(workload)):
        first = 512 if shared and number else 0
        assert table.cached_tokens[turns[0].index] == first
        for before, request in itertools.pairwise(turns):
            # The last token of an answer is not computed before it is asked about.
            known = before.prompt_tokens + before.output_tokens - 1
            assert table.cached_tokens[request.index] == known // BLOCK * BLOCK


def test_a_closed_loop_may_be_given_all_the_time_that_a_simulation_has():
    report, _ = played(options(concurrency=2, num_requests=3, turns=(1, 3), duration=float(LAST_SECONDS)))
    assert report.summary.by_status == {"OK": 3}


def test_a_run_is_equal_however_often_it_is_decided():
    one, other = (played(options(), one_step=one_step)[0].outcomes for one_step in (False, True))
    assert np.array_equal(one.end_seconds, other.end_seconds)
    assert np.array_equal(one.cached_tokens, other.cached_tokens)


def test_a_closed_loop_has_as_many_sessions_open_as_clients():
    report, workload = played(options(concurrency=3, num_requests=40, think=0.0))
    table = report.outcomes
    spans = [(table.sent_seconds[turns[0].index], table.end_seconds[turns[-1].index]) for turns in sessions(workload)]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    assert max(np.cumsum([step for _, step in edges])) == 3
    assert len(table) == 40


def test_a_closed_loop_ends_with_its_time():
    report, _ = played(options(concurrency=3, num_requests=None, duration=20.0))
    assert report.outcomes.sent_seconds.max() < 20.0
    assert report.summary.num_requests > 20


def test_a_session_ends_with_a_turn_that_fails():
    # 0.7 s are enough for a short answer, and not for a long one.
    report, workload = played(options(timeout=0.7, output_range=(8, 120)))
    table = report.outcomes
    sent = set(table.index.tolist())
    failed = {table.index[row] for row, status in enumerate(table.status) if status != "OK"}
    assert failed
    for turns in sessions(workload):
        indices = [request.index for request in turns]
        ends = [number for number, index in enumerate(indices) if index in failed]
        assert len(ends) <= 1
        expected = indices if not ends else indices[: ends[0] + 1]
        assert [index for index in indices if index in sent] == expected
    assert f"{60 - len(table)} later turns were not sent, because a turn before them failed" in report.warnings
