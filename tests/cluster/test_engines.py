"""The router as an engine: vLLM's and SGLang's gRPC, as gateways call it, in real processes."""

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from lorrery.tokenizer.file import SHIPPED, open_tokenizer
from lorrery.vllm import control_pb2, inference_pb2
from tests.cluster.client import PROMPT_TOKEN_ID, TIMEOUT_SECONDS, Ask, error_info, text_of
from tests.cluster.engines import PORTS, ROOT, TENANT, Engines, expected, native, running_engines, sglang, smg
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import wait_until
from tests.router.adapter_folder import write_adapter

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """One cluster for all."""
    async with running_engines(tmp_path_factory.mktemp("cluster")) as engines:
        yield engines


MAX_TOTAL = 4096


# --- vLLM's own ------------------------------------------------------------------------------------------------------


async def test_a_native_stream_has_each_token_once_and_says_how_it_ends(engines: Engines) -> None:
    ask = Ask(seed=1, max_new_tokens=12)
    messages = await engines.messages(engines.inference.GenerateStream, native(ask))
    token_ids = [token for message in messages for token in message.outputs.token_ids]
    assert token_ids == expected(engines, ask)
    assert "".join(message.outputs.text for message in messages) == text_of(token_ids)
    assert sum(message.outputs.num_tokens for message in messages) == 12
    assert [message.HasField("prompt_info") for message in messages] == [True, *[False] * (len(messages) - 1)]
    assert messages[0].prompt_info.num_prompt_tokens == 8
    assert [message.outputs.HasField("finish_info") for message in messages].index(True) == len(messages) - 1
    info = messages[-1].outputs.finish_info
    assert (info.num_output_tokens, info.finish_reason) == (12, inference_pb2.FinishInfo.LENGTH)


async def test_a_native_answer_in_one_piece_is_the_same(engines: Engines) -> None:
    ask = Ask(seed=2, max_new_tokens=6)
    request = native(ask)
    request.response.prompt_token_ids = request.response.output_logprobs = True
    request.response.output_candidates.top_n = 2
    answer = await engines.answer(engines.inference.Generate, request)
    assert list(answer.outputs.token_ids) == expected(engines, ask)
    assert answer.outputs.text == text_of(expected(engines, ask))
    assert list(answer.prompt_info.token_ids) == [PROMPT_TOKEN_ID] * 8
    assert len(answer.outputs.logprobs) == 6
    assert [len(one.tokens) for one in answer.outputs.candidate_tokens] == [2] * 6


async def test_a_native_text_is_tokenised_here(engines: Engines) -> None:
    request = native(Ask(seed=3, max_new_tokens=2))
    request.text = "hello world"
    answer = await engines.answer(engines.inference.Generate, request)
    tokenizer = open_tokenizer(None)
    assert answer.prompt_info.num_prompt_tokens == len(tokenizer.encode_prompt("hello world"))


async def test_several_outputs_of_a_native_request_have_an_index(engines: Engines) -> None:
    request = native(Ask(seed=4, max_new_tokens=5))
    request.sampling.num_sequences = 3
    outputs: dict[int, list[int]] = {}
    for message in await engines.messages(engines.inference.GenerateStream, request):
        outputs.setdefault(message.outputs.index, []).extend(message.outputs.token_ids)
    assert outputs == {index: expected(engines, Ask(seed=4 + index, max_new_tokens=5)) for index in range(3)}
    refused = await engines.error(engines.inference.Generate, request)
    assert (refused.code(), error_info(refused)[1]["field"]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.num_sequences",
    )


async def test_stop_tokens_and_strings_end_an_output_and_are_named(engines: Engines) -> None:
    ask = Ask(seed=5, max_new_tokens=12)
    token_ids = expected(engines, ask)
    by_token = await engines.answer(engines.inference.Generate, native(ask, stop_token_ids=[token_ids[4]]))
    assert list(by_token.outputs.token_ids) == token_ids[:5]
    assert by_token.outputs.finish_info.stop_token_id == token_ids[4]
    stop = text_of(token_ids[3:5])
    by_text = await engines.answer(engines.inference.Generate, native(ask, stop_strings=["nothing", stop]))
    assert by_text.outputs.text == text_of(token_ids[:3])
    assert by_text.outputs.finish_info.stop_string == stop
    assert by_text.outputs.finish_info.finish_reason == inference_pb2.FinishInfo.STOP


async def test_without_a_budget_the_rest_of_the_context_or_of_the_key_is_used(engines: Engines) -> None:
    request = native(Ask(seed=6, prompt_tokens=8, max_new_tokens=0))
    answer = await engines.answer(engines.inference.Generate, request, TENANT)
    assert answer.outputs.finish_info.num_output_tokens == 30


