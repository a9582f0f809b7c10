"""Serves one virtual cluster over gRPC, call by call, until its caller has finished or a signal comes.

Calls take turns: each runs in a thread, since virtual time takes CPU, and the event loop answers health meanwhile.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from lorrery.service.entry_point import SIGNALS, handled_by
from lorrery.service.errors import InvalidRequest, RunIsOver, SettingsError
from lorrery.service.network import status
from lorrery.service.network.server import Health, bind, dialable, new_server
from lorrery.service.settings.sections import TlsSettings
from lorrery.simulator.result import SimulationResult
from lorrery.simulator.virtual_cluster import Observation, RunIsOverError, VirtualCluster
from lorrery.v1 import simulation_pb2, simulation_pb2_grpc

__all__ = ["LockstepService", "serve"]

_GRACE_SECONDS = 5.0
_T = TypeVar("_T")


class LockstepService(simulation_pb2_grpc.SimulationServiceServicer):
    """Serves one virtual cluster, whose calls take turns.

    Args:
        cluster: that has not run.

    Attributes:
        finished: set once the run is over.
        result: what it came to; None: it goes on.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._turn = asyncio.Lock()
        self.finished = asyncio.Event()
        self.result: SimulationResult | None = None

    async def Observe(  # noqa: N802  gRPC's name
        self, request: simulation_pb2.ObserveRequest, context: status.Context
    ) -> simulation_pb2.ObserveResponse:
        """Return what one sees now."""

        def observe() -> simulation_pb2.ObserveResponse:
            text = self._cluster.metrics() if request.with_prometheus else ""
            seen = observation_message(self._cluster.observe())
            return simulation_pb2.ObserveResponse(observation=seen, prometheus=text)

        return await self._do(observe, context)

    async def Scale(  # noqa: N802  gRPC's name
        self, request: simulation_pb2.ScaleRequest, context: status.Context
    ) -> simulation_pb2.ScaleResponse:
        """Start worker processes, or let some drain."""

        def scale() -> simulation_pb2.ScaleResponse:
            self._cluster.scale(request.num_replicas)
            return simulation_pb2.ScaleResponse()

        return await self._do(scale, context)

    async def Advance(  # noqa: N802  gRPC's name
        self, request: simulation_pb2.AdvanceRequest, context: status.Context
    ) -> simulation_pb2.AdvanceResponse:
        """Let time pass."""

        def advance() -> simulation_pb2.AdvanceResponse:
            seen = self._cluster.advance(request.seconds)
            return simulation_pb2.AdvanceResponse(observation=observation_message(seen))

        return await self._do(advance, context)

    async def Finish(  # noqa: N802  gRPC's name
        self, request: simulation_pb2.FinishRequest, context: status.Context
    ) -> simulation_pb2.FinishResponse:
        """End the run."""
        del request

        def finish() -> simulation_pb2.FinishResponse:
            self._cluster.observe()  # so that a second call is an error, as any other
            self.result = self._cluster.result()
            return finish_message(self.result)

        answer = await self._do(finish, context)
        self.finished.set()
        return answer

    async def _do(self, what: Callable[[], _T], context: status.Context) -> _T:
        try:
            async with self._turn:
                return await asyncio.to_thread(what)
        except SettingsError as error:
            await status.abort(context, InvalidRequest(str(error)))
        except RunIsOverError as error:
            await status.abort(context, RunIsOver(str(error)))


async def serve(
    cluster: VirtualCluster, listen: str, tls: TlsSettings, listening: Callable[[str], None]
) -> SimulationResult | None:
    """Serve a virtual cluster until its caller has finished; return what it came to, None after a signal.

    Args:
        cluster: that has not run.
        listen: HOST:PORT; port 0 takes a free one.
        tls: of the server.
        listening: called with the address to dial.

    Raises:
        LorreryError: the address cannot be taken, or certificates cannot be used.
    """
    server, health = new_server(), Health()
    service = LockstepService(cluster)
    simulation_pb2_grpc.add_SimulationServiceServicer_to_server(service, server)
    await health.attach(server, [simulation_pb2.DESCRIPTOR.services_by_name["SimulationService"].full_name])
    address = bind(server, listen, tls, "--serve")
    await server.start()
    await health.set(True)
    with handled_by(asyncio.get_running_loop(), lambda _number: service.finished.set(), SIGNALS):
        try:
            listening(dialable(address))
            await service.finished.wait()
            await health.end()
        finally:
            await server.stop(_GRACE_SECONDS)
    return service.result


def observation_message(seen: Observation) -> simulation_pb2.Observation:
    """Return an observation as it travels."""
    return simulation_pb2.Observation(
        at_seconds=seen.at_seconds,
        num_ready=seen.num_ready,
        num_starting=seen.num_starting,
        num_draining=seen.num_draining,
        metrics=dict(seen.metrics),
        done=seen.done,
    )


def finish_message(result: SimulationResult) -> simulation_pb2.FinishResponse:
    """Return what a run came to."""
    counts, scaling = result.counts, result.scaling
    assert scaling is not None
    own = scaling.summary
    return simulation_pb2.FinishResponse(
        num_requests=counts["num_requests"],
        num_completed=counts["num_completed"],
        gpu_hours=own.gpu_hours,
        replicas_mean=own.replicas_mean,
        good_ratio=own.good_ratio,
        num_scalings=own.num_scale_ups + own.num_scale_downs,
    )
