"""One life of a Route stream: what is written to it."""

import asyncio

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from lorrery.router import wire
from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish, Request
from lorrery.router.sampling import SamplingParams
from lorrery.router.session import Fanout, Session
from lorrery.service.errors import Internal, NeverFits, RequestError
from lorrery.v1 import router_pb2, scheduler_pb2_grpc
from lorrery.vocabulary.adapters import AdapterLog
from tests.router.conftest import next_submit
from tests.router.fake_scheduler import FakeScheduler


def asked(prompt_tokens: int, seed: int = 1) -> OpenRequest:
    def make_message(
        token_ids: list[int], finish: Finish | None, _: float, at: float | None
    ) -> tuple[router_pb2.GenerateResponse, bool]:
        return router_pb2.GenerateResponse(token_ids=token_ids), finish is not None

    return OpenRequest(Request("r", "", "", bytes(4 * prompt_tokens), SamplingParams(), (), seed), make_message)


@pytest.mark.parametrize(
    ("hurtful", "error", "words"),
    [
        (lambda: asked(1000), NeverFits, "at most 1000 are taken"),
        (lambda: asked(1, seed=2**64), Internal, "out of range"),  # which no message can carry
    ],
)
async def test_a_request_that_cannot_be_sent_fails_alone(hurtful, error: type[RequestError], words: str) -> None:
    scheduler = FakeScheduler()
    await scheduler.start()
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Route()
        await call.write(wire.router_hello("r", AdapterLog()))
        route = await asyncio.wait_for(scheduler.routes.get(), 60)
        metrics = RouterMetrics(CollectorRegistry())
        fanout = Fanout(1.0, max_pending_tokens=8, max_gap_seconds=1.0, metrics=metrics, on_slow_reader=lambda _: None)
        session = Session("shard", call, fanout, submit_bytes=1000)
        before, wrong, after = asked(10), hurtful(), asked(20)
        for open_request in (before, wrong, after):
            session.submit(open_request)
        writer = asyncio.create_task(session.write())
        try:
            prompts = [len((await next_submit(route)).prompt_token_ids_u32) // 4 for _ in range(2)]
            assert prompts == [10, 20]
            with pytest.raises(error, match=words):
                await wrong.next_message()
            assert list(fanout.open_requests.values()) == [before, after]
        finally:
            writer.cancel()
            call.cancel()
            await scheduler.stop()
