"""Workloads from what other people's clusters leave behind: access logs, results of benchmarks, ranges of metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.source import BuiltWorkload, build_workload
from lorrery.service.errors import FormatError


def built(folder: Path, *entries: object, **options: Any) -> BuiltWorkload:
    path = folder / "some.file"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return build_workload(LoadOptions(workload="trace", trace=path, **options), [])


def figures(made: BuiltWorkload) -> list[tuple[float, int, int]]:
    return [(round(one.at_seconds, 6), one.prompt_tokens, one.output_tokens) for one in made.requests]


EXPECTED = [(0.0, 100, 7), (2.5, 30, 4)]


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(
            [
                {"timestamp": "2026-05-10T00:00:01.5Z", "model": "m", "prompt_tokens": 100, "completion_tokens": 7},
                {"timestamp": "2026-05-10T00:00:04Z", "model": "m", "prompt_tokens": 30, "completion_tokens": 4},
            ],
            id="flat, dates",
        ),
        pytest.param(
            [
                {"created": 1760000000, "id": "a", "usage": {"prompt_tokens": 100, "completion_tokens": 7}},
                {"created": 1760000002.5, "id": "b", "usage": {"prompt_tokens": 30, "completion_tokens": 4}},
            ],
            id="answers, seconds",
        ),
        pytest.param(
            [
                {"ts": 1760000000000, "response": {"usage": {"input_tokens": 100, "output_tokens": 7}}},
                {"ts": 1760000002500, "response": {"usage": {"input_tokens": 30, "output_tokens": 4}}},
            ],
            id="responses, milliseconds",
        ),
        pytest.param(
            [
                {
                    "startTime": 1760000000.0,
                    "endTime": 1760000009.0,
                    "status": "success",
                    "prompt_tokens": 100,
                    "completion_tokens": 7,
                    "messages": [{"role": "user", "content": "q"}],
                },
                {"startTime": 1760000001.0, "status": "failure", "prompt_tokens": 9, "completion_tokens": 0},
                {"startTime": 1760000001.0, "status_code": 429, "prompt_tokens": 9, "completion_tokens": 0},
                {"startTime": 1760000002.5, "status": "success", "prompt_tokens": 30, "completion_tokens": 4},
            ],
            id="LiteLLM, with messages and failures",
        ),
        pytest.param(
            [
                {
                    "metadata": {"request_start_ns": 5, "benchmark_phase": "warmup"},
                    "metrics": {"input_sequence_length": {"value": 1}, "output_sequence_length": {"value": 1}},
                },
                {
                    "metadata": {"request_start_ns": 10**18, "benchmark_phase": "profiling"},
                    "metrics": {
                        "input_sequence_length": {"value": 100, "unit": "tokens"},
                        "output_sequence_length": {"value": 7, "unit": "tokens"},
                    },
                    "error": None,
                },
                {"metadata": {"request_start_ns": 10**18}, "metrics": {}, "error": {"code": 500}},
                {
                    "metadata": {"request_start_ns": 10**18 + 25 * 10**8},
                    "metrics": {"input_sequence_length": 30, "output_sequence_length": 4},
                },
            ],
            id="aiperf",
        ),
        pytest.param(
            [
                {
                    "request_rate": "inf",
                    "input_lens": [100, 50, 30],
                    "output_lens": [7, 0, 4],
                    "start_times": [90.0, 91.0, 92.5],
                    "errors": ["", "refused", ""],
                    "ttfts": [0.1, 0, 0.1],
                }
            ],
            id="vllm bench",
        ),
    ],
)
def test_logs_and_results_become_requests(entries: list[object], tmp_path: Path) -> None:
    assert figures(built(tmp_path, *entries)) == EXPECTED


def test_notes_say_which_time_was_read_and_how_many_had_failed(tmp_path: Path) -> None:
    rows = [
        {"created_at": at, "start_time": at, "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "error": error}
        for at, error in (("2026-05-10 00:00:01", None), ("2026-05-10 00:00:02", "overloaded"))
    ]
    assert built(tmp_path, *rows).notes[0] == (
        "some.file: an access log; times are those of 'start_time'; left out: 1, which failed when recorded"
    )


def test_a_result_without_times_is_drawn_at_its_rate_or_comes_at_once(tmp_path: Path) -> None:
    lists = {"input_lens": [5] * 400, "output_lens": [6] * 400}
    made = built(tmp_path, lists | {"request_rate": 4.0})
    assert "gaps are drawn at its request_rate of 4" in made.notes[0]
    assert 400 / made.requests[-1].at_seconds == pytest.approx(4, rel=0.15)
    made = built(tmp_path, lists | {"request_rate": "inf"})
    assert "all requests come at once" in made.notes[0]
    assert {one.at_seconds for one in made.requests} == {0.0}
    assert len(built(tmp_path, lists, num_requests=7).requests) == 7


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}], "no known form of trace"),
        (
            [{"ts": 1, "prompt_tokens": 1, "completion_tokens": 1}, {"prompt_tokens": 1, "completion_tokens": 1}],
            "line 2: no time; a request's is one of startTime",
        ),
        ([{"ts": 1, "prompt_tokens": 1}], "line 1: no field 'completion_tokens'"),
        ([{"ts": "noon", "prompt_tokens": 1, "completion_tokens": 1}], "line 1: expected ts as 2024-05-10"),
        ([{"metrics": {}, "metadata": {"request_start_ns": 1}}], "line 1: no field 'input_sequence_length'"),
        ([{"metrics": {}}], "line 1: metadata is 'None'; expected an object"),
        ([{"input_lens": [1, 2], "output_lens": [1]}], "line 1: output_lens must be a list of 2"),
        ([{"input_lens": [1], "output_lens": [1], "start_times": [-1]}], "request 0: start_times is -1"),
    ],
)
def test_what_is_missing_is_named(entries: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        built(tmp_path, *entries)


def matrix(*series: tuple[str, dict[str, str], list[float]], step: float = 60.0) -> dict[str, object]:
    result = [
        {
            "metric": {"__name__": f"vllm:{name}", "model_name": "m", **labels},
            "values": [[1760000000 + step * number, str(value)] for number, value in enumerate(values)],
        }
        for name, labels, values in series
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


FINISHED = matrix(
    ("request_success_total", {"finished_reason": "stop"}, [10, 610, 20, 20]),
    ("request_success_total", {"finished_reason": "length"}, [0, 400, 400, 2400]),
)
TOKENS = matrix(
    ("prompt_tokens_total", {}, [0, 100_000, 102_000, 302_000]),
    ("generation_tokens_total", {}, [0, 20_000, 20_400, 60_400]),
)


def buckets(name: str, bounds: dict[str, list[float]]) -> dict[str, object]:
    return matrix(*((f"{name}_bucket", {"le": bound}, values) for bound, values in bounds.items()))


def test_a_range_of_counters_gives_as_many_requests_as_finished_in_each_interval(tmp_path: Path) -> None:
    made = built(tmp_path, FINISHED, TOKENS)
    at = np.array([one.at_seconds for one in made.requests])
    assert np.histogram(at, [0, 60, 120, 180])[0].tolist() == [1000, 20, 2000]  # one counter was reset
    assert (np.diff(at) >= 0).all()
    assert {one.prompt_tokens for one in made.requests} == {100}
    assert {one.output_tokens for one in made.requests} == {20}
    assert "every request has its interval's mean" in made.notes[0]
    gaps = np.diff(at[at < 60])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.15)  # a Poisson process


def test_lengths_are_drawn_from_the_histograms_of_their_intervals_and_have_the_tokens_mean(tmp_path: Path) -> None:
    prompts = buckets(
        "request_prompt_tokens",
        {"100": [0, 1000, 1000, 1000], "200": [0, 1000, 1020, 1020], "+Inf": [0, 1000, 1020, 3020]},
    )
    made = built(tmp_path, FINISHED, TOKENS, prompts)
    lengths = np.array([one.prompt_tokens for one in made.requests], float)
    at = np.array([one.at_seconds for one in made.requests])
    assert lengths.mean() == pytest.approx(100, rel=0.01)
    first, last = lengths[at < 60], lengths[at > 120]
    assert last.min() >= first.max() - 1
    assert len(np.unique(last)) > 20
    again = built(tmp_path, FINISHED, TOKENS, prompts)
    other = built(tmp_path, FINISHED, TOKENS, prompts, seed=7)
    assert figures(again) == figures(made) != figures(other)
    assert len(built(tmp_path, FINISHED, TOKENS, prompts, num_requests=11).requests) == 11


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [TOKENS],
            "no series vllm:request_success_total is in it, .* it has vllm:generation_tokens_total, vllm:prompt",
        ),
        ([FINISHED], "neither vllm:request_prompt_tokens_bucket nor vllm:prompt_tokens_total is in it"),
        ([matrix(("request_success_total", {}, [1]))], "fewer than two samples"),
        ([matrix(("request_success_total", {}, [5, 5])), TOKENS], "no request finished within the range"),
        ([{"status": "success", "data": {"resultType": "vector", "result": []}}], "the answer is a vector; a range"),
        ([FINISHED, {"a": 1}], "line 2: expected an answer of /api/v1/query_range"),
        ([{"data": {"resultType": "matrix", "result": [{"metric": {}}]}}], "no series of a matrix: KeyError: 'values'"),
    ],
)
def test_a_range_without_what_it_takes_is_refused(entries: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        built(tmp_path, *entries)
