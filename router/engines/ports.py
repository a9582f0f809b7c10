"""The engine ports of a router: one gRPC server each, with its own health and reflection services."""

from collections.abc import Callable, Mapping, Sequence

import grpc.aio

from lorrery.router.engines.engine import Engine
from lorrery.router.handler import Handler
from lorrery.router.metrics import RouterMetrics
from lorrery.router.settings import EnginePort, Protocol
from lorrery.service.errors import SettingsError
from lorrery.service.network.calls import CallGuard
from lorrery.service.network.reflection import enable_reflection
from lorrery.service.network.server import Health, bind, new_server
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
    add: dict[Protocol, Callable[[Engine, grpc.aio.Server], Sequence[str]]] = {
        "vllm": _add_vllm,
        "smg-vllm": _add_smg_vllm,
        "sglang": _add_sglang,
    }
    try:
        return add[protocol](engine, server)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise SettingsError(
            f"router.{name}: the protocol {protocol} needs the package smg-grpc-proto: pip install 'lorrery[engines]'"
        ) from None


# Each protocol is imported only if a port uses it.


def _add_vllm(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    from lorrery.router.engines import vllm, vllm_control
    from lorrery.vllm import control_pb2_grpc, inference_pb2_grpc

    inference_pb2_grpc.add_InferenceServicer_to_server(vllm.Inference(engine), server)
    control_pb2_grpc.add_ControlServicer_to_server(vllm_control.Control(engine), server)
    return (vllm.NAME, vllm_control.NAME)


def _add_smg_vllm(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from lorrery.router.engines import smg_vllm

    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(smg_vllm.VllmEngine(engine), server)
    return (smg_vllm.NAME,)


def _add_sglang(engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

    from lorrery.router.engines import smg_sglang

    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(smg_sglang.SglangScheduler(engine), server)
    return (smg_sglang.NAME,)