async def test_an_adapter_is_loaded_from_its_folder_asked_and_unloaded(engines: Engines, tmp_path: Path) -> None:
    write_adapter(tmp_path)
    load = control_pb2.LoadLoraRequest(lora_name="late", source_path=str(tmp_path))
    loaded = (await engines.answer(engines.control.LoadLora, load)).adapter
    assert (loaded.lora_name, loaded.source_path) == ("late", str(tmp_path))
    listed = (await engines.answer(engines.control.ListLoras, control_pb2.ListLorasRequest())).adapters
    assert loaded in listed
    assert all(one.source_path for one in listed)  # or Dynamo's sidecar gives up
    assert [one.lora_name for one in listed] == ["big", "late", "lora-0", "lora-1", "lora-2", "lora-3"]
    ask = Ask(seed=7, adapter_id="late", max_new_tokens=4)
    for request in (native(ask), native(Ask(seed=7, max_new_tokens=4))):
        request.model = engines.cluster.settings.model if request.lora_name else "late"  # either way
        answer = await engines.answer(engines.inference.Generate, request)
        assert list(answer.outputs.token_ids) == expected(engines, ask)
    await engines.answer(engines.control.UnloadLora, control_pb2.UnloadLoraRequest(lora_name="late"))
    gone = await engines.error(engines.inference.Generate, native(ask))
    assert gone.code() == grpc.StatusCode.NOT_FOUND
    load.source_path = str(tmp_path / "nothing")
    unread = await engines.error(engines.control.LoadLora, load)
    assert (unread.code(), error_info(unread)[1]["field"]) == (grpc.StatusCode.NOT_FOUND, "source_path")


async def test_what_it_is(engines: Engines) -> None:
    info = await engines.answer(engines.control.GetServerInfo, control_pb2.GetServerInfoRequest())
    assert (info.api_version, info.max_model_len) == ("vllm", MAX_TOTAL)
    assert info.total_kv_blocks > 1000
    assert info.max_loras > 0  # or Dynamo's sidecar takes it that there are none
    model = await engines.answer(engines.control.GetModelInfo, control_pb2.GetModelInfoRequest())
    assert (model.served_model_name, model.supports_lora) == (engines.cluster.settings.model, True)
    assert (Path(model.model_id) / "config.json").is_file()
    sources = await engines.answer(engines.control.GetKvEventSources, control_pb2.GetKvEventSourcesRequest())
    assert not sources.sources


# --- smg's two -------------------------------------------------------------------------------------------------------


async def test_smg_gets_chunks_of_what_is_new_and_then_all_of_each_output(engines: Engines) -> None:
    ask = Ask(seed=8, max_new_tokens=7)
    messages = await engines.messages(engines.smg.Generate, smg(ask, n=2))
    chunks: dict[int, list[int]] = {0: [], 1: []}
    complete: dict[int, Any] = {}
    for message in messages:
        if message.HasField("chunk"):
            assert message.chunk.index not in complete
            chunks[message.chunk.index] += message.chunk.token_ids
            assert message.chunk.completion_tokens == len(chunks[message.chunk.index])
        else:
            complete[message.complete.index] = message.complete
    for index in range(2):
        token_ids = expected(engines, Ask(seed=8 + index, max_new_tokens=7))
        assert (chunks[index], list(complete[index].output_ids)) == (token_ids, token_ids)
        last = complete[index]
        assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 8, 7)
    (whole,) = await engines.messages(engines.smg.Generate, smg(ask, stream=False))
    assert list(whole.complete.output_ids) == expected(engines, ask)
    (stopped,) = await engines.messages(
        engines.smg.Generate, smg(ask, stream=False, stop_token_ids=[expected(engines, ask)[2]])
    )
    assert (stopped.complete.finish_reason, len(stopped.complete.output_ids)) == ("stop", 3)
    assert stopped.complete.matched_token_id == expected(engines, ask)[2]


async def test_a_port_of_one_adapter_serves_it_under_its_name(engines: Engines) -> None:
    async with grpc.aio.insecure_channel(engines.cluster.engine_addresses["engines[0]"]) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await engines.answer(stub.GetModelInfo, vllm_engine_pb2.GetModelInfoRequest())
        assert info.served_model_name == "lora-1"
        (whole,) = await engines.messages(stub.Generate, smg(Ask(seed=9, max_new_tokens=4), stream=False))
        assert list(whole.complete.output_ids) == expected(engines, Ask(seed=9, adapter_id="lora-1", max_new_tokens=4))


async def test_sglang_s_adapters_are_named_by_the_id_that_they_were_loaded_with(
    engines: Engines, tmp_path: Path
) -> None:
    write_adapter(tmp_path)
    load = sglang_scheduler_pb2.LoadLoRAAdapterRequest(lora_name="mine", lora_path=str(tmp_path), lora_id="id-1")
    assert "id-1" in (await engines.answer(engines.sglang.LoadLoRAAdapter, load)).loaded_lora_ids
    listed = await engines.answer(
        engines.sglang.ListLoadedLoRAAdapters, sglang_scheduler_pb2.ListLoadedLoRAAdaptersRequest()
    )
    assert {one.lora_id: one.lora_name for one in listed.loaded_adapters}["id-1"] == "mine"
    (whole,) = await engines.messages(
        engines.sglang.Generate, sglang(Ask(seed=0, max_new_tokens=4), stream=False, lora_id="id-1")
    )
    assert (whole.request_id, len(whole.complete.output_ids)) == ("r", 4)
    unload = sglang_scheduler_pb2.UnloadLoRAAdapterRequest(lora_name="mine", lora_id="id-1")
    assert "id-1" not in (await engines.answer(engines.sglang.UnloadLoRAAdapter, unload)).loaded_lora_ids
    gone = await engines.error(engines.sglang.Generate, sglang(Ask(seed=0), lora_id="id-1"))
    assert gone.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["smg", "sglang"])
