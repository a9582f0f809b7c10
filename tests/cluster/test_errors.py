"""Bad input and full queues: the status, a message that names field, value and limit, and nothing left behind."""

import math
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, Client, client_of, error_info
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 512))
"""With its usual window a client takes thousands of tokens that nobody reads."""
LONG = Ask(seed=1, prompt_tokens=8, max_new_tokens=1500)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all rows of the table."""
    async with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        "scheduler.policy=fcfs",
        "scheduler.max_num_seqs=1",
        "scheduler.max_waiting_requests=2",
        "scheduler.max_total_token_num=4096",
        "router.max_pending_tokens=64",
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """The cluster, which must be empty after each test, and still serve."""
    yield shared_cluster
    await nothing_held(shared_cluster)
    async with client_of(shared_cluster) as client:
        (await client.start(Ask(seed=1, max_new_tokens=2))).check(shared_cluster.settings)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with client_of(cluster) as client:
        yield client


def _sampling(**values: Any) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(text="hello", sampling=types_pb2.SamplingParams(**values))


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
VALUE, LENGTH = (INVALID, "INVALID_VALUE"), (INVALID, "NEVER_FITS")
ADAPTER, MODEL = (MISSING, "UNKNOWN_ADAPTER"), (MISSING, "UNKNOWN_MODEL")
ROWS = {
    "presence penalty": (_sampling(presence_penalty=-0.5), VALUE, ["presence_penalty", "-0.5", ">= 0.0"]),
    "frequency penalty": (_sampling(frequency_penalty=-0.5), VALUE, ["frequency_penalty", "-0.5", ">= 0.0"]),
    "not a number": (_sampling(presence_penalty=math.nan), VALUE, ["presence_penalty", "nan", ">= 0.0"]),
    "temperature": (_sampling(do_sample=True, temperature=-1), VALUE, ["temperature", "-1.0", "> 0.0"]),
    "top_p": (_sampling(do_sample=True, top_p=1.5), VALUE, ["top_p", "1.5", "(0.0, 1.0]"]),
    "top_k": (_sampling(do_sample=True, top_k=0), VALUE, ["top_k", "got 0", "at least 1"]),
    "max_new_tokens": (_sampling(max_new_tokens=0), VALUE, ["max_new_tokens", "got 0", "at least 1"]),
    "negative max_new_tokens": (_sampling(max_new_tokens=-7), VALUE, ["max_new_tokens", "got -7", "at least 1"]),
    "empty stop string": (_sampling(stop_sequences=["x", ""]), VALUE, ["stop_sequences[1]", "empty", "leave it out"]),
    "min_new_tokens": (_sampling(min_new_tokens=-1), VALUE, ["min_new_tokens", "got -1", "at least 0"]),
    "min_new_tokens over max_new_tokens": (
        _sampling(min_new_tokens=5, max_new_tokens=4),
        VALUE,
        ["min_new_tokens is 5", "max_new_tokens is 4"],
    ),
    "stop tokens": (_sampling(stop_token_ids=[3] * 65), VALUE, ["stop_token_ids", "65", "max_stop_strings is 64"]),
    "stop token": (_sampling(stop_token_ids=[3, 2**31]), VALUE, ["stop_token_ids[1]", "2147483648"]),
    "signed penalties": (
        _sampling(frequency_penalty=-2.5, signed_penalties=True),
        VALUE,
        ["frequency_penalty", "-2.5", "[-2, 2]"],
    ),
    "top_logprobs": (router_pb2.GenerateRequest(text="x", top_logprobs=21), VALUE, ["top_logprobs is 21", "20"]),
    "truncated to nothing": (
        router_pb2.GenerateRequest(text="x", truncate_prompt_tokens=0),
        VALUE,
        ["truncate_prompt_tokens is 0", "at least 1"],
    ),
    "no prompt": (router_pb2.GenerateRequest(), VALUE, ["prompt is empty", "text", "token_ids"]),
    "empty text": (router_pb2.GenerateRequest(text=""), VALUE, ["prompt is empty"]),
    "empty token ids": (router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds()), VALUE, ["prompt is empty"]),
    "true_output_tokens": (Ask(1, true_output_tokens=0).message(), VALUE, ["true_output_tokens", "0", "at least 1"]),
    "prompt too long": (Ask(1, 2049).message(), LENGTH, ["2049", "max_req_input_len is 2048"]),
    "total too long": (
        Ask(1, 2000, 2100).message(),
        LENGTH,
        ["2000 tokens", "max_new_tokens is 2100", "max_req_total_len is 4096"],
    ),
    "over the pool": (Ask(1, 2000, 2096).message(), LENGTH, ["2000 tokens", "max_total_token_num", "4096"]),
    "over the pool with its adapter": (
        Ask(1, 2000, 1900, adapter_id="big").message(),
        LENGTH,
        ["3899", "256", "max_total_token_num is 4096"],
    ),
    "unknown adapter": (Ask(1, adapter_id="nobody").message(), ADAPTER, ["adapter_id", "'nobody'"]),
    "blank in an adapter id": (
        Ask(1, adapter_id="lora 0").message(),
        VALUE,
        ["adapter_id", "' '", "'lora-0' would do"],
    ),
    "control character in an adapter id": (Ask(1, adapter_id="lora\x000").message(), VALUE, ["'\\x00'", "'lora-0'"]),
    "adapter named as the base model": (
        Ask(1, adapter_id="Llama-3-8B").message(),
        VALUE,
        ["adapter_id is 'Llama-3-8B'", "leave it empty"],
    ),
    "unknown model": (Ask(1, model="GPT-9").message(), MODEL, ["model 'GPT-9' does not exist", "'Llama-3-8B'"]),
    "two adapters": (Ask(1, model="lora-1", adapter_id="lora-0").message(), MODEL, ["'lora-1'"]),
}


@pytest.mark.parametrize("row", ROWS)
async def test_request_that_cannot_be_served_is_refused_at_once(client: Client, row: str):
    request, (expected_code, expected_reason), words = ROWS[row]
    error = await client.error(request)
    message = error.details() or ""
    assert error.code() is expected_code, message
    assert [word for word in words if word not in message] == [], message
    reason, facts, retry = error_info(error)
    assert reason == expected_reason
    assert facts
    assert not retry


async def _refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    error = await _error(call)
    return error.code(), error.details() or ""


async def _error(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_adapters_that_cannot_be_loaded_are_refused(client: Client):
    code, message = await _refusal(client.load_adapter("huge", 65))
    assert (code, message) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "adapter 'huge' has rank 65; max_lora_rank is 64",
    )
    code, message = await _refusal(client.load_adapter("flat", 0))
    assert code is INVALID
    assert "'flat' has rank 0" in message
    code, message = await _refusal(client.load_adapter("", 8))
    assert code is INVALID
    assert "adapter_id is empty" in message
    for adapter_id in ("lora 0", "lora\n0", "Llama-3-8B"):
        code, message = await _refusal(client.load_adapter(adapter_id, 8))
        assert code is INVALID
        assert f"adapter_id is {adapter_id!r}" in message
    error = await _error(client.load_adapter("lora-0", 8))  # which the scheduler says
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'lora-0' is known with rank 16" in (error.details() or "")
    assert error_info(error) == ("ADAPTER_EXISTS", {"field": "rank", "value": "8", "known": "16"}, False)
    request = router_pb2.UnloadAdapterRequest(adapter_id="nobody")
    code, message = await _refusal(client.stub.UnloadAdapter(request, timeout=TIMEOUT_SECONDS))
    assert code is MISSING
    assert "'nobody'" in message
    assert set(await client.adapters()) == {"lora-0", "lora-1", "lora-2", "lora-3", "big"}


async def test_full_queue_refuses_and_takes_again_when_there_is_room(cluster: LocalCluster, client: Client):
    running = client.start(LONG)
    await running.at(1)
    waiting = [client.start(Ask(seed)) for seed in (2, 3)]

    async def both_wait() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests") == 2

    await wait_until(both_wait)
    error = await client.error(Ask(seed=4))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 requests wait; max_waiting_requests is 2" in (error.details() or "")
    reason, facts, retry = error_info(error)
    assert (reason, facts["limit"], retry) == ("QUEUE_FULL", "2", True)
    running.cancel()
    for stream in waiting:
        (await stream).check(cluster.settings)


async def test_reader_that_is_too_slow_is_cut_off(cluster: LocalCluster):
    async def cut() -> bool:
        return await scrape(cluster, "router", "lorrery_router_slow_readers_total") == before + 1

    before = await scrape(cluster, "router", "lorrery_router_slow_readers_total")
    async with Client(cluster.router_address, SMALL_WINDOW) as client:
        call = client.call(LONG)
        try:
            assert isinstance(await call.read(), router_pb2.GenerateResponse)
            await wait_until(cut)
            code, message = await _refusal(_read_all(call))
        finally:
            call.cancel()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_pending_tokens is 64" in message


async def _read_all(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_reader_that_never_reads_again_is_cut_off_too(cluster: LocalCluster):
    async with Client(cluster.router_address, SMALL_WINDOW) as client:
        call = client.call(LONG)
        try:
            assert isinstance(await call.read(), router_pb2.GenerateResponse)
            # The stream stays open at the client, and nothing of it is left in the cluster.
            await nothing_held(cluster)
        finally:
            call.cancel()
