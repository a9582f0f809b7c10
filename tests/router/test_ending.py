"""Streams that end early: cancels, deadlines, limits, drain."""

import asyncio
import random

import grpc

from lorrery.v1 import router_pb2, types_pb2
from tests.router.conftest import TIMEOUT_SECONDS, StartRouter, everything, failure, next_submit

LENGTH = types_pb2.FINISH_REASON_LENGTH


async def test_a_cancel_reaches_the_scheduler_and_leaves_nothing(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle, 3)])
    await call.read()
    call.cancel()
    await router.until(lambda: route.cancelled == [handle])
    await router.until_empty()
    assert router.sample("lorrery_router_requests_total", outcome="cancelled") == 1


async def test_a_deadline_reaches_the_scheduler(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    # A deadline that only the router knows of: the client would reset the call at its own, which comes first.
    call = router.stub.Generate(router_pb2.GenerateRequest(text=" about"), metadata=(("grpc-timeout", "4S"),))
    handle = (await next_submit(route)).handle
    assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await router.until(lambda: route.cancelled == [handle])
    await router.until_empty()
    assert router.sample("lorrery_router_requests_total", outcome="deadline") == 1


async def test_a_thousand_cancels_at_random_moments_leave_nothing(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    rng = random.Random(1)
    ended = 0

    async def one(index: int) -> None:
        nonlocal ended
        call = router.generate(request_id=str(index))
        try:
            for _ in range(rng.randrange(4)):
                await call.read()
        finally:
            call.cancel()
            ended += 1

    async def serve() -> None:
        live: list[int] = []
        while ended < 1000:
            while not route.submits.empty():
                live.append(route.submits.get_nowait().handle)
            gone = set(route.cancelled)
            live = [handle for handle in live if handle not in gone]
            route.send([(handle, 3) for handle in live])
            await router.stub_round_trip()

    async def clients() -> None:
        for start in range(0, 1000, 50):
            async with asyncio.TaskGroup() as tasks:
                for index in range(start, start + 50):
                    tasks.create_task(one(index))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve())
        tasks.create_task(clients())
    await router.until_empty()
    outcomes = router.sample("lorrery_router_requests_total", outcome="cancelled")
    # A call that is cancelled before it has left the client is never seen.
    assert 300 < outcomes <= 1000
    # Everything the scheduler has heard of, it was told to forget.
    await router.until(lambda: len(set(route.cancelled)) == route.num_submits)


async def test_over_the_limit_of_open_requests_a_client_is_turned_away(start_router: StartRouter) -> None:
    router = await start_router(max_open_requests=2)
    route = await router.route()
    calls = [router.generate() for _ in range(2)]
    for _ in calls:
        await next_submit(route)
    error = await failure(router.generate())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "2 requests are open; max_open_requests is 2; try later"
    calls[0].cancel()
    await router.until(lambda: router.sample("lorrery_router_open_handlers") == 1)
    third = router.generate()
    await next_submit(route)
    for call in (calls[1], third):
        call.cancel()
    await router.until_empty()


async def test_a_draining_router_finishes_what_runs_and_refuses_what_comes(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    running = router.generate()
    handle = (await next_submit(route)).handle
    drain = asyncio.create_task(router.router.drain())
    error = await failure(router.generate())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the router is draining; ask another")
    assert not drain.done()
    route.send([(handle, 3)], [(handle, LENGTH)])
    assert (await everything(running))[0] == [3]
    await asyncio.wait_for(drain, TIMEOUT_SECONDS)
