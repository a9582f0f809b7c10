"""A router in this process, between a fake scheduler and a client, over real loopback gRPC."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.service import Router
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, router_pb2_grpc
from tests.cluster.harness import wait_until
from tests.router.fake_scheduler import FakeScheduler, Route

TIMEOUT_SECONDS = 60.0


@dataclass
class Harness:
    """A running router, and both of its neighbours."""

    router: Router
    registry: CollectorRegistry
    address: str
    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    channel: grpc.aio.Channel
    schedulers: list[FakeScheduler]
    http: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def route(self, index: int = 0) -> Route:
        """Return the next Route stream that the router opens to a scheduler."""
        return await asyncio.wait_for(self.schedulers[index].routes.get(), TIMEOUT_SECONDS)

    def generate(self, text: str = " about", *, timeout: float | None = TIMEOUT_SECONDS, **fields):
        """Start a Generate call."""
        if "token_ids" not in fields:
            fields["text"] = text
        return self.stub.Generate(router_pb2.GenerateRequest(**fields), timeout=timeout)

    async def stub_round_trip(self) -> None:
        """Ask the router something, so that everybody gets to run."""
        await self.stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)

    async def http_status(self, method: str, path: str, body: object = None) -> int:
        """Return the status of the answer to an HTTP request."""
        reader, writer = await asyncio.open_connection(*self.http.rsplit(":", 1))
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            answer = await reader.read()
        writer.close()
        return int(answer.split()[1])

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the loop will bring about."""
        await wait_until(condition, TIMEOUT_SECONDS)

    async def until_connected(self) -> None:
        """Wait until the router has read the hello of every scheduler."""
        name = "lorrery_router_shard_connected"
        await self.until(lambda: all(self.sample(name, shard=shard.address) for shard in self.schedulers))

    async def until_written(self, num_tokens: int) -> None:
        """Wait until so many tokens in all have been written: gRPC drops what is unread when a stream breaks."""
        await self.until(lambda: self.sample("lorrery_router_output_tokens_total") == num_tokens)

    async def until_empty(self) -> None:
        """Wait until no handler and no open request is left."""
        names = ("open_handlers", "in_flight_requests", "waiting_for_shard_requests")
        await self.until(lambda: not any(self.sample(f"lorrery_router_{name}") for name in names))


async def next_submit(route: Route):
    """Return the next Submit on a stream."""
    return await asyncio.wait_for(route.submits.get(), TIMEOUT_SECONDS)


async def everything(call) -> tuple[list[int], str, router_pb2.Finish]:
    """Read a stream to its end: token ids, text, finish."""
    token_ids: list[int] = []
    text = ""
    finish = None
    while isinstance(message := await call.read(), router_pb2.GenerateResponse):
        assert finish is None, "a message after the last"
        token_ids += message.token_ids
        text += message.text
        finish = message.finish if message.HasField("finish") else None
    assert finish is not None
    return token_ids, text, finish


async def failure(call) -> grpc.aio.AioRpcError:
    """Read a stream to its end, which must be an error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await everything(call)
    return caught.value


StartRouter = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Return a function that starts a router before `num_schedulers` fake ones."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            num_schedulers: int = 1,
            *,
            time_scale: float = 1.0,
            up: bool = True,
            silent: int | None = None,
            **router_settings,
        ):
            schedulers = [FakeScheduler(time_scale) for _ in range(num_schedulers)]
            if silent is not None:
                schedulers[silent].may_answer.clear()
            for scheduler in schedulers:
                await scheduler.start()
                stack.push_async_callback(scheduler.stop)
                if not up:
                    await scheduler.stop()
            settings = Settings.model_validate(
                {
                    "router": {
                        "http": "",
                        "schedulers": [scheduler.address for scheduler in schedulers],
                        **router_settings,
                    }
                }
            )
            registry = CollectorRegistry()
            router = Router(settings, registry)
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            router.register(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{port}",
                options=[
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.http2.bdp_probe", 0),
                    ("grpc.http2.lookahead_bytes", 512),
                ],
            )
            stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
            http = (await router.listen()).get("http", "")
            harness = Harness(router, registry, f"127.0.0.1:{port}", stub, channel, schedulers, http)

            async def set_ready(ready: bool) -> None:
                if ready:
                    harness.ready.set()

            running = asyncio.create_task(router.run(set_ready))

            async def shut_down() -> None:
                await channel.close()
                await server.stop(None)
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

            stack.push_async_callback(shut_down)
            if up:
                await asyncio.wait_for(harness.ready.wait(), TIMEOUT_SECONDS)
            return harness

        yield start
