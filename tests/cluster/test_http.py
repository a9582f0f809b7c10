"""The HTTP edge before real clients: OpenAI's own package, and bare sockets where bytes matter."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from lorrery.local.cluster import LocalCluster
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.cluster.client import PROMPT_TOKEN_ID, TIMEOUT_SECONDS, Ask
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until
from tests.router.test_access import entry, replace

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [PROMPT_TOKEN_ID] * 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    settings = ("router.request_faults=true", "router.reader_timeout_seconds=1")
    async with running_cluster(tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield cluster
        await nothing_held(cluster)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai(cluster: LocalCluster) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of it."""
    async with AsyncOpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
    ) as client:
        yield client


def text_of(cluster: LocalCluster, ask: Ask) -> str:
    """Return the text that must come."""
    token_ids, _ = ask.expected(cluster.settings)
    detokenizer = BuiltinTokenizer().detokenizer()
    return detokenizer.push(token_ids) + detokenizer.flush()


async def exchange(cluster: LocalCluster, method: str, path: str, body: object = None, *headers: str) -> bytes:
    """Return everything that the edge sends to one request, as bytes, until it closes the connection."""
    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: lorrery", "connection: close", f"content-length: {len(content)}"]
    lines += ["content-type: application/json", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await reader.read()
    finally:
        writer.close()


def unchunked(answer: bytes) -> bytes:
    """Return the body of an answer whose length was not known."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def status_of(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


def json_of(answer: bytes) -> Any:
    """Return the body of an answer."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])


# --- OpenAI ----------------------------------------------------------------------------------------------------------


async def test_models_are_the_base_first_and_then_the_adapters(openai: AsyncOpenAI) -> None:
    models = (await openai.models.list()).data
    assert [model.id for model in models] == ["Llama-3-8B", "lora-0", "lora-1", "lora-2", "lora-3", "big"]
    extra = [model.model_extra or {} for model in models]
    assert [one["root"] for one in extra] == [model.id for model in models]
    assert [one["parent"] for one in extra] == [None, *["Llama-3-8B"] * 5]
    assert extra[0]["max_model_len"] == 4096


@pytest.mark.parametrize("model", ["Llama-3-8B", "lora-2"])
async def test_a_completion_is_what_grpc_gives(cluster: LocalCluster, openai: AsyncOpenAI, model: str) -> None:
    ask = Ask(seed=11, adapter_id="" if model == "Llama-3-8B" else model, max_new_tokens=12)
    answer = await openai.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, seed=11, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text_of(cluster, ask), "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 12, 20)


async def test_a_stream_has_a_token_a_chunk_and_its_finish_reason_on_the_last(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    stream = await openai.chat.completions.create(
        model="lora-1",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_completion_tokens=20,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    *tokens, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in tokens]
    text = text_of(cluster, Ask(seed=3, adapter_id="lora-1", max_new_tokens=20))
    assert "".join(delta.content or "" for delta in deltas) == text
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [*[None] * (len(tokens) - 1), "length"]
    assert all(chunk.usage is None for chunk in tokens)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 20
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 0


async def test_several_prompts_and_outputs_come_as_choices_in_order(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    def expected(seed: int) -> str:
        return text_of(cluster, Ask(seed=seed, max_new_tokens=6))

    prompts = [PROMPT, PROMPT[:4]]
    answer = await openai.completions.create(
        model="Llama-3-8B", prompt=prompts, n=2, seed=20, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, expected(20 + i)) for i in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)

    stream = await openai.completions.create(
        model="Llama-3-8B", prompt=prompts, n=2, seed=20, max_tokens=6, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [""] * 4
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected(20 + i) for i in range(4)]


async def test_output_ends_before_a_stop_string(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    words = text_of(cluster, Ask(seed=8, max_new_tokens=30)).split()
    answer = await openai.completions.create(
        model="Llama-3-8B", prompt=PROMPT, seed=8, max_tokens=30, stop=f" {words[9]}", extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.split() == words[: words.index(words[9])]


async def test_fields_that_are_unknown_or_null_are_passed_over(cluster: LocalCluster) -> None:
    nulls = ("stop", "seed", "temperature", "top_p", "logprobs", "n", "stream", "user", "suffix", "stream_options")
    body = dict.fromkeys(nulls) | {"prompt": PROMPT, "max_tokens": 2, "repetition_penalty": 1.0, "best_of": 1}
    assert status_of(await exchange(cluster, "POST", "/v1/completions", body)) == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("completions", {"model": "nobody", "prompt": PROMPT}, 404, "model_not_found", "model"),
        ("completions", {"model": "no body", "prompt": PROMPT}, 404, "model_not_found", "model"),
        ("completions", {"prompt": PROMPT, "max_tokens": 5000}, 400, "never_fits", None),
        ("completions", {"prompt": []}, 400, "invalid_value", "prompt"),
        ("completions", {"prompt": {"a": 1}}, 400, "invalid_value", "prompt"),
        ("chat/completions", {"messages": [{"role": 5}]}, 400, "invalid_value", "messages.0.role"),
        ("completions", {"prompt": PROMPT, "top_p": 3}, 400, "invalid_value", "top_p"),
        ("completions", {"prompt": PROMPT, "n": 1000}, 400, "invalid_value", "n"),
        ("completions", {"prompt": [PROMPT] * 100, "n": 2}, 400, "invalid_value", "n"),
        ("completions", {"prompt": [2**40]}, 400, "invalid_value", None),
        ("completions", {"prompt": PROMPT, "stop": [""]}, 400, "invalid_value", "stop[0]"),
        ("completions", {"prompt": [5, 999_999_999]}, 400, "invalid_value", "prompt[1]"),
        ("completions", b"{", 400, "invalid_value", None),
        ("completions", b'{"prompt": "\\ud800"}', 400, "invalid_value", None),
        ("load_lora_adapter", b'{"lora_name": "\\ud800", "rank": 8}', 400, "invalid_value", None),
        ("completions", b'{"prompt": "x", "model": "\\ud800"}', 400, "invalid_value", None),
        ("chat/completions", {"messages": []}, 400, "invalid_value", "messages"),
        ("load_lora_adapter", {"lora_name": "new", "rank": 0}, 400, "invalid_value", "rank"),
        ("load_lora_adapter", {"lora_name": "new"}, 400, "invalid_value", "lora_path"),
        ("load_lora_adapter", {"rank": 8}, 400, "invalid_value", "lora_name"),
        ("load_lora_adapter", {"lora_name": "new", "lora_path": "/nowhere"}, 404, "model_not_found", "lora_path"),
        ("load_lora_adapter", {"lora_name": "lora-0", "rank": 16}, 400, "adapter_exists", "lora_name"),
        ("unload_lora_adapter", {"lora_name": "nobody"}, 404, "model_not_found", "lora_name"),
        ("unload_lora_adapter", {}, 400, "invalid_value", "lora_name"),
        ("nothing", {}, 404, "not_found", None),
    ],
)
async def test_errors_before_a_stream_have_a_status_and_openai_s_shape(
    cluster: LocalCluster, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            body = body | {"stream": stream}
        answer = await exchange(cluster, "POST", f"/v1/{path}", body)
        error = json_of(answer)["error"]
        assert (status_of(answer), error["code"]) == (status, code), error
        if param is not None:
            assert error["param"] == param
        assert error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": PROMPT, "stop": ["", "a"]}, "stop[0] is empty; "),
        ("completions", {"prompt": [999_999_999]}, "prompt[0] is 999999999; the vocabulary has "),
        ("completions", {"prompt": PROMPT, "max_tokens": 5000}, " max_tokens is 5000"),
        (
            "load_lora_adapter",
            {"lora_name": "Llama-3-8B", "rank": 8},
            "lora_name is 'Llama-3-8B', the base model's name; ",
        ),
        ("unload_lora_adapter", {"lora_name": "Llama-3-8B"}, "the base model's name; give another name"),
    ],
)
async def test_errors_name_fields_as_the_client_does(
    cluster: LocalCluster, path: str, body: dict[str, Any], message: str
) -> None:
    error = json_of(await exchange(cluster, "POST", f"/v1/{path}", body))["error"]
    assert message in error["message"]
    assert "leave it empty" not in error["message"]


async def test_openai_s_client_raises_its_own_errors(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        await openai.completions.create(model="nobody", prompt="hello")
    with pytest.raises(BadRequestError, match="top_p"):
        await openai.completions.create(model="lora-0", prompt="hello", top_p=2.0)


async def test_an_error_within_a_stream_is_an_event_of_it(cluster: LocalCluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True, "ignore_eos": True}
    answer = await exchange(cluster, "POST", "/v1/completions", body, "lorrery-fault: cut,after=3")
    *_, error, done, rest = unchunked(answer).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "fault_injected"
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_adapters_come_and_go(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    body = {"lora_name": "late", "rank": 8}
    loaded = await exchange(cluster, "POST", "/v1/load_lora_adapter", body)
    assert status_of(loaded) == 200
    assert loaded.endswith(b"Success: LoRA adapter 'late' added successfully.")
    in_place = await exchange(cluster, "POST", "/v1/load_lora_adapter", {**body, "rank": 4, "load_inplace": True})
    assert status_of(in_place) == 200
    card = await openai.models.retrieve("late")
    assert (card.id, (card.model_extra or {})["parent"]) == ("late", "Llama-3-8B")
    answer = await openai.completions.create(model="late", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    unloaded = await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": "late"})
    assert status_of(unloaded) == 200
    with pytest.raises(NotFoundError):
        await openai.completions.create(model="late", prompt=PROMPT)
    with pytest.raises(NotFoundError, match="The model 'late' does not exist"):
        await openai.models.retrieve("late")


# --- S-LoRA ----------------------------------------------------------------------------------------------------------


async def test_slora_s_events_are_byte_for_byte_what_its_benchmark_reads(cluster: LocalCluster) -> None:
    body = {
        "model_dir": "huggyllama/llama-7b",
        "lora_dir": "lora-1",
        "inputs": "hello world",
        "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": 5},
    }
    events = unchunked(await exchange(cluster, "POST", "/generate_stream", body)).split(b"\n\n")
    assert events.pop() == b""
    contents = [json.loads(event.removeprefix(b"data:")) for event in events]
    assert events[0] == b"data:" + json.dumps(contents[0]).encode()
    assert list(contents[0]) == ["token", "generated_text", "finished", "details"]
    assert list(contents[0]["token"]) == ["id", "text", "logprob", "special"]
    assert [content["finished"] for content in contents] == [*[False] * (len(contents) - 1), True]

    whole = json_of(await exchange(cluster, "POST", "/generate", body))
    assert whole["count_output_tokens"] == 5
    assert list(whole) == ["generated_text", "count_output_tokens"]
    body["parameters"]["return_details"] = True
    detailed = json_of(await exchange(cluster, "POST", "/generate", body))
    assert detailed["generated_text"] == ["".join(token["text"] for token in detailed["tokens"])]
    assert {token["logprob"] for token in detailed["tokens"]} == {content["token"]["logprob"] for content in contents}
    prompt_tokens = len(BuiltinTokenizer().encode_prompt("hello world"))
    assert {token["prompt_tokens"] for token in detailed["tokens"]} == {prompt_tokens}


async def test_the_published_request_runs_as_written_once_its_adapter_is_loaded(cluster: LocalCluster) -> None:
    name = "tloen/alpaca-lora-7b-1"
    parameters = {"do_sample": False, "ignore_eos": False, "max_new_tokens": 205}
    body = {"model_dir": "huggyllama/llama-7b", "lora_dir": name, "inputs": "hello world", "parameters": parameters}
    assert status_of(await exchange(cluster, "POST", "/generate_stream", body)) == 404
    await exchange(cluster, "POST", "/v1/load_lora_adapter", {"lora_name": name, "rank": 16})
    *events, end = unchunked(await exchange(cluster, "POST", "/generate_stream", body)).split(b"\n\n")
    assert end == b""
    assert json.loads(events[-1].removeprefix(b"data:"))["finished"] is True
    await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


async def test_llm_mock_s_generate_has_the_prompt_in_its_text(cluster: LocalCluster) -> None:
    text = text_of(cluster, Ask(seed=4, max_new_tokens=5))
    body = {"prompt": "hello world", "max_tokens": 5, "seed": 4, "ignore_eos": True, "best_of": 1, "n": 1}
    body |= {"use_beam_search": False, "temperature": 1.0, "top_p": 1.0}
    whole = json_of(await exchange(cluster, "POST", "/generate", body))
    assert whole == {"text": [f"hello world{text}"]}
    *chunks, rest = unchunked(await exchange(cluster, "POST", "/generate", {**body, "stream": True})).split(b"\0")
    assert rest == b""
    texts = [json.loads(chunk)["text"][0] for chunk in chunks]
    assert texts[-1] == f"hello world{text}"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    two = json_of(await exchange(cluster, "POST", "/generate", {**body, "n": 2, "best_of": 2}))["text"]
    assert two == [f"hello world{text}", f"hello world{text_of(cluster, Ask(seed=5, max_new_tokens=5))}"]
    for wrong in ({}, {"prompt": "x", "use_beam_search": True}, {"prompt": "", "stream": True}, {"inputs": 5}):
        assert status_of(await exchange(cluster, "POST", "/generate", wrong)) == 400


# --- the edge itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_its_generations(cluster: LocalCluster, stream: bool) -> None:
    async def both_run() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_running_requests") == 2

    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + content)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await wait_until(both_run)
    writer.close()
    await nothing_held(cluster)


@pytest.mark.parametrize(("stream", "num_requests"), [(False, 1), (True, 1), (False, 3)])
async def test_a_client_that_goes_before_the_first_token_frees_its_handler(
    cluster: LocalCluster, stream: bool, num_requests: int
) -> None:
    async def is_open() -> bool:
        return await scrape(cluster, "router", "lorrery_router_open_handlers") == 1

    host, _, port = cluster.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"prompt": PROMPT, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    head += "content-type: application/json\r\nlorrery-fault: delay,seconds=1000\r\n\r\n"
    writer.write((head.encode() + content) * num_requests)  # the further ones wait behind the first
    await wait_until(is_open)
    writer.close()
    await nothing_held(cluster)


async def test_a_reader_that_stops_is_cut_and_holds_nothing(cluster: LocalCluster) -> None:
    async def cut() -> bool:
        return await scrape(cluster, "router", "lorrery_router_slow_readers_total") > before

    before = await scrape(cluster, "router", "lorrery_router_slow_readers_total")
    host, _, port = cluster.http_address.rpartition(":")
    body = {"prompt": PROMPT, "n": 64, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        await wait_until(cut, TIMEOUT_SECONDS)
        await nothing_held(cluster)


async def test_a_body_that_is_too_long_is_not_read(cluster: LocalCluster) -> None:
    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n{")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert status_of(answer) == 413


async def test_a_body_of_unknown_length_is_read_no_further_than_the_limit(cluster: LocalCluster) -> None:
    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            writer.write(chunk)
            await writer.drain()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        told = await answer
    writer.close()
    assert status_of(told) == 413
    assert json_of(told)["error"]["code"] == "body_too_long"


async def test_process_routes(cluster: LocalCluster) -> None:
    for path, methods in (("/health", "GET HEAD"), ("/healthz", "GET"), ("/ping", "GET POST"), ("/load", "GET")):
        for method in methods.split():
            assert status_of(await exchange(cluster, method, path)) == 200
    assert json_of(await exchange(cluster, "GET", "/load")) == {"server_load": 0}
    assert set(json_of(await exchange(cluster, "GET", "/version"))) == {"version"}
    assert b"lorrery_router_requests_total" in await exchange(cluster, "GET", "/metrics")
    head = await exchange(cluster, "HEAD", "/metrics")
    assert status_of(head) == 200
    assert head.endswith(b"\r\n\r\n")
    assert "/v1/chat/completions" in json_of(await exchange(cluster, "GET", "/openapi.json"))["paths"]


async def test_text_goes_through_the_tokenizer_and_back(cluster: LocalCluster) -> None:
    answer = json_of(await exchange(cluster, "POST", "/tokenize", {"prompt": "hello world"}))
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    back = json_of(await exchange(cluster, "POST", "/detokenize", {"tokens": answer["tokens"]}))
    assert back["prompt"].endswith("hello world")
    assert status_of(await exchange(cluster, "POST", "/tokenize", b'{"prompt": "\\ud800"}')) == 400


async def test_a_conversation_has_the_tokens_that_the_tokenizer_counts(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    messages = [{"role": "user", "content": "about </s> me"}]
    body = {"messages": messages, "return_token_strs": True}
    counted = json_of(await exchange(cluster, "POST", "/tokenize", body))
    tokenizer = BuiltinTokenizer()
    assert counted["tokens"] == tokenizer.encode_prompt("user: about </s> me\nassistant:")
    assert counted["token_strs"][:2] == ["<s>", "u"]
    chat = await openai.chat.completions.create(model="", messages=messages, max_tokens=1)
    assert chat.usage.prompt_tokens == counted["count"]
    shorter = json_of(await exchange(cluster, "POST", "/tokenize", {**body, "add_generation_prompt": False}))
    assert shorter["tokens"] == tokenizer.encode_prompt("user: about </s> me\n")
    bare = json_of(await exchange(cluster, "POST", "/tokenize", {"prompt": " about", "add_special_tokens": False}))
    assert bare["tokens"] == tokenizer.encode_stop(" about")
    for wrong in ({}, {"prompt": "a", "messages": messages}, {"messages": [{"role": "user", "content": "\ud800"}]}):
        assert status_of(await exchange(cluster, "POST", "/tokenize", wrong)) == 400


async def test_keys_hold_as_over_grpc(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    replace(keys, entry("secret-of-a-tenant", name="one", tenant="a", adapters=["lora-0"], requests_per_minute=1))
    shows = "authorization: Bearer secret-of-a-tenant"
    body = {"model": "lora-0", "prompt": PROMPT, "max_tokens": 2, "user": "somebody else"}
    async with running_cluster(tmp_path, f"router.keys={keys}") as cluster:
        for headers in ((), ("authorization: Bearer wrong",)):
            answer = await exchange(cluster, "POST", "/v1/completions", body, *headers)
            assert status_of(answer) == 401
            assert json_of(answer)["error"]["type"] == "authentication_error"
            assert b"www-authenticate: Bearer" in answer
        unread = await exchange(cluster, "POST", "/v1/completions", b"{", "content-type: text/plain")
        assert status_of(unread) == 401
        assert await scrape(cluster, "router", "lorrery_router_requests_total", outcome="unauthenticated") == 3
        denied = await exchange(cluster, "POST", "/v1/completions", body | {"model": "lora-1"}, shows)
        assert (status_of(denied), json_of(denied)["error"]["code"]) == (403, "permission_denied")
        models = json_of(await exchange(cluster, "GET", "/v1/models", None, shows))["data"]
        assert [model["id"] for model in models] == ["Llama-3-8B", "lora-0"]
        assert status_of(await exchange(cluster, "POST", "/v1/completions", body, shows)) == 200
        refused = await exchange(cluster, "POST", "/v1/completions", body, shows)
        assert (status_of(refused), json_of(refused)["error"]["code"]) == (429, "quota_exceeded")
        assert b"retry-after: " in refused


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("max_tokens", -1, "-1"),
        ("max_tokens", -(10**4_000), f"-1{'0' * 98}..."),
        ("n", "x" * 200, f"'{'x' * 100}'..."),
        ("echo", [1] * 500, "an array of 500"),
        ("n", True, "true"),
    ],
)
async def test_an_error_says_what_stood_in_the_field(cluster: LocalCluster, field: str, value: Any, shown: str) -> None:
    answer = await exchange(cluster, "POST", "/v1/completions", {"prompt": PROMPT, field: value})
    assert json_of(answer)["error"]["message"].endswith(f", got {shown}")
