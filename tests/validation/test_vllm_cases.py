"""Random cases for vLLM's scheduler: the same by seed, and such that vLLM takes them."""

import json
from itertools import pairwise

from lorrery.validation.golden.vllm_cases import FAMILIES, MAX_ADAPTERS, MAX_REQUESTS, cases

CASES = list(cases(3, 200))


def name(case: dict) -> str:
    return case["id"].rsplit("-", 1)[1]


def prompt_and_output_tokens(case: dict) -> list[tuple[int, int]]:
    """Lengths of each request's prompt, and of its output if nothing aborts it."""
    lengths: list[tuple[int, int]] = []
    for request in case["requests"]:
        prompt = request["prompt"]
        before = sum(lengths[prompt["continues"]]) if "continues" in prompt else prompt.get("shared_tokens", 0)
        tokens = before + prompt["own_tokens"]
        limits = [request["max_tokens"], case["config"]["max_model_len"] - tokens]
        lengths.append((tokens, min([*limits, request.get("eos_at", limits[0])])))
    return lengths


def test_a_seed_draws_the_same_cases_and_another_seed_others():
    assert list(cases(3, 200)) == CASES
    assert [case["requests"] for case in cases(4, 20)] != [case["requests"] for case in CASES[:20]]


def test_more_cases_of_a_seed_begin_with_the_same_ones():
    assert list(cases(3, 7)) == CASES[:7]


def test_every_family_takes_its_turn():
    assert [name(case) for case in CASES[: len(FAMILIES)]] == list(FAMILIES)
    assert len({case["id"] for case in CASES}) == len(CASES)


def test_cases_are_plain_json():
    assert json.loads(json.dumps(CASES)) == CASES


def test_vllm_takes_the_configurations():
    for case in CASES:
        config = case["config"]
        assert config["max_num_batched_tokens"] >= config["max_num_seqs"] >= (config["max_num_active_seqs"] or 1), case
        assert config["enable_chunked_prefill"] or config["max_num_batched_tokens"] >= config["max_model_len"], case
        assert config["long_prefill_token_threshold"] <= config["max_model_len"], case
        holds_the_longest = (config["num_gpu_blocks"] - 1) * config["block_size"] >= config["max_model_len"]
        assert holds_the_longest or name(case) == "never_fits", case


def test_requests_come_in_order_and_fit_the_model():
    for case in CASES:
        requests = case["requests"]
        assert 5 <= len(requests) <= MAX_REQUESTS
        assert [request["id"] for request in requests] == list(range(len(requests)))
        assert all(one["step"] <= other["step"] for one, other in pairwise(requests))
        for request, (prompt_tokens, output_tokens) in zip(requests, prompt_and_output_tokens(case), strict=True):
            assert 1 <= prompt_tokens < case["config"]["max_model_len"], (case["id"], request)
            assert 1 <= output_tokens <= request["max_tokens"] <= case["config"]["max_model_len"], (case["id"], request)


def test_fields_of_a_request_go_with_its_configuration():
    for case in CASES:
        config = case["config"]
        for request in case["requests"]:
            where = (case["id"], request)
            assert request.get("eos_at", 1) <= request["max_tokens"], where
            assert request["prompt"].get("continues", -1) < request["id"], where
            assert "lora" not in request or (config["max_loras"] and 1 <= request["lora"] <= MAX_ADAPTERS), where
            assert ("priority" in request) == (config["policy"] == "priority"), where
            aborts = [request[point] for point in ("abort_before", "abort_during") if point in request]
            assert all(step >= request["step"] for step in aborts), where


def test_what_the_families_are_for_occurs():
    def some(found) -> bool:
        return 0 < sum(map(bool, found)) < len(CASES)

    settings = [case["config"] for case in CASES]
    assert some(not config["enable_chunked_prefill"] for config in settings)
    assert some(config["enable_prefix_caching"] for config in settings)
    assert some(config["max_loras"] for config in settings)
    assert some(config["watermark"] for config in settings)
    assert some(config["async_scheduling"] for config in settings)
    assert some(config["max_num_active_seqs"] for config in settings)
    assert some(config["long_prefill_token_threshold_adaptive"] for config in settings)
    assert some(not config["scheduler_reserve_full_isl"] for config in settings)
    for field in ("eos_at", "abort_before", "abort_during"):
        assert some(field in request for case in CASES for request in case["requests"][:1])
    for field in ("shared", "continues"):
        assert some(any(field in request["prompt"] for request in case["requests"]) for case in CASES)
