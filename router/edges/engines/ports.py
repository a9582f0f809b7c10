"""The engine ports of a router: one gRPC server each, with its own health and reflection services."""

from collections.abc import Mapping, Sequence
from importlib import import_module

import grpc.aio

from lorrery.router.edges import PROTOCOLS
from lorrery.router.edges.engines.engine import Engine
from lorrery.router.handler import Handler
from lorrery.router.metrics import RouterMetrics
from lorrery.router.settings import EnginePort, Protocol
from lorrery.service.installed import need_extra
from lorrery.service.network.calls import CallGuard
from lorrery.service.network.server import Health, bind, enable_reflection, new_server
from lorrery.service.process import STOP_GRACE_SECONDS


class EngineServer:
    """One engine port.

    Args:
        name: of its setting, also used in the announcement.
        handler: of the router.
        metrics: of the router.
        port: its settings.

    Raises:
        SettingsError: its protocol needs a package that is not installed.
    """

    def __init__(self, name: str, handler: Handler, metrics: RouterMetrics, port: EnginePort) -> None:
        self.name = name
        self.address = port.listen
        self._tls = handler.settings.server_tls
        self._guard = CallGuard()
        self._server = new_server(handler.receive_bytes, self._guard)
        self._health = Health()
        self._names = _register(name, port.protocol, Engine(handler, metrics, port), self._server)

    async def start(self) -> str:
        """Bind the address and start; return the address with the actual port.

        Raises:
            LorreryError: it cannot be bound.
        """
        await self._health.attach(self._server, self._names)
        enable_reflection(self._server, self._names)
        address = bind(self._server, self.address, self._tls, f"router.{self.name}")
        await self._server.start()
        self._guard.watch(int(address.rpartition(":")[2]))
        return address

    async def set_ready(self, ready: bool) -> None:
        """Set the health status."""
        await self._health.set(ready)

    async def end_health(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.end()

    async def stop(self) -> None:
        """Stop, and end every open call."""
        await self._server.stop(STOP_GRACE_SECONDS)
        await self._guard.all_ended(STOP_GRACE_SECONDS)


def engine_servers(handler: Handler, metrics: RouterMetrics, ports: Mapping[str, EnginePort]) -> list[EngineServer]:
    """Return a server for each port. Raises SettingsError: see `EngineServer`."""
    return [EngineServer(name, handler, metrics, port) for name, port in ports.items()]


def _register(name: str, protocol: Protocol, engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    module, extra = PROTOCOLS[protocol]
    if extra is not None:
        need_extra(extra, f"router.{name}: the protocol {protocol}")
    names: Sequence[str] = import_module(module).register(engine, server)
    return names
