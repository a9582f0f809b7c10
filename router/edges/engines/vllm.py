"""vLLM's own gRPC, as NVIDIA Dynamo's sidecar speaks it: `vllm.Inference` generates, `vllm.Control` operates."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc.aio

from lorrery.router.edges.engines.engine import Engine, not_offered
from lorrery.router.edges.engines.generation import Output, matched_stop
from lorrery.router.edges.engines.reading import VLLM, VLLM_LORA, VLLM_MODEL, generate_request, read_constraint, refuse
from lorrery.router.field_names import Names, named
from lorrery.service.errors import InvalidRequest
from lorrery.service.installed import VERSION
from lorrery.service.network import status
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vllm import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from lorrery.vocabulary.endings import FinishReason

CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
API_VERSION = "vllm"
"""The only version that Dynamo's sidecar accepts."""
KV_EVENT_SCHEMA = 1
"""vLLM's schema number for the messages of docs/gateways.md."""
NO_FOLDER = "lorrery:"
"""Prefix of the made-up path of an adapter that was not loaded here: the sidecar ignores adapters without a path."""
_NO_WEIGHTS = "the model is a mock without weights"
_NO_PAUSE = "a cluster does not pause; drain the router with SIGTERM"


class Control(control_pb2_grpc.ControlServicer):
    """The service `vllm.Control`.

    Args:
        engine: performs the operations.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- description ---

    async def GetServerInfo(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.GetServerInfoRequest, context: status.Context
    ) -> control_pb2.ServerInfo:
        """Describe the engine and its limits."""
        engine, scheduler = self._engine, self._engine.settings.scheduler
        adapters = engine.settings.adapters
        workers, _ = await engine.workers(context)
        tensor_parallel = workers[0].tensor_parallel if workers else engine.settings.worker.tensor_parallel
        return control_pb2.ServerInfo(
            engine_version=VERSION,
            api_version=API_VERSION,
            instance_id=engine.instance_id,
            parallelism=control_pb2.ParallelismInfo(
                tensor_parallel_size=tensor_parallel,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                decode_context_parallel_size=1,
                world_size=tensor_parallel,
                data_parallel_size_local=1,
            ),
            max_model_len=engine.max_model_len,
            kv_block_size=scheduler.block_size,
            total_kv_blocks=sum(worker.max_total_token_num // scheduler.block_size for worker in workers),
            max_running_requests=engine.max_running(len(workers)),
            max_batched_tokens=scheduler.max_num_batched_tokens or scheduler.batch_max_tokens or 0,
            max_loras=(adapters.max_loras or adapters.max_loaded_adapters) if engine.supports_lora else 0,
            rl_capabilities=control_pb2.RlCapabilities(),
            effective_attention_block_size=scheduler.block_size,
        )

    async def GetModelInfo(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.GetModelInfoRequest, context: status.Context
    ) -> control_pb2.ModelInfo:
        """Describe the model."""
        engine = self._engine
        engine.caller(context)
        return control_pb2.ModelInfo(
            model_id=engine.folder,
            served_model_name=engine.served_name,
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora=engine.supports_lora,
        )

    # --- requests ---

    async def Abort(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.AbortRequest, context: status.Context
    ) -> control_pb2.AbortResponse:
        """Abort requests; ids that are not open are ignored."""
        self._engine.abort(context, *request.request_ids)
        return control_pb2.AbortResponse()

    # --- adapters ---

    async def LoadLora(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.LoadLoraRequest, context: status.Context
    ) -> control_pb2.LoadLoraResponse:
        """Register an adapter at every shard."""
        with named(VLLM_LORA):
            await self._engine.load_lora(context, request.lora_name, request.source_path)
        numbers = await self._engine.list_loras(context)
        return control_pb2.LoadLoraResponse(adapter=self._adapter(request.lora_name, numbers))

    async def UnloadLora(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.UnloadLoraRequest, context: status.Context
    ) -> control_pb2.UnloadLoraResponse:
        """Unregister an adapter at every shard, for new requests."""
        adapter = self._adapter(request.lora_name, await self._engine.list_loras(context))
        with named(VLLM_LORA):
            await self._engine.unload_lora(context, request.lora_name)
        return control_pb2.UnloadLoraResponse(adapter=adapter)

    async def ListLoras(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.ListLorasRequest, context: status.Context
    ) -> control_pb2.ListLorasResponse:
        """List the adapters that requests may use."""
        numbers = await self._engine.list_loras(context)
        return control_pb2.ListLorasResponse(adapters=[self._adapter(name, numbers) for name in numbers])

    def _adapter(self, name: str, numbers: Mapping[str, int]) -> control_pb2.LoraAdapter:
        source_path = self._engine.handler.adapter_path(name) or f"{NO_FOLDER}{name}"
        return control_pb2.LoraAdapter(lora_id=numbers.get(name, 0), lora_name=name, source_path=source_path)

    # --- KV events ---

    async def GetKvEventSources(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.GetKvEventSourcesRequest, context: status.Context
    ) -> control_pb2.GetKvEventSourcesResponse:
        """List the addresses at which workers publish KV events."""
        sources = await self._engine.kv_event_sources(context)
        return control_pb2.GetKvEventSourcesResponse(
            sources=[
                control_pb2.KvEventSource(
                    transport="zmq",
                    endpoint=source.endpoint,
                    topic=source.topic,
                    replay_endpoint=source.replay_endpoint,
                    data_parallel_rank=0,
                    encoding="msgpack",
                    schema_version=KV_EVENT_SCHEMA,
                    buffer_steps=source.buffer_steps,
                    hwm=source.hwm,
                )
                for source in sources
            ]
        )

    # --- what has no meaning here ---

    async def IsPaused(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.IsPausedRequest, context: status.Context
    ) -> control_pb2.IsPausedResponse:
        """Return false: it cannot be paused."""
        return control_pb2.IsPausedResponse()

    async def IsSleeping(  # noqa: N802  gRPC's name for it
        self, request: control_pb2.IsSleepingRequest, context: status.Context
    ) -> control_pb2.IsSleepingResponse:
        """Return false: it never sleeps."""
        return control_pb2.IsSleepingResponse()

    Shutdown: Any = not_offered("Shutdown", "a cluster is stopped by who started it")
    PauseGeneration: Any = not_offered("PauseGeneration", _NO_PAUSE)
    ResumeGeneration: Any = not_offered("ResumeGeneration", _NO_PAUSE)
    Sleep: Any = not_offered("Sleep", _NO_PAUSE)
    WakeUp: Any = not_offered("WakeUp", _NO_PAUSE)
    InitWeightTransferEngine: Any = not_offered("InitWeightTransferEngine", _NO_WEIGHTS)
    StartWeightUpdate: Any = not_offered("StartWeightUpdate", _NO_WEIGHTS)
    StartDraftWeightUpdate: Any = not_offered("StartDraftWeightUpdate", _NO_WEIGHTS)
    UpdateWeights: Any = not_offered("UpdateWeights", _NO_WEIGHTS)
    FinishWeightUpdate: Any = not_offered("FinishWeightUpdate", _NO_WEIGHTS)
    UpdateWeightVersion: Any = not_offered("UpdateWeightVersion", _NO_WEIGHTS)
    GetWeightVersion: Any = not_offered("GetWeightVersion", _NO_WEIGHTS)


NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_REASONS = {
    FinishReason.LENGTH: inference_pb2.FinishInfo.LENGTH,
    FinishReason.ABORTED: inference_pb2.FinishInfo.ABORTED,
}


class Inference(inference_pb2_grpc.InferenceServicer):
    """The service `vllm.Inference`.

    Args:
        engine: answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GenerateStream(  # type: ignore[override]  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: inference_pb2.GenerateRequest, context: status.Context
    ) -> None:
        """Stream the outputs of one request."""
        message = await _read(self._engine, request, context)
        shape = _Shape(self._engine, request, message)

        async def write(output: Output, news: router_pb2.GenerateResponse) -> None:
            await context.write(shape.message(output, news))

        n = request.sampling.num_sequences
        await self._engine.generate(context, f"{NAME}/GenerateStream", message, n, write, _names(request))

    async def Generate(  # noqa: N802  gRPC's name for it
        self, request: inference_pb2.GenerateRequest, context: status.Context
    ) -> inference_pb2.GenerateResponse:
        """Return the output of one request."""
        if (n := request.sampling.num_sequences) > 1:
            text = f"sampling.num_sequences is {n}; an answer has one output; call GenerateStream"
            raise InvalidRequest(text, field="sampling.num_sequences", value=n, limit=1)
        message = await _read(self._engine, request, context)
        shape = _Shape(self._engine, request, message)
        ended: list[Output] = []

        async def write(output: Output, news: router_pb2.GenerateResponse) -> None:
            if output.reason is not None:
                ended.append(output)

        await self._engine.generate(context, f"{NAME}/Generate", message, 1, write, _names(request))
        (output,) = ended
        return shape.message(output, output.whole())


