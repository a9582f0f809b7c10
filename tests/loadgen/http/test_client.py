import asyncio
import contextlib
import ssl

import pytest
from prometheus_client import CollectorRegistry

from lorrery.loadgen.driver import Driver, DriveSettings
from lorrery.loadgen.http.client import HttpClient, server_address
from lorrery.loadgen.http.routes import Chat, Completions, Slora
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.workload.prompts import prompt_token_ids
from lorrery.loadgen.workload.request import Turn, WorkloadRequest
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.settings.sections import TlsSettings
from tests.loadgen.http.fake_server import DONE, HEAD, FakeServer, chunk, error
from tests.needs import needs_openssl
from tests.service.network.test_tls import certificates

PLAIN = TlsSettings()
__all__ = ["certificates"]  # a fixture


@pytest.fixture
async def server():
    async with contextlib.AsyncExitStack() as stack:
        fake = FakeServer()
        await fake.start()
        stack.push_async_callback(fake.stop)
        yield fake


def requests(count=3, adapter=None, output=4):
    return [WorkloadRequest(index, 0.0, 5, output, adapter) for index in range(count)]


async def drive(server, workload, *, route=None, key="", model="", **settings):
    async with HttpClient(server.target, route or Completions(), PLAIN, key, model) as client:
        cluster = await client.cluster(60.0)
        driver = Driver(client, DriveSettings(**settings), cluster.time_scale, LoadMetrics(CollectorRegistry()))
        await driver.run(workload)
        return driver


async def test_every_stream_brings_what_was_asked_for(server):
    driver = await drive(server, requests())
    assert [outcome.status for outcome in driver.outcomes] == ["OK"] * 3
    first = driver.outcomes[0]
    assert first.message_tokens.tolist() == [1] * 4
    # The server's own count of the prompt, and what it had cached.
    assert (first.prompt_tokens, first.cached_tokens, first.finish_reason) == (9, 2, "length")


async def test_connections_are_used_again(server):
    await drive(server, requests(6), concurrency=1)
    assert server.num_connections == 1


async def test_a_request_carries_model_prompt_lengths_seed_and_key(server):
    workload = requests(1, adapter="lora-1")
    await drive(server, workload, key="secret", route=Completions(prompt_ids=True), seed=3)
    ((path, headers, body),) = server.requests
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-request-id"] == "load-3-0"
    assert body["prompt"] == prompt_token_ids(workload[0], 3).tolist()
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("lora-1", 4, True)
    assert body["stream_options"] == {"include_usage": True}
    assert -(2**63) <= body["seed"] < 2**63


async def test_what_only_some_servers_know_is_left_out_where_it_is_not_needed(server):
    await drive(server, requests(1), ignore_eos=False)
    ((_, _, body),) = server.requests
    assert "ignore_eos" not in body
    assert "user" not in body
    assert "priority" not in body


async def test_a_priority_is_in_the_body(server):
    await drive(server, [WorkloadRequest(0, 0.0, 5, 2, priority=-4)])
    ((_, _, body),) = server.requests
    assert body["priority"] == -4


async def test_text_has_a_word_a_token(server):
    await drive(server, requests(1))
    ((_, _, body),) = server.requests
    assert len(body["prompt"].split()) == 5


async def test_the_turns_of_a_session_carry_the_conversation(server):
    first = WorkloadRequest(0, 0.0, 5, 2, turn=Turn(7, 0, 3, shared_tokens=2))
    second = WorkloadRequest(1, 0.0, 5 + 2 + 4, 2, turn=Turn(7, 1, 4, shared_tokens=2))
    await drive(server, [first, second])
    one, two = (body["prompt"] for _, _, body in server.requests)
    assert two.startswith(one + " word word ")
    assert len(two.split()) == 11


async def test_a_chat_has_the_shared_part_as_the_systems_and_answers_as_the_assistants(server):
    async def script(_reader, writer, body):
        writer.write(HEAD)
        writer.write(chunk({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "yes"}}]}))
        writer.write(chunk({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}))
        writer.write(chunk({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}))
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        return True

    server.script = script
    turns = [WorkloadRequest(n, 0.0, 5, 1, turn=Turn(0, n, 3, shared_tokens=2)) for n in range(2)]
    driver = await drive(server, turns, route=Chat())
    assert [outcome.status for outcome in driver.outcomes] == ["OK", "OK"]
    (_, _, one), (_, _, two) = server.requests
    assert [message["role"] for message in one["messages"]] == ["system", "user"]
    assert [message["role"] for message in two["messages"]] == ["system", "user", "assistant", "user"]
    assert two["messages"][:2] == one["messages"]
    assert two["messages"][2]["content"] == "yes"
    assert one["max_completion_tokens"] == 1


async def test_a_session_ends_with_a_turn_that_fails(server):
    async def script(_reader, writer, body):
        writer.write(error(503, "not now"))
        return True

    server.script = script
    turns = [WorkloadRequest(n, 0.0, 5, 1, turn=Turn(0, n, 3)) for n in range(3)]
    driver = await drive(server, turns)
    assert [outcome.status for outcome in driver.outcomes] == ["HTTP_503"]
    assert driver.num_unsent == 2


EVENT = chunk({"choices": [{"index": 0, "text": " a", "finish_reason": None}]})

