"""`vllm.grpc.engine.VllmEngine`, as the gateway smg uses it. It has no adapters: see `EnginePort.adapter`."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from lorrery.router.edges.engines import smg
from lorrery.router.edges.engines.engine import Engine, not_offered
from lorrery.router.edges.engines.reading import SMG_VLLM, generate_request, read_constraint, refuse
from lorrery.router.field_names import named
from lorrery.service.installed import VERSION
from lorrery.service.network import status
from lorrery.v1 import router_pb2, types_pb2

NAME: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "vllm-grpc"


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types
    """The service `vllm.grpc.engine.VllmEngine`.

    Args:
        engine: performs the operations.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- requests ---

    async def Generate(self, request: Any, context: status.Context) -> None:
        """Stream the outputs of one request: chunks of new tokens if it streams, and each output in full at its end."""
        engine = self._engine
        with named(SMG_VLLM):
            message = await self._read(request, context)

        write = smg.writer(engine, context, message, vllm_engine_pb2, streams=request.stream)
        await engine.generate(context, f"{NAME}/Generate", message, request.sampling_params.n, write, SMG_VLLM)

    async def _read(self, request: Any, context: status.Context) -> router_pb2.GenerateRequest:
        engine, asked = self._engine, request.sampling_params
        truncate = asked.truncate_prompt_tokens
        refuse(
            {
                "sampling_params.prompt_logprobs": asked.HasField("prompt_logprobs"),
                "sampling_params.logit_bias": asked.logit_bias,
                "kv_transfer_params": request.HasField("kv_transfer_params"),
                "kv_transfer_params_json": request.kv_transfer_params_json,
                "mm_inputs": request.HasField("mm_inputs") or request.extra_mm_inputs,
                "media_refs": request.HasField("media_refs"),
            }
        )
        prompt = request.tokenized.input_ids
        if request.WhichOneof("input") == "text":
            engine.caller(context)
            prompt = await engine.handler.tokenize(request.text)
        return generate_request(
            request_id=request.request_id,
            prompt=prompt,
            adapter_id=engine.adapter_of(),
            sampling=types_pb2.SamplingParams(
                top_p=asked.top_p,
                top_k=min(asked.top_k, 2**31 - 1),
                presence_penalty=asked.presence_penalty,
                frequency_penalty=asked.frequency_penalty,
                ignore_eos=asked.ignore_eos,
                min_new_tokens=min(asked.min_tokens, 2**31 - 1),
                stop_sequences=asked.stop,
                stop_token_ids=asked.stop_token_ids,
                include_stop_sequence=asked.include_stop_str_in_output,
            ),
            temperature=asked.temperature if asked.HasField("temperature") else 1.0,
            max_tokens=asked.max_tokens,
            seed=asked.seed if asked.HasField("seed") else None,
            top_logprobs=asked.logprobs if asked.HasField("logprobs") else None,
            truncate=engine.settings.scheduler.max_req_input_len if truncate < 0 else truncate,
            constraint=read_constraint(asked, "constraint", "sampling_params"),
        )

    async def Abort(self, request: Any, context: status.Context) -> Any:
        """Abort requests; ids that are not open are ignored."""
        self._engine.abort(context, *request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    # --- description ---

    async def HealthCheck(self, request: Any, context: status.Context) -> Any:
        """Report whether the engine can serve."""
        why = self._engine.why_unhealthy()
        return vllm_engine_pb2.HealthCheckResponse(healthy=not why, message=why or "serving")

    async def GetModelInfo(self, request: Any, context: status.Context) -> Any:
        """Describe the model."""
        return vllm_engine_pb2.GetModelInfoResponse(**smg.model_info(self._engine, context))

    async def GetServerInfo(self, request: Any, context: status.Context) -> Any:
        """Describe the server."""
        engine = self._engine
        workers, _ = await engine.workers(context)
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=engine.num_open,
            uptime_seconds=engine.uptime_seconds,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=engine.settings.scheduler.block_size,
            max_num_seqs=engine.max_running(len(workers)),
        )

    async def GetLoads(self, request: Any, context: status.Context) -> Any:
        """Report the load."""
        load = vllm_engine_pb2.SchedulerLoad(**smg.load_of(await self._engine.load(context)))
        return vllm_engine_pb2.GetLoadsResponse(version=VERSION, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: status.Context) -> AsyncIterator[Any]:
        """Send the tokenizer's files."""
        async for chunk in smg.tokenizer_chunks(self._engine, context):
            yield chunk

    async def SubscribeKvEvents(self, request: Any, context: status.Context) -> None:
        """Stream the events of the prefix cache."""
        await smg.subscribe(self._engine, request, context)

    # --- calls without a meaning here ---

    Embed: Any = not_offered("Embed", smg.NO_EMBEDDINGS)
    FlushCache: Any = not_offered("FlushCache", smg.NO_FLUSH)
    StartProfile: Any = not_offered("StartProfile", smg.NO_PROFILER)
    StopProfile: Any = not_offered("StopProfile", smg.NO_PROFILER)


def register(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    """Add the service to a server; return the name."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngine(engine), server)
    return (NAME,)
