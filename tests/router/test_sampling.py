"""Sampling parameters as S-LoRA has them."""

import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router import wire
from lorrery.router.sampling import SamplingParams, normalise, read_sampling
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import types_pb2

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_params.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]

doubles = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1e-5, 9e-6, 1.0]))
params = st.builds(
    SamplingParams,
    st.booleans(),
    doubles,
    doubles,
    doubles,
    doubles,
    st.integers(-3, 100),
    st.booleans(),
    st.integers(-1, 100),
)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden_case_gives_the_same_values_or_the_same_message(case: dict) -> None:
    if case["error"] is None:
        assert read_sampling(case["input"]).effective() == case["effective"]
    else:
        with pytest.raises(InvalidRequest) as caught:
            read_sampling(case["input"])
        assert str(caught.value) == case["error"]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden_case_is_the_same_over_the_wire(case: dict) -> None:
    values = dict(case["input"])
    if isinstance(values.get("stop_sequences"), str):
        values["stop_sequences"] = [values["stop_sequences"]]
    message = types_pb2.SamplingParams.FromString(types_pb2.SamplingParams(**values).SerializeToString())
    if case["error"] is None:
        assert wire.sampling_params(message).effective() == case["effective"]
    else:
        with pytest.raises(InvalidRequest) as caught:
            wire.sampling_params(message)
        assert str(caught.value) == case["error"]


def test_an_empty_message_takes_the_defaults() -> None:
    assert wire.sampling_params(types_pb2.SamplingParams()) == SamplingParams(top_k=1)


@given(params)
def test_normalising_twice_is_normalising_once(given_params: SamplingParams) -> None:
    once = normalise(given_params)
    assert repr(normalise(once)) == repr(once)


@given(params)
def test_what_passes_is_in_range(given_params: SamplingParams) -> None:
    values = {**given_params.effective(), "stop_sequences": ["x"]}
    with contextlib.suppress(InvalidRequest):
        checked = read_sampling(values)
        assert checked.presence_penalty >= 0
        assert checked.frequency_penalty >= 0
        assert checked.temperature > 0
        assert 0 < checked.top_p <= 1
        assert checked.top_k == -1 or checked.top_k >= 1
        assert checked.max_new_tokens >= 1
        assert checked.stop_sequences == ("x",)


def test_nan_is_in_no_range() -> None:
    for name in ("presence_penalty", "frequency_penalty", "temperature", "top_p"):
        with pytest.raises(InvalidRequest, match=f"{name} must .* got nan"):
            read_sampling({"do_sample": True, name: math.nan})


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"stop_sequences\[1\] is empty; a stop string has at least 1 character"
    ) as caught:
        read_sampling({"stop_sequences": ["x", ""]})
    assert caught.value.facts == {"field": "stop_sequences[1]", "value": "", "limit": "1"}


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown sampling parameter temprature"):
        read_sampling({"temprature": 1.0})
