"""Device time beyond what 64 bits hold: the services themselves, in one process, where a test may set the clock."""

import asyncio
import contextlib
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.service import Router
from lorrery.scheduler.service import SchedulerService
from lorrery.service.settings.cluster import Settings, load
from lorrery.worker.service import WorkerService
from tests.cluster.client import Ask, Client
from tests.cluster.harness import write_settings
from tests.cluster.test_journal import replayed

SECOND_PS = 10**12
LIMITS = {"53 days": 2**62, "107 days": 2**63, "213 days": 2**64}
FAULTS = '["slow_worker,at=0,worker=w,factor=1.5", "adapter_load_failure,at=0,adapter=big"]'


async def _no_health(_ready: bool) -> None:
    pass


class Services:
    """A scheduler, a worker and a router on real sockets; the scheduler's clock starts at `start_ps`."""

    def __init__(self, settings: Settings, start_ps: int) -> None:
        self.registry = CollectorRegistry()
        self.scheduler = SchedulerService(settings, self.registry)
        self.skip_to(start_ps)
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self.client: Client

    async def __aenter__(self) -> "Services":
        address = await self._serve(self.scheduler)
        router_settings = self._settings.router.model_copy(update={"http": None, "schedulers": (address,)})
        worker_settings = self._settings.worker.model_copy(update={"scheduler": address, "name": "w"})
        settings = self._settings.model_copy(update={"router": router_settings, "worker": worker_settings})
        router = Router(settings, CollectorRegistry())
        self._run(router.run(_no_health))
        self._run(WorkerService(settings, CollectorRegistry()).run(_no_health))
        self.client = await self._stack.enter_async_context(Client(await self._serve(router)))
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()
        self.scheduler._cluster.close_journal()

    def skip_to(self, at_ps: int) -> None:
        """Move the scheduler's clock forward, as if so much time had passed without a request."""
        self.scheduler._cluster.clock.observe(at_ps)

    async def _serve(self, service: SchedulerService | Router) -> str:
        server = grpc.aio.server()
        service.register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return f"127.0.0.1:{port}"

    def _run(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(end)


@pytest.mark.parametrize("limit_ps", LIMITS.values(), ids=LIMITS)
async def test_a_cluster_runs_on_when_its_clock_passes_the_limit(tmp_path: Path, limit_ps: int) -> None:
    journal = tmp_path / "journal.jsonl"
    settings = load(
        write_settings(tmp_path),
        ["scheduler.policy=fcfs", f"scheduler.journal={journal}", f"faults={FAULTS}"],
    )
    async with Services(settings, limit_ps - 3600 * SECOND_PS) as services:
        asks = [Ask(seed, 50, 30, adapter) for seed, adapter in enumerate(("", "lora-0", "lora-1"))]
        for at_ps in (limit_ps - 3500 * SECOND_PS, limit_ps - SECOND_PS // 4, limit_ps + SECOND_PS):
            services.skip_to(at_ps)
            streams = [services.client.start(ask) for ask in asks]
            for stream in streams:
                usage = (await stream).check(settings)
                assert (usage.num_requeues, usage.queue_seconds < 60) == (0, True)
            failing = await services.client.start(Ask(9, 5, 5, "big"))
            assert "could not be loaded" in (failing.error.details() if failing.error else "")
        assert services.scheduler._cluster.clock.now_ps() > limit_ps
        assert services.registry.get_sample_value("lorrery_scheduler_workers_lost_total") == 0
        gaps = services.registry.get_sample_value("lorrery_scheduler_gap_seconds_total")
        assert gaps is not None
        assert gaps < 60
    _, result = replayed(journal)
    assert result.differences == []
    assert result.num_tokens == 3 * 3 * 30
