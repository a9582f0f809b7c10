"""A worker that is attached to a scheduler that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.metrics import new_registry
from lorrery.worker.service import WorkerService
from tests.worker.fake_scheduler import (
    FakeScheduler,
    Stream,
    fake_scheduler,
)

STEP_PS = 60_000_000_000
"""llm-mock's step with next to no tokens."""
TIME_SCALE = 0.1
"""A tenth: such a step takes 6 ms."""
HEARTBEAT_SECONDS = 0.02


class Worker:
    def __init__(self, scheduler: FakeScheduler, faults: tuple[str, ...] = (), **worker: object) -> None:
        self.registry = new_registry("worker")
        settings = Settings.model_validate(
            {
                "time_scale": scheduler.time_scale,
                "faults": faults,
                "worker": {
                    "scheduler": scheduler.address,
                    "step_time": "llm-mock",
                    "heartbeat_seconds": HEARTBEAT_SECONDS,
                    "name": "worker-0",
                    **worker,
                },
            }
        )
        self.service = WorkerService(settings, self.registry)
        self.ready = asyncio.Event()
        self.not_ready = asyncio.Event()

    async def set_ready(self, ready: bool) -> None:
        (self.ready if ready else self.not_ready).set()
        (self.not_ready if ready else self.ready).clear()

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"lorrery_worker_{name}", {"worker": "worker-0", **labels})
        assert value is not None, name
        return value


@asynccontextmanager
async def running_worker(
    scheduler: FakeScheduler, faults: tuple[str, ...] = (), **settings: object
) -> AsyncIterator[Worker]:
    worker = Worker(scheduler, faults, **settings)
    running = asyncio.create_task(worker.service.run(worker.set_ready))
    try:
        yield worker
    finally:
        running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)


@asynccontextmanager
async def attached(**settings: object) -> AsyncIterator[tuple[Worker, Stream]]:
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler, **settings) as worker:
        yield worker, await scheduler.next_stream()
