"""`sglang.grpc.scheduler.SglangScheduler`, as the gateway smg speaks it.

A request names its adapter by the `lora_id` that `LoadLoRAAdapter` gave it, or by its name.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from lorrery.router.edges.engines import smg
from lorrery.router.edges.engines.engine import Engine, not_offered
from lorrery.router.edges.engines.reading import SGLANG, SGLANG_LORA, generate_request, read_constraint, refuse
from lorrery.router.field_names import named
from lorrery.service.errors import Conflict, InvalidRequest
from lorrery.service.installed import VERSION
from lorrery.service.names import quoted
from lorrery.service.network import status
from lorrery.v1 import router_pb2, types_pb2

NAME: str = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
SERVER_TYPE = "grpc"


class SglangScheduler(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]  # the package has no types
    """The service.

    Args:
        engine: answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: dict[str, str] = {}  # by lora_id

    # --- requests ---

    async def Generate(self, request: Any, context: status.Context) -> None:
        """Stream the outputs of one request, each as chunks of what is new, if it streams, and all of it at its end."""
        engine = self._engine
        with named(SGLANG):
            message = self._read(request)
        request_id = {"request_id": message.request_id}
        write = smg.writer(engine, context, message, sglang_scheduler_pb2, streams=request.stream, fields=request_id)
        await engine.generate(context, f"{NAME}/Generate", message, request.sampling_params.n, write, SGLANG)

    def _read(self, request: Any) -> router_pb2.GenerateRequest:
        asked = request.sampling_params
        refuse(
            {
                "sampling_params.logit_bias": asked.logit_bias,
                "sampling_params.custom_params": asked.HasField("custom_params"),
                "mm_inputs": request.HasField("mm_inputs"),
                "token_ids_logprob": request.token_ids_logprob,
                "return_hidden_states": request.return_hidden_states,
                "disaggregated_params": request.HasField("disaggregated_params"),
                "custom_logit_processor": request.custom_logit_processor,
                "input_embeds": request.input_embeds,
            }
        )
        if request.return_logprob and 0 <= request.logprob_start_len < len(request.tokenized.input_ids) - 1:
            refuse({"logprob_start_len": request.logprob_start_len})
        return generate_request(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            adapter_id=self._engine.adapter_of(self._names.get(request.lora_id, request.lora_id)),
            sampling=types_pb2.SamplingParams(
                top_p=asked.top_p,
                top_k=asked.top_k,
                presence_penalty=asked.presence_penalty,
                frequency_penalty=asked.frequency_penalty,
                ignore_eos=asked.ignore_eos,
                min_new_tokens=min(asked.min_new_tokens, 2**31 - 1),
                stop_sequences=asked.stop,
                stop_token_ids=asked.stop_token_ids,
                include_stop_sequence=asked.no_stop_trim,
            ),
            temperature=asked.temperature,
            max_tokens=asked.max_new_tokens,
            seed=None,
            top_logprobs=request.top_logprobs_num if request.return_logprob else None,
            constraint=read_constraint(asked, "constraint", "sampling_params"),
        )

    async def Abort(self, request: Any, context: status.Context) -> Any:
        """End a request; one that is not open is passed over."""
        found = self._engine.abort(context, request.request_id)
        text = "" if found else f"no request {quoted(request.request_id)} is open"
        return sglang_scheduler_pb2.AbortResponse(success=bool(found), message=text)

    # --- what it is ---

    async def HealthCheck(self, request: Any, context: status.Context) -> Any:
        """Tell whether it can serve."""
        why = self._engine.why_unhealthy()
        return sglang_scheduler_pb2.HealthCheckResponse(healthy=not why, message=why or "serving")

    async def GetModelInfo(self, request: Any, context: status.Context) -> Any:
        """Tell what it serves."""
        return sglang_scheduler_pb2.GetModelInfoResponse(**smg.model_info(self._engine, context))

    async def GetServerInfo(self, request: Any, context: status.Context) -> Any:
        """Tell how it runs."""
        engine = self._engine
        workers, _ = await engine.workers(context)
        info = sglang_scheduler_pb2.GetServerInfoResponse(
            active_requests=engine.num_open,
            uptime_seconds=engine.uptime_seconds,
            sglang_version=VERSION,
            server_type=SERVER_TYPE,
            max_total_num_tokens=min(sum(worker.max_total_token_num for worker in workers), 2**31 - 1),
        )
        info.server_args.update(
            {
                "tp_size": workers[0].tensor_parallel if workers else engine.settings.worker.tensor_parallel,
                "dp_size": 1,
                "context_length": engine.max_model_len,
                "max_running_requests": engine.max_running(len(workers)),
                "page_size": engine.settings.scheduler.block_size,
            }
        )
        return info

    async def GetLoads(self, request: Any, context: status.Context) -> Any:
        """Tell how full it is."""
        fields = smg.load_of(await self._engine.load(context))
        load = sglang_scheduler_pb2.SchedulerLoad(**fields)
        load.queues.waiting = load.num_waiting_reqs
        load.memory.token_capacity = load.max_total_num_tokens
        return sglang_scheduler_pb2.GetLoadsResponse(
            version=VERSION,
            dp_rank_count=1,
            loads=[load],
            aggregate=sglang_scheduler_pb2.AggregateMetrics(
                total_running_reqs=load.num_running_reqs,
                total_waiting_reqs=load.num_waiting_reqs,
                total_reqs=load.num_total_reqs,
                avg_token_usage=load.token_usage,
                avg_throughput=load.gen_throughput,
                avg_utilization=load.utilization,
            ),
        )

    async def GetTokenizer(self, request: Any, context: status.Context) -> AsyncIterator[Any]:
        """Send the tokenizer's files."""
        async for chunk in smg.tokenizer_chunks(self._engine, context):
            yield chunk

    # --- adapters ---

    async def LoadLoRAAdapter(self, request: Any, context: status.Context) -> Any:
        """Make an adapter known to the whole cluster."""
        name, lora_id = request.lora_name, request.lora_id
        refuse({"pinned": request.pinned})
        if not lora_id:
            raise InvalidRequest("lora_id is empty; requests name the adapter by it; give one", field="lora_id")
        if self._names.get(lora_id, name) != name:
            raise Conflict(
                f"lora_id {quoted(lora_id)} is adapter {quoted(self._names[lora_id])}'s; give another",
                field="lora_id",
                value=quoted(lora_id),
            )
        with named(SGLANG_LORA):
            await self._engine.load_lora(context, name, request.lora_path)
        self._names[lora_id] = name
        return sglang_scheduler_pb2.LoadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._ids(context))

    async def UnloadLoRAAdapter(self, request: Any, context: status.Context) -> Any:
        """Make an adapter unknown to new requests."""
        with named(SGLANG_LORA):
            await self._engine.unload_lora(context, request.lora_name)
        self._names = {key: name for key, name in self._names.items() if name != request.lora_name}
        return sglang_scheduler_pb2.UnloadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._ids(context))

    async def ListLoadedLoRAAdapters(self, request: Any, context: status.Context) -> Any:
        """List the adapters that requests may name; the id of one that was not loaded here is its name."""
        names = await self._engine.list_loras(context)
        adapters = [
            {"lora_id": self._id(name), "lora_name": name, "lora_path": self._engine.handler.adapter_path(name)}
            for name in names
        ]
        return sglang_scheduler_pb2.ListLoadedLoRAAdaptersResponse(loaded_adapters=adapters)

    async def _ids(self, context: status.Context) -> list[str]:
        return [self._id(name) for name in await self._engine.list_loras(context)]

    def _id(self, name: str) -> str:
        return next((key for key, known in self._names.items() if known == name), name)

    async def SubscribeKvEvents(self, request: Any, context: status.Context) -> None:
        """Tell what happens to the prefix cache."""
        await smg.subscribe(self._engine, request, context)

    # --- what has no meaning here ---

    Embed: Any = not_offered("Embed", smg.NO_EMBEDDINGS)
    FlushCache: Any = not_offered("FlushCache", smg.NO_FLUSH)
    StartProfile: Any = not_offered("StartProfile", smg.NO_PROFILER)
    StopProfile: Any = not_offered("StopProfile", smg.NO_PROFILER)


def register(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    """Add the service to a server; return the name."""
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(SglangScheduler(engine), server)
    return (NAME,)
