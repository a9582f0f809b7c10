"""Routers that stop reading: cut off by time and by bytes, and nobody else notices."""

import grpc.aio
import pytest

from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc
from tests.cluster.harness import wait_until
from tests.scheduler.harness import OVERRIDES, Harness, Router, tokens_of

SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512),
    ("grpc.use_local_subchannel_pool", 1),
]


@pytest.mark.parametrize(
    "override",
    [
        "scheduler.seed=0",  # the default settings: by time
        "scheduler.max_pending_router_tokens=100",
    ],
)
async def test_a_router_that_stops_reading_is_cut_off_and_its_neighbour_goes_on(override: str) -> None:
    async with (
        Harness(load(None, [*OVERRIDES, override])) as scheduler,
        grpc.aio.insecure_channel(scheduler.address, options=SMALL_WINDOW) as channel,
    ):
        neighbour = await scheduler.route()
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Route()
        await call.write(pb.RouteRequest(hello=pb.RouterHello(router_id="stuck")))
        hello = (await call.read()).hello
        await Router(call, hello).submit(1, max_new=3000)
        await neighbour.submit(1, max_new=1500)
        await scheduler.until("in_flight_requests", 2)
        worker = await scheduler.attach()
        plan = await worker.plan()
        assert len(plan.joins) == 2
        for _ in range(1000):
            await worker.step(plan, hand_back=True)
            plan = await worker.plan()
        await wait_until(lambda: scheduler.value("routers") == 1, what="the router is cut off")
        while worker.lengths:
            await worker.step(plan, hand_back=True)
            if worker.lengths:
                plan = await worker.plan()
        assert len((await tokens_of(neighbour, 1))[0]) == 1500
        assert scheduler.value("in_flight_requests") == 0
        call.cancel()