ANSWERS = {
    "refused": ([error(429, "slow down", **{"retry-after": 1})], "HTTP_429", "slow down", False),
    "redirected": ([error(307, "", location="http://a/b")], "HTTP_307", "it redirects to http://a/b;", False),
    "an error after the first token": ([HEAD, EVENT, chunk({"error": {"message": "boom"}})], "STREAM_ERROR", "boom", 1),
    "cut": ([HEAD, EVENT], "CONNECTION_LOST", "closed the connection", True),
    "never answered": ([], "CONNECTION_LOST", "closed the connection", False),
    "no HTTP": ([b"SSH-2.0-OpenSSH\r\n\r\n"], "CONNECTION_LOST", "not HTTP", False),
    "no end": ([HEAD, EVENT, b"0\r\n\r\n"], "NO_FINISH", "", True),
    "nothing in it": ([HEAD, chunk(DONE), b"0\r\n\r\n"], "WRONG_TOKEN_COUNT", "no token", False),
    "an error in a document": (
        [error(429, "boom", **{"content-type": "application/json"}).replace(b" 429 X", b" 200 OK")],
        "BAD_RESPONSE",
        "no stream of events, but: boom",
        False,
    ),
    "no stream": ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"], "NO_FINISH", "", False),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_failures_are_told_apart_and_nothing_is_sent_twice(server, name):
    pieces, status, detail, has_token = ANSWERS[name]

    async def script(_reader, writer, _body):
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        return False

    server.script = script
    driver = await drive(server, requests(1))
    (outcome,) = driver.outcomes
    assert outcome.status == status
    assert detail in outcome.detail
    assert (outcome.first_token_seconds is not None) == bool(has_token)
    assert len(server.requests) == 1


async def test_a_body_that_ends_with_its_connection_is_whole(server):
    async def script(_reader, writer, _body):
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        writer.write(b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
        await writer.drain()
        return False

    server.script = script
    driver = await drive(server, requests(2, output=1))
    assert [outcome.status for outcome in driver.outcomes] == ["OK", "OK"]
    assert driver.num_without_usage == 2


async def test_a_deadline_closes_the_connection(server):
    async def script(reader, writer, _body):
        writer.write(HEAD + EVENT)
        await reader.read()  # until the client goes
        return False

    server.script = script
    driver = await drive(server, requests(1), timeout_seconds=0.2)
    assert driver.outcomes[0].status == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(server.closed.wait(), 60)


async def test_a_server_that_is_gone_fails_each_request(server):
    async with HttpClient(server.target, Completions(), PLAIN) as client:
        await client.cluster(60.0)
        await server.stop()
        driver = Driver(client, DriveSettings(), 1.0, LoadMetrics(CollectorRegistry()))
        for connection in list(client._pool._idle):
            client._pool.discard(connection)
        await driver.run(requests(2))
    assert {outcome.status for outcome in driver.outcomes} <= {"CONNECTION_FAILED", "CONNECTION_LOST"}


async def test_models_and_adapters_are_read_from_the_list(server):
    async with HttpClient(server.target, Completions(), PLAIN) as client:
        view = await client.cluster(60.0)
        assert (view.model, view.max_req_total_len, view.workers) == ("base", 4096, None)
        assert await client.adapters(60.0) == ["lora-0", "lora-1"]


async def test_a_server_without_a_list_needs_the_models_name(server):
    server.models = None
    async with HttpClient(server.target, Completions(), PLAIN) as client:
        with pytest.raises(LorreryError, match="--model"):
            await client.cluster(60.0)
    async with HttpClient(server.target, Completions(), PLAIN, "", "m") as client:
        assert (await client.cluster(60.0)).model == "m"
    async with HttpClient(server.target, Slora(), PLAIN, needs_list=False) as client:
        assert (await client.cluster(60.0)).model == ""


@needs_openssl
async def test_over_tls_the_server_is_checked(certificates):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    async with contextlib.AsyncExitStack() as stack:
        server = FakeServer()
        await server.start(context)
        stack.push_async_callback(server.stop)
        for target in (server.target, f"https://{server.target}/v1"):
            async with HttpClient(target, Completions(), TlsSettings(ca=certificates / "ca.pem")) as client:
                assert (await client.cluster(60.0)).model == "base"
        async with HttpClient(server.target, Completions(), TlsSettings(ca=certificates / "stranger.pem")) as client:
            with pytest.raises(LorreryError, match="certificate verify failed"):
                await client.cluster(2.0)
    with pytest.raises(SettingsError, match="client_tls"):
        HttpClient("https://host:1", Completions(), TlsSettings(ca=certificates / "no.pem"))


async def test_a_wrong_key_says_where_it_comes_from(server):
    async with HttpClient(server.target, Completions(), PLAIN, "wrong") as client:
        with pytest.raises(LorreryError, match="OPENAI_API_KEY"):
            await client.cluster(60.0)


async def test_nothing_there_is_an_error_with_its_reason():
    async with HttpClient("127.0.0.1:9", Completions(), PLAIN) as client:
        with pytest.raises(LorreryError, match=r"no server at 127.0.0.1:9 within 0.3 s"):
            await client.cluster(0.3)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("host:8000", ("host", 8000, False, "")),
        ("http://host:8000/v1", ("host", 8000, False, "")),
        ("https://host/v1/", ("host", 443, True, "")),
        ("https://host/gateway/v1", ("host", 443, True, "/gateway")),
        ("[::1]:80", ("::1", 80, False, "")),
    ],
)
def test_a_server_is_named_by_its_address_or_url(target, found):
    address = server_address("--target", target, PLAIN)
    assert (address.host, address.port, address.is_tls, address.prefix) == found


@pytest.mark.parametrize("target", ["", "host", "ftp://host:1", "http://host:99999", "http://", "http://h:1?x=1"])
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(SettingsError, match="HOST:PORT or a URL"):
        server_address("--target", target, PLAIN)
