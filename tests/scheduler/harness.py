"""A scheduler on a real socket, with a worker and a router played by the test."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import grpc
import grpc.aio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lorrery.scheduler.service import SchedulerService
from lorrery.service.network.server import new_server
from lorrery.service.settings.cluster import Settings, load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc, types_pb2
from tests.cluster.harness import PATIENCE_SECONDS, wait_until

# No time-out here is short: this process may stand still, and the workers that tests play do not beat.
OVERRIDES = (
    "scheduler.policy='fcfs'",
    "scheduler.max_num_batched_tokens=4096",
    "scheduler.worker_timeout_seconds=60",
    "worker.heartbeat_seconds=0.1",
    "scheduler.worker_wait_seconds=60",
    "scheduler.max_waiting_requests=3",
    "adapters.registry=[{id='a', rank=8}, {id='big', rank=64}]",
)


class Harness:
    def __init__(self, settings: Settings) -> None:
        self.registry = CollectorRegistry()
        self.service = SchedulerService(settings, self.registry)
        self.server = new_server()
        self.service.register(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.calls: list[grpc.aio.StreamStreamCall] = []

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for call in self.calls:
            call.cancel()
        await self.channel.close()
        await self.server.stop(None)

    def skip_to(self, at_ps: int) -> None:
        """Move the scheduler's clock forward, as if its event loop had stood still until then."""
        self.service._cluster.clock.observe(at_ps)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"lorrery_scheduler_{name}", labels) or 0.0

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric without labels has this value."""
        await wait_until(lambda: self.value(name) == value, what=f"{name} == {value}")

    async def route(self, *changes: pb.AdapterChange, forgotten: int = 0) -> "Router":
        call = self.stub.Route()
        self.calls.append(call)
        told = pb.AdapterChanges(changes=changes, whole=True, forgotten=forgotten)
        await call.write(pb.RouteRequest(hello=pb.RouterHello(router_id="r", adapter_changes=told)))
        hello = await call.read()
        assert hello.hello.model == "Llama-2-7B"
        return Router(call, hello.hello)

    async def hang_up(self, router: "Router") -> None:
        """End a router's stream; return once the scheduler knows."""
        links = self.service._cluster.routers
        expected = len(links) - 1
        router.call.cancel()
        await wait_until(lambda: len(links) == expected, what=f"{expected} routers")

    async def attach(self, worker_id: str = "w", model: str = "Llama-2-7B", pool: int = 6000) -> "Worker":
        call = self.stub.Attach()
        self.calls.append(call)
        await call.write(
            pb.AttachRequest(
                hello=pb.WorkerHello(worker_id=worker_id, model=model, gpu="test", max_total_token_num=pool)
            )
        )
        welcome = await call.read()
        assert welcome.welcome.time_scale == 1.0
        return Worker(call, worker_id)


class Router:
    def __init__(self, call: grpc.aio.StreamStreamCall, hello: pb.SchedulerHello) -> None:
        self.call = call
        self.hello = hello

    async def submit(
        self,
        handle: int,
        prompt: int = 10,
        max_new: int = 4,
        adapter: str = "",
        produced=(),
        resumed: bool = False,
        pinned: types_pb2.Adapter | None = None,
    ) -> None:
        submit = pb.Submit(
            handle=handle,
            request_id=f"request-{handle}",
            adapter_id=adapter,
            prompt_token_ids_u32=np.arange(prompt, dtype="<u4").tobytes(),
            produced_token_ids_u32=np.array(produced, "<u4").tobytes(),
            sampling=pb.Sampling(seed=1, max_new_tokens=max_new),
            resumed=resumed,
            adapter=pinned,
        )
        await self.call.write(pb.RouteRequest(submit=submit))

    async def cancel(self, *handles: int) -> None:
        await self.call.write(pb.RouteRequest(cancel_handles_u32=np.array(handles, "<u4").tobytes()))

    async def read(self) -> pb.RouteResponse:
        return await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)


class Worker:
    """Runs what plans say; token ids are 100 x handle + position."""

    def __init__(self, call: grpc.aio.StreamStreamCall, worker_id: str) -> None:
        self.call = call
        self.worker_id = worker_id
        self.lengths: dict[int, tuple[int, int]] = {}
        self.clock_ps = 0

    async def plan(self) -> pb.Plan:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        while message.WhichOneof("message") == "interrupt":  # of a plan that is over
            message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        for join in message.plan.joins:
            self.lengths[join.handle] = (len(join.produced_token_ids_u32) // 4, join.sampling.max_new_tokens)
        for handle in np.frombuffer(message.plan.leaves_u32, "<u4").tolist():
            self.lengths.pop(handle, None)
        return message.plan

    async def plan_that_leaves(self, plan: pb.Plan) -> pb.Plan:
        """Run a step at a time until a plan takes a sequence away."""
        while not plan.leaves_u32:
            await self.step(plan, hand_back=True)
            plan = await self.plan()
        return plan

    async def step(self, plan: pb.Plan, hand_back: bool | None = None) -> None:
        """Run one step of the plan; hand back as a worker would, unless told otherwise."""
        prefills = np.frombuffer(plan.prefill_handles_u32, "<u4").tolist()
        handles = prefills or list(self.lengths)
        start_ps = max(self.clock_ps, plan.start_ps)
        self.clock_ps = max(start_ps + 1_000_000_000, plan.until_ps)
        finished = []
        tokens = []
        for handle in handles:
            position, length = self.lengths[handle]
            tokens.append(100 * handle + position)
            self.lengths[handle] = (position + 1, length)
            if position + 1 == length:
                finished.append(handle)
                del self.lengths[handle]
        done = pb.StepDone(
            plan_id=plan.plan_id,
            start_ps=start_ps,
            end_ps=self.clock_ps,
            handles_u32=np.array(handles, "<u4").tobytes(),
            token_ids_u32=np.array(tokens, "<u4").tobytes(),
            finished_handles_u32=np.array(finished, "<u4").tobytes(),
            finish_reasons_u32=np.array([types_pb2.FINISH_REASON_LENGTH] * len(finished), "<u4").tobytes(),
            hand_back=bool(prefills) or bool(finished) if hand_back is None else hand_back,
        )
        await self.call.write(pb.AttachRequest(step=done))


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    async with Harness(load(None, OVERRIDES)) as harness:
        yield harness


async def tokens_of(router: Router, handle: int) -> tuple[list[int], pb.Finished]:
    tokens: list[int] = []
    while True:
        message = (await router.read()).tokens
        handles = np.frombuffer(message.handles_u32, "<u4")
        tokens += np.frombuffer(message.token_ids_u32, "<u4")[handles == handle].tolist()
        for finished in message.finished:
            if finished.handle == handle:
                return tokens, finished
