"""Errors of what the handler finds speak of the route's fields and calls, not of gRPC's."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.router.http.conftest import StartHttp, refusal
from tests.router.test_access import entry

COMPLETIONS, CHAT, LLM_MOCK, SLORA = "/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LONG, WORDS, MUCH = "u" * 600, "word " * 1000, "word " * 10_000
KEY = entry("secret", name="one", tenant="t", adapters=["mine-*"], base_model=False, max_new_tokens=8)
GRPC_WORDS = re.compile(r"ListAdapters|adapter_id|tenant_id|request_id|token_ids|stop_sequences|min_new_tokens")


def says(text: str = "x") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "x", "user": LONG}, "user", "user has 600 characters"),
    (CHAT, {"messages": says(), "user": LONG}, "user", "user has 600 characters"),
    (LLM_MOCK, {"prompt": "x", "user": LONG}, "user", "user has 600 characters"),
    (COMPLETIONS, {"prompt": "x", "model": "a b"}, "model", "and the adapters that GET /v1/models lists"),
    (CHAT, {"messages": says(), "model": "a b"}, "model", "and the adapters that GET /v1/models lists"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty; give text or tokens"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt is empty; give text or tokens"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]", "prompt[0] is empty; give text or tokens"),
    (LLM_MOCK, {"prompt": ""}, "prompt", "prompt is empty; give text or tokens"),
    (SLORA, {"inputs": ""}, "inputs", "inputs is empty; give a text"),
    (COMPLETIONS, {"prompt": [2**31]}, "prompt", "prompt has token 2147483648"),
    (COMPLETIONS, {"prompt": [[5], [5, 2**31]]}, "prompt", "prompt has token 2147483648"),
    (COMPLETIONS, {"prompt": [[2**31]], "n": 2, "logprobs": 1}, "prompt", "prompt has token 2147483648"),
    (COMPLETIONS, {"prompt": [[5], [5, 2**31]], "echo": True}, "prompt", "prompt has token 2147483648"),
    (COMPLETIONS, {"prompt": ["x", MUCH]}, "input_tokens", "prompt[1] has 50000 bytes"),
    (COMPLETIONS, {"prompt": ["x", WORDS]}, "input_tokens", "give a shorter prompt"),
    (COMPLETIONS, {"prompt": MUCH}, "input_tokens", "prompt has 50000 bytes"),
    (CHAT, {"messages": says(MUCH)}, "input_tokens", "messages has 500"),
    (SLORA, {"inputs": MUCH}, "inputs", "inputs has 50000 bytes"),
    (COMPLETIONS, {"prompt": WORDS}, "input_tokens", "give a shorter prompt"),
    (CHAT, {"messages": says(WORDS)}, "input_tokens", "give a shorter prompt"),
    (SLORA, {"inputs": WORDS}, "inputs", "give a shorter prompt"),
    (
        COMPLETIONS,
        {"prompt": "x", "min_tokens": 17},
        "min_tokens",
        "min_tokens is 17; it must be at most max_tokens, 16",
    ),
    (CHAT, {"messages": says(), "stop": ["x", ""]}, "stop", "stop is empty"),
    (SLORA, {"inputs": "x", "req_id": LONG}, "req_id", "req_id has 600 characters"),
    (SLORA, {"inputs": "x", "lora_dir": "a b"}, "lora_dir", "lora_dir is 'a b'"),
    (SLORA, {"inputs": "x", "parameters": {"adapter_id": "a b"}}, "parameters.adapter_id", "adapter_id is 'a b'"),
    (
        SLORA,
        {"inputs": "x", "lora_dir": "one", "parameters": {"adapter_id": "two"}},
        "parameters.adapter_id",
        "parameters.adapter_id is 'two' and lora_dir 'one'; name one adapter",
    ),
    (SLORA, {"text": "x", "sampling_params": {}}, "text", "SGLang's /generate, which is not served: POST /v1/compl"),
    (SLORA, {"input_ids": [5]}, "input_ids", "inputs is missing; input_ids is of SGLang's /generate"),
    (SLORA, {}, "inputs", "inputs is missing; give a text"),
    (
        SLORA,
        {"inputs": "x", "parameters": {"stop_sequences": ["x" * 5000]}},
        "parameters.stop_sequences",
        "has 5000 bytes",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
        "messages[0].content[1] is of type 'image_url', and the mock model reads text only",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "is missing, or no text",
    ),
    (COMPLETIONS, {"prompt": ["x"] * 5, "n": 2}, "n", "prompts times n are 5 x 2 outputs; http_max_outputs is 8"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 2}, "prompt", "9 x 2 outputs"),
    (LLM_MOCK, {"prompt": "x", "n": 9}, "n", "1 x 9 outputs"),
    (UNLOAD, {"lora_name": "a b"}, "lora_name", "lora_name is 'a b'"),
    ("/detokenize", {"tokens": [2**32]}, "tokens", "tokens has 4294967296"),
]
DENIED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "x"}, "model", "may not use the base model; GET /v1/models lists"),
    (CHAT, {"messages": says(), "model": "other"}, "model", "may not use adapter 'other'; GET /v1/models lists"),
    (COMPLETIONS, {"prompt": "x", "model": "mine-1", "max_tokens": 9}, "max_tokens", "asks for 9 tokens"),
    (SLORA, {"inputs": "x", "lora_dir": "other"}, "lora_dir", "may not use adapter 'other'; GET /v1/models lists"),
    (
        SLORA,
        {"inputs": "x", "parameters": {"adapter_id": "other"}},
        "parameters.adapter_id",
        "may not use adapter 'other'; GET /v1/models lists",
    ),
    (LOAD, {"lora_name": "other", "rank": 4}, "lora_name", "may not load or unload adapter 'other'"),
    (UNLOAD, {"lora_name": "other"}, "lora_name", "may not load or unload adapter 'other'"),
]


@pytest.mark.usefixtures("known_adapters")
async def test_a_refusal_names_fields_as_its_route_does(start_http: StartHttp) -> None:
    router = await start_http(
        scheduler={"max_req_input_len": 900, "max_req_total_len": 1200},
        router={"http_max_outputs": 8},
    )
    async with router.connection() as connection:
        for path, body, param, message in REFUSED:
            status, error = await refusal(connection, path, body)
            assert (status, error["param"]) == (404 if param == "model" else 400, param), error
            assert message in error["message"]
            assert path == SLORA or not GRPC_WORDS.search(error["message"])


@pytest.mark.usefixtures("known_adapters")
async def test_what_a_key_may_not_do_is_said_in_its_routes_words(start_http: StartHttp, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEY)
    router = await start_http(router={"keys": keys})
    async with router.connection() as connection:
        for path, body, param, message in DENIED:
            status, error = await refusal(connection, path, body, authorization="Bearer secret")
            assert (status, error["param"]) == (403, param), error
            assert message in error["message"]