def _names(request: inference_pb2.GenerateRequest) -> Names:
    return VLLM if request.lora_name else VLLM_MODEL


async def _read(
    engine: Engine, request: inference_pb2.GenerateRequest, context: status.Context
) -> router_pb2.GenerateRequest:
    decoding, stopping, response, kv = request.decoding, request.stopping, request.response, request.kv
    refuse(
        {
            "decoding.logit_bias": decoding.logit_bias,
            "decoding.allowed_token_ids": decoding.allowed_token_ids,
            "decoding.bad_words_token_ids": decoding.bad_words_token_ids,
            "response.prompt_logprobs": response.prompt_logprobs,
            "response.output_candidates": response.output_candidates.WhichOneof("select") in ("token_ids", "all"),
            "kv.kv_transfer_params": kv.HasField("kv_transfer_params"),
            "kv.ec_transfer_params": kv.HasField("ec_transfer_params"),
            "media": request.media,
        }
    )
    prompt: Iterable[int] = request.token_ids.ids
    if request.WhichOneof("prompt") == "text":
        engine.caller(context)
        prompt = await engine.handler.tokenize(request.text)
    with named(_names(request)):
        adapter_id = engine.adapter_of(request.lora_name, request.model)
    return generate_request(
        request_id=request.request_id,
        prompt=prompt,
        adapter_id=adapter_id,
        sampling=types_pb2.SamplingParams(
            top_p=request.sampling.top_p,
            top_k=min(request.sampling.top_k, 2**31 - 1),
            presence_penalty=decoding.presence_penalty,
            frequency_penalty=decoding.frequency_penalty,
            ignore_eos=stopping.ignore_eos,
            min_new_tokens=min(stopping.min_new_tokens, 2**31 - 1),
            stop_sequences=stopping.stop_strings,
            stop_token_ids=stopping.stop_token_ids,
            include_stop_sequence=stopping.include_stop_strings,
        ),
        temperature=request.temperature,
        max_tokens=stopping.max_new_tokens,
        seed=request.sampling.seed if request.sampling.HasField("seed") else None,
        top_logprobs=response.output_candidates.top_n if response.output_logprobs else None,
        truncate=request.truncate_prompt_tokens,
        priority=request.priority,
        cache_salt=kv.cache_salt,
        constraint=read_constraint(decoding, "structured_output", "decoding"),
        skips_prefix_cache=kv.bypass_prefix_cache,
    )


