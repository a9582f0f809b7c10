import pytest

from lorrery.loadgen.workload.slora import adapter_name, draw, generate_requests

ARGUMENTS = {
    "num_adapters": 4,
    "alpha": 1.0,
    "req_rate": 2.0,
    "cv": 1.0,
    "duration": 30.0,
    "input_range": (8, 512),
    "output_range": (8, 64),
}


def test_draws_are_bit_equal_to_the_reference(golden_cases):
    for case in golden_cases("trace_generate_requests"):
        params = {name: tuple(value) if isinstance(value, list) else value for name, value in case["params"].items()}
        draws = draw(**params)
        assert len(draws.req_time) == case["n"]
        for name in ("adapter_index", "input_len", "output_len", "req_time"):
            assert getattr(draws, name).tolist() == case[name], (case["id"], name)


def test_adapters_are_named_in_rounds_over_the_directories():
    assert [adapter_name(index, ["a", "b"]) for index in range(5)] == ["a-0", "b-0", "a-1", "b-1", "a-2"]


def test_requests_carry_the_draws_in_send_order():
    draws = draw(**ARGUMENTS)
    workload = generate_requests(draws, adapter_dirs=["r8", "r16"])
    assert [request.at_seconds for request in workload] == draws.req_time.tolist()
    assert [request.prompt_tokens for request in workload] == draws.input_len.tolist()
    assert {request.adapter_id for request in workload} == {"r8-0", "r16-0", "r8-1", "r16-1"}
    assert [request.index for request in workload] == list(range(60))


def test_no_adapters_mean_the_base_model():
    workload = generate_requests(draw(**{**ARGUMENTS, "num_adapters": 0}))
    assert {request.adapter_id for request in workload} == {None}


def test_too_few_names_are_refused():
    with pytest.raises(ValueError, match="only 2 adapters"):
        generate_requests(draw(**ARGUMENTS), adapters=["a", "b"])
    with pytest.raises(ValueError, match="not by both"):
        generate_requests(draw(**ARGUMENTS), adapters=["a"], adapter_dirs=["a"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 0), ("cv", 0), ("req_rate", -1), ("duration", -1), ("input_range", (8, 8)), ("seed", -1)],
)
def test_values_that_numpy_would_choke_on_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        draw(**{**ARGUMENTS, name: value})
