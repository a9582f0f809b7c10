"""Tells the scheduler of a cluster that stops when its last worker process has ended.

Requests wait for a worker that comes back (`scheduler.worker_wait_seconds`), and a router that stops waits for its
requests. Once a cluster stops, no process starts again: without this they would wait for nothing.
"""

import asyncio
from collections.abc import Collection

import grpc.aio

from lorrery.chassis.channel import open_channel
from lorrery.chassis.credentials import ClusterToken
from lorrery.local.service_process import ServiceProcess
from lorrery.settings import Settings
from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc

_TIMEOUT_SECONDS = 5.0


async def tell_when_it_has_ended(workers: Collection[ServiceProcess], scheduler: str, settings: Settings) -> None:
    """Wait for the end of all workers' processes, and tell; where that fails, requests wait as they would.

    Args:
        workers: started; those that have ended count.
        scheduler: HOST:PORT.
        settings: of the cluster.
    """
    await asyncio.gather(*[worker.process.wait() for worker in workers])
    channel = open_channel(scheduler, settings.client_tls)
    try:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        metadata = ClusterToken(settings.cluster_token).metadata()
        await stub.ExpectNoWorker(scheduler_pb2.ExpectNoWorkerRequest(), timeout=_TIMEOUT_SECONDS, metadata=metadata)
    except grpc.aio.AioRpcError:
        pass
    finally:
        await channel.close()