class _Shape:
    """Makes the messages of one request.

    Args:
        engine: whose it is.
        request: as it was asked.
        message: as it is served.
    """

    def __init__(
        self, engine: Engine, request: inference_pb2.GenerateRequest, message: router_pb2.GenerateRequest
    ) -> None:
        self._tokenizer = engine.handler.tokenizer
        self._options = request.response
        self._shows_text = not request.response.HasField("output_text") or request.response.output_text
        self._message = message
        self._begun = False

    def message(self, output: Output, news: router_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Return the message for what is new of an output."""
        response = inference_pb2.GenerateResponse(
            outputs=inference_pb2.SequenceOutput(
                index=output.index,
                text=news.text if self._shows_text else "",
                num_tokens=len(news.token_ids),
                token_ids=news.token_ids if self._options.output_token_ids else (),
            )
        )
        if self._options.output_logprobs:
            self._add_logprobs(response.outputs, news)
        if not self._begun:
            self._begun = True
            prompt = self._message.token_ids.ids
            response.prompt_info.num_prompt_tokens = output.prompt_tokens
            if self._options.prompt_token_ids:
                response.prompt_info.token_ids.extend(prompt[-output.prompt_tokens :])
        if output.reason is not None:
            self._finish(response.outputs.finish_info, output, output.reason)
        return response

    def _add_logprobs(self, outputs: inference_pb2.SequenceOutput, news: router_pb2.GenerateResponse) -> None:
        for one in news.logprobs:
            outputs.logprobs.append(one.logprob)
            top = list(one.top_token_ids)
            outputs.ranks.append(one.rank)
            if not top:
                continue
            tokens = outputs.candidate_tokens.add().tokens
            for rank, (candidate, logprob) in enumerate(zip(top, one.top_logprobs, strict=True), 1):
                tokens.add(id=candidate, logprob=logprob, rank=rank)

    def _finish(self, info: inference_pb2.FinishInfo, output: Output, reason: FinishReason) -> None:
        info.num_output_tokens = len(output.token_ids)
        info.num_cached_tokens = output.usage.cached_tokens
        info.finish_reason = _REASONS.get(reason, inference_pb2.FinishInfo.STOP)
        if reason is FinishReason.EOS:
            info.eos_token_id = self._tokenizer.eos_id
        stop = matched_stop(self._tokenizer, output, self._message.sampling)
        if isinstance(stop, int):
            info.stop_token_id = stop
        elif stop is not None:
            info.stop_string = stop


def register(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    """Add both services to a server; return the names."""
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(engine), server)
    control_pb2_grpc.add_ControlServicer_to_server(Control(engine), server)
    return (NAME, CONTROL)
