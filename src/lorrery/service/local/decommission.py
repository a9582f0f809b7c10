"""Tells the remaining services of a stopping cluster that others will not come back, while its routers drain.

Requests wait for a worker to come back (`scheduler.worker_wait_seconds`) or for a scheduler
(`router.resume_timeout_seconds`), and a stopping router waits for its requests. Once a cluster stops, no process is
restarted, so these waits would be in vain. The scheduler is told over gRPC. Routers get a signal, because their gRPC
calls may need an API key, which the cluster does not have.
"""

import asyncio
import contextlib
from collections.abc import Collection

import grpc.aio

from lorrery.service.interrupt import NO_SCHEDULER_TO_COME
from lorrery.service.local.service_process import ServiceProcess
from lorrery.service.network.channel import open_channel
from lorrery.service.network.credentials import ClusterToken
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc

_TIMEOUT_SECONDS = 5.0


async def tell_of_workers(workers: Collection[ServiceProcess], scheduler: str, settings: Settings) -> None:
    """Wait for the end of all worker processes, and tell the scheduler.

    If that fails, requests wait as usual.

    Args:
        workers: all that were started, including those that have ended.
        scheduler: HOST:PORT.
        settings: of the cluster.
    """
    await _all_ended(workers)
    channel = open_channel(scheduler, settings.client_tls)
    try:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        metadata = ClusterToken(settings.cluster_token).metadata()
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = scheduler_pb2.ExpectNoWorkerRequest()
            await stub.ExpectNoWorker(request, timeout=_TIMEOUT_SECONDS, metadata=metadata)
    finally:
        await channel.close()


async def tell_of_schedulers(schedulers: Collection[ServiceProcess], routers: Collection[ServiceProcess]) -> None:
    """Wait for the end of all scheduler processes, and tell the running routers."""
    await _all_ended(schedulers)
    for router in routers:
        router.signal(NO_SCHEDULER_TO_COME)


async def _all_ended(processes: Collection[ServiceProcess]) -> None:
    await asyncio.gather(*[one.process.wait() for one in processes])
