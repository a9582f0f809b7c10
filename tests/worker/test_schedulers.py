"""The schedulers that a worker knows by a name: asked, left, and forgotten."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc.aio

from lorrery.service.settings.cluster import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc as pb_grpc
from lorrery.worker.schedulers import Schedulers
from tests.cluster.harness import wait_until
from tests.cluster.name_server import NameServer, name_server

NAME = "schedulers.test"
HOSTS = ("127.0.0.2", "127.0.0.3")
RESOLVE_SECONDS = 0.1


class Asked(pb_grpc.SchedulerServiceServicer):
    """A scheduler that is asked for its demand."""

    def __init__(self, says: Callable[[int], pb.SchedulerLoad]) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._says = says

    async def GetDemand(  # noqa: N802
        self, request: pb.GetDemandRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDemandResponse:
        self.num_asked += 1
        await self.may_answer.wait()
        return pb.GetDemandResponse(load=self._says(self.num_asked))


class Gpu:
    """One that counts how often it is told to leave."""

    name = "gpu"

    def __init__(self, scheduler: str = "") -> None:
        self.scheduler = scheduler
        self.left = asyncio.Event()

    async def leave(self) -> None:
        self.left.set()


@contextlib.asynccontextmanager
async def known_by_name(
    *says: Callable[[int], pb.SchedulerLoad],
) -> AsyncIterator[tuple[Schedulers, NameServer, list[Asked], list[str]]]:
    """Run two schedulers that a name has; each says how much it has to do, given how often it has been asked."""
    port = 0
    asked = [Asked(one) for one in says]
    async with contextlib.AsyncExitStack() as stack:
        for one, host in zip(asked, HOSTS, strict=True):
            server = grpc.aio.server()
            pb_grpc.add_SchedulerServiceServicer_to_server(one, server)
            port = server.add_insecure_port(f"{host}:{port}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        names = await stack.enter_async_context(name_server())
        names.addresses = {NAME: HOSTS}
        worker = {"scheduler": names.target(NAME, port), "resolve_seconds": RESOLVE_SECONDS}
        schedulers = Schedulers(Settings.model_validate({"worker": worker}))
        stack.push_async_callback(schedulers.close)
        yield schedulers, names, asked, [f"{host}:{port}" for host in HOSTS]


@contextlib.asynccontextmanager
async def balanced(schedulers: Schedulers, gpu: Gpu) -> AsyncIterator[None]:
    running = asyncio.create_task(schedulers.keep_balanced([gpu]))
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def idle(_time: int) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(num_workers=1)


async def test_a_scheduler_that_leaves_the_name_while_it_is_asked_may_answer() -> None:
    async with known_by_name(idle, idle) as (schedulers, names, asked, addresses):
        for one in asked:
            one.may_answer.clear()
        choosing = asyncio.create_task(schedulers.choose("gpu"))
        await wait_until(lambda: all(one.num_asked for one in asked))
        names.addresses = {NAME: ["127.0.0.4"]}
        async with balanced(schedulers, Gpu()):
            looks = names.num_asked + 3  # when the third begins, what the first found has been acted on
            await wait_until(lambda: names.num_asked >= looks)
            for one in asked:
                one.may_answer.set()
            assert await choosing in addresses


async def test_a_scheduler_that_the_name_has_no_more_is_left_whichever_needs_workers_most() -> None:
    def needs_more(odd: int) -> Callable[[int], pb.SchedulerLoad]:
        return lambda time: pb.SchedulerLoad(num_workers=1, num_open=100 if time % 2 == odd else 0)

    async with known_by_name(needs_more(0), needs_more(1)) as (schedulers, _names, asked, _addresses):
        gpu = Gpu("127.0.0.9:1")
        async with balanced(schedulers, gpu):
            await wait_until(lambda: gpu.left.is_set() or asked[0].num_asked > 5)
        assert gpu.left.is_set()
