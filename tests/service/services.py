"""A small service for the tests of `lorrery.service`; `python services.py --help` runs it as a process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.service.errors import LorreryError
from lorrery.service.network.server import RECEIVE_BYTES
from lorrery.service.process import Made, service_command
from lorrery.service.settings.cluster import Settings, load

ECHO = "/test.Echo/Echo"


class EchoService:
    """Echoes bytes, and notes what happens to it. While `idle` is not set, its drain does not end.

    With `lingers` set a call does not end until it is cancelled, and then takes its time.
    """

    name = "echo"
    tracer = None
    receive_bytes = RECEIVE_BYTES * 3 // 2

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.running = asyncio.Event()
        self.drains = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.fail: Exception | SystemExit | None = None
        self.lingers = False
        self.set_ready: Callable[[bool], Awaitable[None]]

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        handler = grpc.unary_unary_rpc_method_handler(self.echo)
        server.add_registered_method_handlers("test.Echo", {"Echo": handler})
        return ["test.Echo"]

    async def echo(self, request: bytes, context: object) -> bytes:
        if self.lingers:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.3)
        return request

    async def listen(self) -> Mapping[str, str]:
        return {}

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self.happened.append("run")
        if self.fail is not None:
            raise self.fail
        self.set_ready = set_ready
        await set_ready(True)
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.happened.append("run cancelled")

    async def drain(self) -> None:
        self.happened.append("drain")
        self.drains.set()
        await self.idle.wait()
        self.happened.append("drained")


def make(settings: Settings, registry: CollectorRegistry) -> Made:
    service = EchoService()
    if settings.model == "fails":
        service.fail = ExceptionGroup("of a task group", [LorreryError("the disk is full of eels")])
    elif settings.model == "breaks":
        service.fail = ZeroDivisionError("1 / 0")
    elif settings.model == "exits":
        service.fail = SystemExit(0)
    elif settings.model == "holds":
        service.idle.clear()
    elif settings.model == "lingers":
        service.lingers = True
    return service, settings.router.listen, settings.router.metrics, settings.router.drain_seconds


if __name__ == "__main__":
    service_command("echo", "Echo bytes.", load, make)
