"""Requests that are too long are told in vLLM's sentences, by which gateways know them."""

import re

import pytest

from lorrery.cli.serve.values import refusals
from lorrery.router.field_names import as_vllm_tells
from lorrery.service.errors import NeverFits
from tests.router.http.conftest import StartHttp, refusal

LIMITS = {"max_req_input_len": 900, "max_req_total_len": 1200}
GATEWAYS_LOOK_FOR = "This model's maximum context length is 1200 tokens"
PROMPT_TOO_LONG = re.compile(
    r"^This model's maximum context length is 1200 tokens\. However, you requested \d+ output tokens and your prompt"
    r" contains (at least )?\d+ input tokens, for a total of (at least )?\d+ tokens\. Please reduce the length of the"
    r" input prompt or the number of requested output tokens\."
)


def told(**facts: int) -> NeverFits:
    return as_vllm_tells(NeverFits("in our words", field="prompt", **facts), 1200, "max_tokens")


def test_an_output_that_the_prompt_leaves_no_room_for_is_vllm_s_other_sentence() -> None:
    error = told(prompt_tokens=18, max_new_tokens=4000, max_req_input_len=900)
    assert str(error) == (
        f"'max_tokens' or 'max_completion_tokens' is too large: 4000. {GATEWAYS_LOOK_FOR} and your request has 18 input"
        " tokens (4000 > 1200 - 18)."
    )
    assert error.facts["field"] == "max_tokens"


@pytest.mark.parametrize(("prompt_tokens", "own"), [(1200, False), (9000, False), (950, True)])
def test_a_prompt_that_leaves_no_room_is_vllm_s_sentence(prompt_tokens: int, *, own: bool) -> None:
    error = told(prompt_tokens=prompt_tokens, max_new_tokens=7, max_req_input_len=900)
    assert PROMPT_TOO_LONG.match(str(error))
    assert f"contains {prompt_tokens} input tokens, for a total of {prompt_tokens + 7} tokens" in str(error)
    assert str(error).endswith("in our words") == own
    assert error.facts["field"] == "input_tokens"


def test_a_limit_that_is_not_the_context_s_is_told_too() -> None:
    assert str(told(prompt_tokens=10, max_new_tokens=1000)) == (
        f"'max_tokens' or 'max_completion_tokens' is too large: 1000. {GATEWAYS_LOOK_FOR} and your request has 10 input"
        " tokens. Here: in our words"
    )


async def test_openai_s_routes_tell_so_and_s_lora_s_keep_their_own(start_http: StartHttp) -> None:
    router = await start_http(scheduler=LIMITS)
    async with router.connection() as connection:
        for text in ("word " * 1000, "word " * 10_000):  # by its tokens, and by its size alone
            for path, body in (
                ("/v1/completions", {"prompt": text, "max_tokens": 5}),
                ("/v1/completions", {"prompt": ["x", text], "max_tokens": 5}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ):
                status, error = await refusal(connection, path, body)
                assert (status, error["code"], error["param"]) == (400, 400, "input_tokens")
                assert PROMPT_TOO_LONG.match(error["message"]), error
            status, error = await refusal(connection, "/generate_stream", {"inputs": text})
            assert (status, error["param"]) == (400, "inputs")
            assert GATEWAYS_LOOK_FOR not in error["message"]


async def test_a_fault_that_stands_for_it_is_told_alike(start_http: StartHttp) -> None:
    router = await start_http(faults=refusals(100, ["context_length"], 0), scheduler=LIMITS)
    async with router.connection() as connection:
        for path, body, param in (
            ("/v1/completions", {"prompt": "x"}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ):
            status, error = await refusal(connection, path, body)
            assert (status, error["param"]) == (400, param)
            assert error["message"].startswith(f"{GATEWAYS_LOOK_FOR}. However, this is an injected fault: refuse")
