"""Waits that count in device seconds, and those that count in wall seconds, under a time scale other than 1."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lorrery.loadgen.driver import Driver, DriveSettings
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.reception import Ask, FinishView, Reception
from lorrery.loadgen.workload.request import Turn, WorkloadRequest
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.messages import Submit
from lorrery.scheduler.routers import RouterLink
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from tests.virtual.clock import virtual_time

SCALES = (0.1, 1.0, 4.0)


def seconds_of(play: Callable[[], Awaitable[None]]) -> float:
    """Return how long something takes, in virtual wall seconds."""
    with virtual_time(random.Random(1)) as loop:
        began = loop.time()
        loop.run_until_complete(play())
        return loop.time() - began


@pytest.mark.parametrize("time_scale", SCALES)
def test_a_request_waits_for_a_worker_in_wall_seconds(time_scale: float) -> None:
    async def play() -> None:
        settings = [f"time_scale={time_scale}", "scheduler.worker_wait_seconds=7"]
        cluster = Cluster(load(None, settings), CollectorRegistry())
        router = RouterLink("router", cluster.clock, 1000)
        sampling = pb.Sampling(seed=1, max_new_tokens=5)
        cluster.requests.submit(Submit(1, "r", "", "t", u32.pack(range(10)), 5, sampling), router)
        while router.owned:  # noqa: ASYNC110  costs no time
            await asyncio.sleep(0.01)

    assert seconds_of(play) == pytest.approx(7, abs=0.3)


@pytest.mark.parametrize("time_scale", SCALES)
def test_a_session_thinks_in_device_seconds(time_scale: float) -> None:
    class Client:
        """Answers each turn at once."""

        tells_true_length = True

        def prepare(self, ask: Ask) -> Any:
            async def send(reception: Reception, count: Callable[[int], None]) -> None:
                reception.note(ask.request.output_tokens)
                reception.status = "OK"
                reception.finish = FinishView("length", ask.request.output_tokens, 10)

            return send

    async def play() -> None:
        turns = [
            WorkloadRequest(number, 0.0, 10, 3, turn=Turn(0, number, 10, 5.0 if number else 0.0)) for number in range(3)
        ]
        client: Any = Client()
        driver = Driver(client, DriveSettings(concurrency=1), time_scale, LoadMetrics(CollectorRegistry()))
        await driver.run(turns)
        assert [outcome.status for outcome in driver.outcomes] == ["OK"] * 3

    assert seconds_of(play) == pytest.approx(10 * time_scale, abs=0.3)