async def test_the_tokenizer_s_files_come_in_an_archive(engines: Engines, name: str) -> None:
    chunks = await engines.messages(getattr(engines, name).GetTokenizer, common_pb2.GetTokenizerRequest())
    content = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(content).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(content)) as files:
        assert files.read("tokenizer.json") == (SHIPPED / "tokenizer.json").read_bytes()
        assert "chat_template" in json.loads(files.read("tokenizer_config.json"))


@pytest.mark.parametrize(("name", "messages"), [("smg", vllm_engine_pb2), ("sglang", sglang_scheduler_pb2)])
async def test_loads_are_the_cluster_s(engines: Engines, name: str, messages: Any) -> None:
    stub, ask = getattr(engines, name), Ask(seed=10, max_new_tokens=2000)
    call = stub.Generate(smg(ask) if name == "smg" else sglang(ask), metadata=ROOT)
    try:
        await call.read()

        async def seen() -> bool:
            answer = await engines.answer(stub.GetLoads, messages.GetLoadsRequest())
            (load,) = answer.loads
            return (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens > 0) == (1, 0, True)

        await wait_until(seen)
    finally:
        call.cancel()
    health = await engines.answer(stub.HealthCheck, messages.HealthCheckRequest(), None)
    assert health.healthy


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PORTS)
async def test_an_abort_ends_a_stream_which_says_so(engines: Engines, name: str) -> None:
    ask = Ask(seed=11, max_new_tokens=3000)
    before = await scrape(engines.cluster, "router", "lorrery_router_requests_total", outcome="aborted")
    ids: dict[str, Any] = {
        "vllm_grpc": (engines.control, control_pb2.AbortRequest(request_ids=["r"])),
        "smg_vllm_grpc": (engines.smg, vllm_engine_pb2.AbortRequest(request_ids=["r", "x"])),
        "sglang_grpc": (engines.sglang, sglang_scheduler_pb2.AbortRequest(request_id="r")),
    }
    call, request = {
        "vllm_grpc": (engines.inference.GenerateStream, native(ask)),
        "smg_vllm_grpc": (engines.smg.Generate, smg(ask)),
        "sglang_grpc": (engines.sglang.Generate, sglang(ask)),
    }[name]
    request.request_id = "r"
    stream = aiter(call(request, metadata=ROOT, timeout=TIMEOUT_SECONDS))
    await anext(stream)
    stub, abort = ids[name]
    await engines.answer(stub.Abort, abort, TENANT)  # of another key: not its request
    again = await engines.error(call, request)
    assert (again.code(), error_info(again)[0]) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_EXISTS")
    await engines.answer(stub.Abort, abort)
    *_, last = [message async for message in stream]
    if name == "vllm_grpc":
        assert last.outputs.finish_info.finish_reason == inference_pb2.FinishInfo.ABORTED
        assert 0 < last.outputs.finish_info.num_output_tokens < 3000
    else:
        assert last.complete.finish_reason == "abort"
        assert 0 < len(last.complete.output_ids) < 3000
    after = await scrape(engines.cluster, "router", "lorrery_router_requests_total", outcome="aborted")
    assert after == before + 1
    await nothing_held(engines.cluster)


async def test_a_cancelled_call_is_counted_apart_from_an_abort(engines: Engines) -> None:
    async def count(outcome: str) -> float:
        return await scrape(engines.cluster, "router", "lorrery_router_requests_total", outcome=outcome)

    aborted, cancelled = await count("aborted"), await count("cancelled")
    call = engines.smg.Generate(smg(Ask(seed=12, max_new_tokens=3000), n=2), metadata=ROOT)
    await call.read()
    call.cancel()
    await nothing_held(engines.cluster)
    assert (await count("aborted"), await count("cancelled")) == (aborted, cancelled + 2)


async def test_a_client_that_has_the_last_message_need_not_wait_for_the_status(engines: Engines) -> None:
    async def count(outcome: str) -> float:
        return await scrape(engines.cluster, "router", "lorrery_router_requests_total", outcome=outcome)

    ok, cancelled = await count("ok"), await count("cancelled")
    for seed in range(5):
        call = engines.inference.GenerateStream(native(Ask(seed=seed, max_new_tokens=3)), metadata=ROOT)
        async for message in call:
            if message.outputs.HasField("finish_info"):
                call.cancel()  # as Dynamo's sidecar does
                break
    await nothing_held(engines.cluster)
    assert (await count("ok"), await count("cancelled")) == (ok + 5, cancelled)
