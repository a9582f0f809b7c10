"""vLLM's own gRPC for operators of an engine: `vllm.Control`."""

from collections.abc import Mapping
from typing import Any

from lorrery.router.edges.engines.engine import Engine, not_offered
from lorrery.router.edges.engines.field_names import VLLM_LORA
from lorrery.router.field_names import named
from lorrery.service.installed import VERSION
from lorrery.service.network import status
from lorrery.vllm import control_pb2, control_pb2_grpc

NAME = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
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
