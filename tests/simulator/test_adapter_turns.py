"""Which requests begin together when adapters outnumber their places, worked out by hand from each engine's rule.

Twelve requests come at once, each of one step with its prompt and one more. By the sources of vllm-project/vllm
(v1/core/sched/scheduler.py) and sgl-project/sglang (srt/managers/scheduler.py, `get_new_batch_prefill`).
"""

import itertools

import pytest

import lorrery

ADAPTERS = ["a", "b", "a", "c", "b", "a", "c", "d", "a", "b", "-", "d"]  # -: the base model
VLLM = {
    1: [[0, 2, 5, 8, 10], [1, 4, 9], [3, 6], [7, 11]],
    2: [[0, 1, 2, 4, 5, 8, 9, 10], [3, 6, 7, 11]],
    3: [[0, 1, 2, 3, 4, 5, 6, 8, 9, 10], [7, 11]],
}
PASSED_OVER = {  # the base model takes a place too
    1: [[0, 2, 5, 8], [1, 4, 9], [3, 6], [7, 11], [10]],
    2: [[0, 1, 2, 4, 5, 8, 9], [3, 6, 7, 11], [10]],
    3: [[0, 1, 2, 3, 4, 5, 6, 8, 9], [7, 10, 11]],
}


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize(
    ("engine", "expected"), [("vllm-0.12", VLLM), ("vllm-0.32", VLLM), ("sglang-0.5.23", PASSED_OVER)]
)
def test_requests_begin_in_the_turns_of_their_engine(engine: str, expected: dict[int, list[list[int]]], places: int):
    adapters = [None if name == "-" else name for name in ADAPTERS]
    result = lorrery.simulate(
        None,
        lorrery.Requests([0.0] * 12, [8] * 12, [2] * 12, adapters),
        workers=1,
        overrides={
            "engine": engine,
            "worker.step_time": "constant",
            "worker.api_server_count": 0,  # the engine gets all requests at once
            "adapters.max_loras": places,
            "adapters.registry": [{"id": name, "rank": 8} for name in "abcd"],
            "adapters.host_gb_per_second": 1e6,  # loads take next to no time
            "adapters.disk_gb_per_second": 1e6,
        },
    )
    first = [round(float(seconds), 3) for seconds in result.columns.arrival_seconds + result.columns.ttft_seconds]
    turns = itertools.groupby(sorted(range(12), key=lambda number: (first[number], number)), key=first.__getitem__)
    assert [list(turn) for _, turn in turns] == expected[places]
