"""A client of the ports at which a router is an engine, and requests as each protocol has them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import (
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from lorrery.service.local.cluster import LocalCluster
from lorrery.vllm import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.cluster.client import PROMPT_TOKEN_ID, TIMEOUT_SECONDS, Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.router.test_access import bearer, entry, replace

ROOT, TENANT = bearer("secret-of-an-operator"), bearer("secret-of-a-tenant")
PORTS = ("vllm_grpc", "smg_vllm_grpc", "sglang_grpc")


class Engines:
    """Stubs of every port."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.channels = {name: grpc.aio.insecure_channel(cluster.engine_addresses[name]) for name in PORTS}
        native, smg, sglang = self.channels.values()
        self.inference: Any = inference_pb2_grpc.InferenceStub(native)
        self.control: Any = control_pb2_grpc.ControlStub(native)
        self.smg: Any = vllm_engine_pb2_grpc.VllmEngineStub(smg)
        self.sglang: Any = sglang_scheduler_pb2_grpc.SglangSchedulerStub(sglang)

    async def answer(self, call: Callable[..., Any], message: object, key: Any = ROOT) -> Any:
        """Return what a unary call answers."""
        return await call(message, metadata=key, timeout=TIMEOUT_SECONDS)

    async def messages(self, call: Callable[..., Any], message: object, key: Any = ROOT) -> list[Any]:
        """Return all messages of a stream."""
        return [one async for one in call(message, metadata=key, timeout=TIMEOUT_SECONDS)]

    async def error(self, call: Callable[..., Any], message: object, key: Any = ROOT) -> grpc.aio.AioRpcError:
        """Return what a call fails with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in _stream(call(message, metadata=key, timeout=TIMEOUT_SECONDS)):
                pass
        return caught.value


@contextlib.asynccontextmanager
async def running_engines(folder: Path) -> AsyncIterator[Engines]:
    """Run a cluster with every port, one more of a single adapter, and a key of an operator and one of a tenant."""
    keys = folder / "keys.toml"
    tenant = entry("secret-of-a-tenant", name="one", tenant="a", adapters=["lora-0"], max_new_tokens=30)
    replace(keys, entry("secret-of-an-operator", name="root", tenant="ops", operator=True) + tenant)
    settings = [f"router.{name}=127.0.0.1:0" for name in PORTS]
    by_adapter = '{ protocol = "smg-vllm", listen = "127.0.0.1:0", adapter = "lora-1" }'
    settings += [f"router.engines=[{by_adapter}]", f"router.keys={keys}"]
    async with running_cluster(folder, *settings) as cluster:
        engines = Engines(cluster)
        yield engines
        await asyncio.gather(*(channel.close() for channel in engines.channels.values()))
        await nothing_held(cluster)


async def _stream(call: Any) -> AsyncIterator[Any]:
    if hasattr(call, "__aiter__"):
        async for one in call:
            yield one
    else:
        yield await call


def native(ask: Ask, **stopping: Any) -> inference_pb2.GenerateRequest:
    """An `Ask` as vLLM's protocol has it."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[PROMPT_TOKEN_ID] * ask.prompt_tokens),
        lora_name=ask.adapter_id,
        priority=ask.priority,
        sampling=inference_pb2.RandomSampling(seed=ask.seed),
        stopping=inference_pb2.StoppingCriteria(
            max_new_tokens=ask.max_new_tokens, ignore_eos=ask.ignore_eos, **stopping
        ),
        response=inference_pb2.ResponseOptions(output_token_ids=True),
    )


def smg(ask: Ask, *, stream: bool = True, **sampling: Any) -> vllm_engine_pb2.GenerateRequest:
    """An `Ask` as `VllmEngine` has it."""
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[PROMPT_TOKEN_ID] * ask.prompt_tokens),
        sampling_params=vllm_engine_pb2.SamplingParams(
            seed=ask.seed, max_tokens=ask.max_new_tokens, ignore_eos=ask.ignore_eos, **sampling
        ),
        stream=stream,
    )


def sglang(ask: Ask, *, stream: bool = True, lora_id: str = "", **sampling: Any) -> Any:
    """An `Ask` as `SglangScheduler` has it, which has no seeds."""
    return sglang_scheduler_pb2.GenerateRequest(
        request_id="r",
        tokenized=sglang_scheduler_pb2.TokenizedInput(input_ids=[PROMPT_TOKEN_ID] * ask.prompt_tokens),
        sampling_params=sglang_scheduler_pb2.SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=ask.max_new_tokens, ignore_eos=True, **sampling
        ),
        lora_id=lora_id,
        stream=stream,
    )


def expected(engines: Engines, ask: Ask) -> list[int]:
    return ask.expected(engines.cluster.settings)[0]
