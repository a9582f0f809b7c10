"""What every port for gateways has: refusals, keys, health, reflection; `buf curl` calls them without a schema."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    vllm_engine_pb2,
)

from lorrery.vllm import control_pb2, inference_pb2
from tests.cluster.client import PROMPT_TOKEN_ID, TIMEOUT_SECONDS, Ask, error_info, text_of
from tests.cluster.engines import PORTS, TENANT, Engines, expected, native, running_engines, sglang, smg
from tests.router.adapter_folder import write_adapter

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """One cluster for all."""
    async with running_engines(tmp_path_factory.mktemp("cluster")) as engines:
        yield engines


BUF = Path(sys.executable).with_name("buf")
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED


async def test_refusals_have_a_status_of_their_own(engines: Engines) -> None:
    generate = engines.smg.Generate
    too_long = await engines.error(generate, smg(Ask(seed=1, prompt_tokens=2049)))
    assert (too_long.code(), error_info(too_long)[0]) == (INVALID, "NEVER_FITS")
    over = await engines.error(generate, smg(Ask(seed=1, max_new_tokens=9000)))
    assert over.code() == INVALID
    biased = await engines.error(generate, smg(Ask(seed=1), logit_bias={3: 1.0}))
    assert error_info(biased)[1]["field"] == "sampling_params.logit_bias"
    many = await engines.error(generate, smg(Ask(seed=1), n=1000))
    assert error_info(many)[1] == {"field": "sampling_params.n", "value": "1000", "limit": "128"}
    unknown = native(Ask(seed=1))
    unknown.model = "nobody"
    assert (await engines.error(engines.inference.Generate, unknown)).code() == grpc.StatusCode.NOT_FOUND
    schema = native(Ask(seed=1))
    schema.decoding.json = "{"
    assert error_info(await engines.error(engines.inference.Generate, schema))[1]["field"] == "decoding.json"
    schema.decoding.grammar = "root ::= x"
    assert error_info(await engines.error(engines.inference.Generate, schema))[1]["field"] == "decoding.grammar"


async def test_an_error_names_the_field_of_the_protocol(engines: Engines, tmp_path: Path) -> None:
    by_model, drawn, unread = native(Ask(seed=1)), native(Ask(seed=1)), native(Ask(seed=1))
    by_model.model, drawn.sampling.top_p, unread.token_ids.ids[3] = "nobody", 2.0, 2**31
    drawn.temperature = 1.0
    biased = native(Ask(seed=1))
    biased.decoding.presence_penalty = 9.0
    wrong_ids = [5, 2**31]
    folder = str(tmp_path)
    write_adapter(tmp_path)
    sglang_load, sglang_unload = engines.sglang.LoadLoRAAdapter, engines.sglang.UnloadLoRAAdapter
    new_lora = sglang_scheduler_pb2.LoadLoRAAdapterRequest
    for call, message, field in (
        (engines.inference.Generate, native(Ask(seed=1, adapter_id="nobody")), "lora_name"),
        (engines.inference.GenerateStream, native(Ask(seed=1, adapter_id="a b")), "lora_name"),
        (engines.inference.Generate, by_model, "model"),
        (engines.inference.Generate, drawn, "sampling.top_p"),
        (engines.inference.Generate, biased, "decoding.presence_penalty"),
        (engines.inference.Generate, unread, "token_ids.ids[3]"),
        (engines.inference.Generate, native(Ask(seed=1), stop_strings=["x" * 9000]), "stopping.stop_strings"),
        (engines.control.LoadLora, control_pb2.LoadLoraRequest(lora_name="a b", source_path=folder), "lora_name"),
        (engines.control.UnloadLora, control_pb2.UnloadLoraRequest(lora_name="nobody"), "lora_name"),
        (engines.smg.Generate, smg(Ask(seed=1), min_tokens=99), "sampling_params.min_tokens"),
        (engines.smg.Generate, smg(Ask(seed=1), logprobs=-1), "sampling_params.logprobs"),
        (engines.sglang.Generate, sglang(Ask(seed=1), lora_id="nobody"), "lora_id"),
        (engines.sglang.Generate, sglang(Ask(seed=1), stop_token_ids=wrong_ids), "sampling_params.stop_token_ids[1]"),
        (engines.sglang.Generate, sglang(Ask(seed=1, prompt_tokens=0)), "prompt"),
        (sglang_load, new_lora(lora_name="a b", lora_path=folder, lora_id="x"), "lora_name"),
        (sglang_load, new_lora(lora_name="x", lora_path="/nowhere", lora_id="x"), "lora_path"),
        (sglang_unload, sglang_scheduler_pb2.UnloadLoRAAdapterRequest(lora_name="nobody"), "lora_name"),
    ):
        error = await engines.error(call, message)
        assert error_info(error)[1].get("field") == field, error.details()
        assert not re.search(r"ListAdapters|adapter_id|stop_sequences|top_logprobs\b", error.details() or "")


FORMS: dict[str, Any] = {
    "json_schema": (json.dumps({"type": "object", "required": ["a"]}), lambda text: "a" in json.loads(text)),
    "regex": ("[ab]{9}", lambda text: len(text) == 9 and set(text) <= {"a", "b"}),
    "choice": (["yes", "no"], lambda text: text in ("yes", "no")),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.mark.parametrize("form", FORMS)
async def test_each_protocol_gives_an_output_its_form(engines: Engines, form: str) -> None:
    asked, fits = FORMS[form]
    choices = {"choices": asked} if form == "choice" else asked
    ask = Ask(seed=5, max_new_tokens=200)
    request = native(ask)
    own = "json" if form == "json_schema" else form
    request.decoding.MergeFrom(inference_pb2.DecodingParameters(**{own: choices}))
    assert fits((await engines.answer(engines.inference.Generate, request)).outputs.text)
    texts = [await smg_text(engines, engines.smg.Generate, smg(ask, stream=False, **{form: choices}))]
    if form in ("json_schema", "regex"):  # SGLang's two
        asked = sglang(ask, stream=False, **{form: choices})
        texts.append(await smg_text(engines, engines.sglang.Generate, asked))
    for text in texts:
        assert fits(text), text


async def smg_text(engines: Engines, call: Any, request: Any) -> str:
    """Return the text of an answer that is tokens, without its end."""
    (answer,) = await engines.messages(call, request)
    return text_of(list(answer.complete.output_ids)[:-1])


@pytest.mark.parametrize(
    ("port", "request_of", "field"),
    [
        ("smg", lambda: smg(Ask(seed=1), structural_tag="{}"), "sampling_params.structural_tag"),
        ("smg", lambda: smg(Ask(seed=1), choice={"choices": []}), "sampling_params.choice"),
        ("smg", lambda: smg(Ask(seed=1), json_schema="3"), "sampling_params.json_schema"),
        ("sglang", lambda: sglang(Ask(seed=1), ebnf_grammar="x"), "sampling_params.ebnf_grammar"),
        ("sglang", lambda: sglang(Ask(seed=1), regex="("), "sampling_params.regex"),
    ],
)
async def test_a_form_that_cannot_be_met_names_the_field(
    engines: Engines, port: str, request_of: Any, field: str
) -> None:
    error = await engines.error(getattr(engines, port).Generate, request_of())
    assert (error.code(), error_info(error)[1]["field"]) == (INVALID, field)
    assert (error.details() or "").startswith(field)


async def test_keys_hold(engines: Engines) -> None:
    request = native(Ask(seed=1, max_new_tokens=2))
    for call, message in (
        (engines.inference.Generate, request),
        (engines.control.GetModelInfo, control_pb2.GetModelInfoRequest()),
        (engines.smg.GetTokenizer, common_pb2.GetTokenizerRequest()),
    ):
        assert (await engines.error(call, message, None)).code() == grpc.StatusCode.UNAUTHENTICATED
    others = native(Ask(seed=1, adapter_id="lora-2"))
    assert (await engines.error(engines.inference.Generate, others, TENANT)).code() == DENIED
    loads = await engines.error(engines.smg.GetLoads, vllm_engine_pb2.GetLoadsRequest(), TENANT)
    assert loads.code() == DENIED
    events = await engines.error(engines.smg.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest(), TENANT)
    assert events.code() == DENIED
    load = control_pb2.LoadLoraRequest(lora_name="x", source_path="/")
    assert (await engines.error(engines.control.LoadLora, load, TENANT)).code() == DENIED


async def test_what_has_no_meaning_here_says_why(engines: Engines) -> None:
    calls = [
        (engines.control.Sleep, control_pb2.SleepRequest()),
        (engines.control.UpdateWeights, control_pb2.UpdateWeightsRequest()),
        (engines.smg.Embed, vllm_engine_pb2.EmbedRequest()),
        (engines.sglang.FlushCache, common_pb2.FlushCacheRequest()),
        (engines.sglang.StartProfile, common_pb2.StartProfileRequest()),
        (engines.smg.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest()),  # this prefix cache has no blocks
        (engines.sglang.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest()),
    ]
    for call, message in calls:
        error = await engines.error(call, message)
        assert (error.code(), error_info(error)[0]) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_OFFERED")
        assert ": " in (error.details() or "")


@pytest.mark.parametrize("name", PORTS)
async def test_each_port_has_health_and_reflection(engines: Engines, name: str) -> None:
    channel = engines.channels[name]
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = {one.name for one in (await call.read()).list_services_response.service}
    call.cancel()
    own = {
        "vllm_grpc": {"vllm.Inference", "vllm.Control"},
        "smg_vllm_grpc": {"vllm.grpc.engine.VllmEngine"},
        "sglang_grpc": {"sglang.grpc.scheduler.SglangScheduler"},
    }[name]
    assert own < services
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", *own):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


SAMPLING = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize(
    ("port", "method", "message"),
    [
        (
            "grpc",
            "lorrery.v1.RouterService/Generate",
            {"token_ids": {"ids": [PROMPT_TOKEN_ID] * 8}, "seed": "1", "sampling": SAMPLING},
        ),
        (
            "vllm_grpc",
            "vllm.Inference/GenerateStream",
            {
                "token_ids": {"ids": [PROMPT_TOKEN_ID] * 8},
                "sampling": {"seed": "1"},
                "stopping": SAMPLING,
            },
        ),
    ],
)
async def test_buf_curl_needs_no_schema(engines: Engines, port: str, method: str, message: dict[str, Any]) -> None:
    router = engines.cluster.processes["router"]
    address = router.grpc if port == "grpc" else router.others[port]
    process = await asyncio.create_subprocess_exec(
        *(str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(message)),
        *("-H", "authorization: Bearer secret-of-an-operator", f"http://{address}/{method}"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
    text = ""
    for answer in _objects(output.decode()):
        text += answer.get("outputs", answer).get("text", "")
    assert text == text_of(expected(engines, Ask(seed=1, max_new_tokens=12)))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a text, which stand behind one another."""
    decoder = json.JSONDecoder()
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:]
