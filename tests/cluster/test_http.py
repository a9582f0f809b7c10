"""The HTTP edge whatever the route: clients that go or stop reading, bodies, keys, the tokenizer, process routes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.cluster.client import TIMEOUT_SECONDS
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until
from tests.cluster.http_client import PROMPT, exchange, json_of, status_of, unchunked
from tests.router.test_access import entry, replace

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    async with running_cluster(
        tmp_path_factory.mktemp("cluster"), "router.request_faults=true", "router.reader_timeout_seconds=1"
    ) as cluster:
        yield cluster
        await nothing_held(cluster)


async def test_a_stream_over_http_1_0_ends_with_its_connection_and_has_no_chunks(cluster: LocalCluster) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "seed": 3, "stream": True}
    older = await exchange(cluster, "POST", "/v1/completions", asked, version="1.0")
    newer = await exchange(cluster, "POST", "/v1/completions", asked)
    head, _, body = older.partition(b"\r\n\r\n")
    assert status_of(older) == 200
    assert b"transfer-encoding" not in head
    assert body.endswith(b"data: [DONE]\n\n")
    assert _words(body) == _words(unchunked(newer))
    failed = await exchange(cluster, "POST", "/v1/completions", {**asked, "min_tokens": 50}, version="1.0")
    assert status_of(failed) == 400


def _words(events: bytes) -> str:
    told = [line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(one)["choices"][0]["text"] for one in told)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_its_generations(cluster: LocalCluster, stream: bool) -> None:
    async def both_run() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_running_requests") == 2

    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
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
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
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
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        await wait_until(cut, TIMEOUT_SECONDS)
        await nothing_held(cluster)


async def test_a_body_that_is_too_long_is_not_read(cluster: LocalCluster) -> None:
    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000000000\r\n\r\n{")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert status_of(answer) == 413


async def test_a_body_of_unknown_length_is_read_no_further_than_the_limit(cluster: LocalCluster) -> None:
    host, _, port = cluster.http_address.rpartition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))

    def send_on() -> bytes:
        """Send until the connection is reset; what has come before is still to be read, which asyncio does not do."""
        told = b""
        with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
                for _ in range(64):
                    connection.sendall(chunk)
            with contextlib.suppress(ConnectionError):
                while data := connection.recv(1 << 16):
                    told += data
        return told

    told = await asyncio.to_thread(send_on)
    assert status_of(told) == 413
    assert json_of(told)["detail"]


async def test_process_routes(cluster: LocalCluster) -> None:
    for path, methods in (("/health", "GET HEAD"), ("/healthz", "GET"), ("/ping", "GET POST"), ("/load", "GET")):
        for method in methods.split():
            assert status_of(await exchange(cluster, method, path)) == 200
    for path in ("/health", "/healthz", "/load"):
        assert status_of(await exchange(cluster, "POST", path)) == 405
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_the_tokenizer_is_that_of_a_model_which_is_to_be_had(
    cluster: LocalCluster, path: str, body: dict[str, Any]
) -> None:
    base = json_of(await exchange(cluster, "GET", "/v1/models"))["data"][0]["id"]
    answer = await exchange(cluster, "POST", path, body)
    for model in (base, "lora-0", "", None):
        assert json_of(await exchange(cluster, "POST", path, {**body, "model": model})) == json_of(answer)
    for model in ("lora-99", "a b"):
        refused = await exchange(cluster, "POST", path, {**body, "model": model})
        as_elsewhere = await exchange(cluster, "POST", "/v1/completions", {"prompt": "x", "model": model})
        assert (status_of(refused), json_of(refused)) == (404, json_of(as_elsewhere))


async def test_a_conversation_has_the_tokens_that_the_tokenizer_counts(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    messages = [{"role": "user", "content": "about </s> me"}]
    body = {"messages": messages, "return_token_strs": True}
    counted = json_of(await exchange(cluster, "POST", "/tokenize", body))
    tokenizer = BuiltinTokenizer()
    assert counted["tokens"] == tokenizer.encode_prompt("user: about </s> me\nassistant:")
    assert counted["tokens"].count(tokenizer.eos_id) == 1
    assert counted["token_strs"][:2] == ["<s>", "u"]
    text = json_of(await exchange(cluster, "POST", "/detokenize", {"tokens": counted["tokens"]}))
    assert text == {"prompt": "<s>user: about </s> me\nassistant:"}
    chat = await openai.chat.completions.create(model="", messages=messages, max_tokens=1)
    assert chat.usage.prompt_tokens == counted["count"]
    shorter = json_of(await exchange(cluster, "POST", "/tokenize", {**body, "add_generation_prompt": False}))
    assert shorter["tokens"] == tokenizer.encode_prompt("user: about </s> me\n")
    bare = json_of(await exchange(cluster, "POST", "/tokenize", {"prompt": " about", "add_special_tokens": False}))
    assert bare["tokens"] == tokenizer.encode_stop(" about")
    both = json_of(await exchange(cluster, "POST", "/tokenize", {**body, "prompt": "a"}))
    assert both["tokens"] == counted["tokens"]
    for no_messages in ([], None, "x"):
        alone = json_of(await exchange(cluster, "POST", "/tokenize", {"messages": no_messages, "prompt": "a"}))
        assert alone["tokens"] == tokenizer.encode_prompt("a")
    framed = json_of(await exchange(cluster, "POST", "/tokenize", {**body, "add_special_tokens": True}))
    assert framed["tokens"] == [1, *counted["tokens"]]
    for wrong in (
        {},
        {"prompt": None},
        {"prompt": "a", "add_special_tokens": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": messages, "chat_template": "x"},
        {"messages": messages, "chat_template_kwargs": {"chat_template": "x"}},
        {"messages": messages, "chat_template_kwargs": {"messages": []}},
    ):
        assert status_of(await exchange(cluster, "POST", "/tokenize", wrong)) == 400


async def test_a_prompt_that_continues_the_last_message(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes "}]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    expected = BuiltinTokenizer().encode_prompt("user: hi\nassistant: yes ")
    counted = json_of(await exchange(cluster, "POST", "/tokenize", {"messages": messages, **asked}))
    assert counted["tokens"] == expected
    more = {**asked, "return_token_ids": True}
    chat = await openai.chat.completions.create(model="", messages=messages, max_tokens=1, extra_body=more)
    assert chat.model_extra["prompt_token_ids"] == expected
    for path in ("/tokenize", "/v1/chat/completions"):
        for wrong in (
            {"messages": messages, "continue_final_message": True},
            {"messages": messages, **asked, "add_generation_prompt": True},
            {"messages": [{"role": "assistant", "content": None}], **asked},
        ):
            assert status_of(await exchange(cluster, "POST", path, wrong)) == 400


async def test_tokens_and_texts_longer_than_a_prompt_are_converted(cluster: LocalCluster) -> None:
    many = cluster.settings.scheduler.max_req_input_len * 2
    text = " about" * many
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        assert json_of(await exchange(cluster, "POST", "/tokenize", body))["count"] > many
    back = json_of(await exchange(cluster, "POST", "/detokenize", {"tokens": ["5", 5.0, *[5] * (many - 2)]}))
    assert back == {"prompt": text}
    assert json_of(await exchange(cluster, "POST", "/detokenize", {"tokens": [5, 2**32 - 1]})) == {"prompt": " about"}
    for wrong in ([2**32], [-1], ["x"], None):
        assert status_of(await exchange(cluster, "POST", "/detokenize", {"tokens": wrong})) == 400


async def test_keys_hold_as_over_grpc(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    one = entry("secret-of-a-tenant", name="one", tenant="a", adapters=["lora-0"], requests_per_minute=1)
    replace(keys, one + entry("secret-of-an-operator", name="ops", tenant="ops", operator=True))
    shows = "authorization: Bearer secret-of-a-tenant"
    body = {"model": "lora-0", "prompt": PROMPT, "max_tokens": 2, "user": "somebody else"}
    async with running_cluster(tmp_path, f"router.keys={keys}") as cluster:
        for headers in ((), ("authorization: Bearer wrong",)):
            answer = await exchange(cluster, "POST", "/v1/completions", body, *headers)
            assert status_of(answer) == 401
            assert json_of(answer) == {"error": "Unauthorized"}
            assert b"www-authenticate: Bearer" in answer
        unread = await exchange(cluster, "POST", "/v1/completions", b"{", "content-type: text/plain")
        assert status_of(unread) == 401
        assert await scrape(cluster, "router", "lorrery_router_requests_total", outcome="unauthenticated") == 3
        denied = await exchange(cluster, "POST", "/v1/completions", body | {"model": "lora-1"}, shows)
        assert (status_of(denied), json_of(denied)["error"]["type"]) == (403, "PermissionDeniedError")
        models = json_of(await exchange(cluster, "GET", "/v1/models", None, shows))["data"]
        assert [model["id"] for model in models] == ["Llama-3-8B", "lora-0"]
        assert status_of(await exchange(cluster, "POST", "/v1/completions", body, shows)) == 200
        refused = await exchange(cluster, "POST", "/v1/completions", body, shows)
        assert (status_of(refused), json_of(refused)["error"]["code"]) == (429, 429)
        assert b"retry-after: " in refused
        for path in ("/load", "/metrics"):  # they count every tenant's requests
            assert status_of(await exchange(cluster, "GET", path)) == 401
            denied = await exchange(cluster, "GET", path, None, shows)
            assert (status_of(denied), json_of(denied)["error"]["type"]) == (403, "PermissionDeniedError")
            ops = await exchange(cluster, "GET", path, None, "authorization: Bearer secret-of-an-operator")
            assert status_of(ops) == 200
