"""What a router does with schedulers that names have, and have no more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from lorrery.cli.certs import app as certs_app
from lorrery.router.metrics import RouterMetrics
from lorrery.router.placement import Placement
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import scheduler_pb2
from tests.cluster.harness import wait_until
from tests.cluster.name_server import name_server
from tests.router.conftest import StartRouter, next_submit
from tests.router.fake_scheduler import FakeScheduler


@contextlib.asynccontextmanager
async def placing(settings: dict[str, object]) -> AsyncIterator[Placement]:
    """Run what keeps the streams of a router with such settings."""
    placement = Placement(Settings.model_validate(settings), RouterMetrics(CollectorRegistry()))
    running = asyncio.create_task(placement.run())
    try:
        yield placement
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_an_address_does_not_wait_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorrery.service.network.discovery.ANSWER_SECONDS", 60.0)
    scheduler = FakeScheduler()
    await scheduler.start()
    try:
        async with name_server() as server:
            server.answers = False
            targets = [scheduler.address, server.target("s.test", 7)]
            async with placing({"router": {"schedulers": targets}}):
                await wait_until(lambda: scheduler.num_hellos == 1)
    finally:
        await scheduler.stop()


async def test_a_scheduler_may_come_while_certificates_are_being_changed(tmp_path: Path) -> None:
    assert CliRunner().invoke(certs_app, [str(tmp_path)]).exit_code == 0
    ca = tmp_path / "ca.pem"
    async with name_server() as server:
        server.addresses = {"s.test": ["127.0.0.2"]}
        router = {"schedulers": [server.target("s.test", 7)], "resolve_seconds": 0.1}
        async with placing({"router": router, "client_tls": {"ca": ca}}) as placement:
            await wait_until(lambda: len(placement.shards) == 1)
            ca.write_text("")
            server.addresses = {"s.test": ["127.0.0.2", "127.0.0.3"]}
            await wait_until(lambda: len(placement.shards) == 2)


@pytest.mark.parametrize(
    ("num_workers", "served_by"), [((4, 0), "leaving"), ((4, 4), "staying"), ((0, 4), "staying"), ((0, 0), "staying")]
)
async def test_requests_stay_with_a_scheduler_that_leaves_only_while_no_other_has_workers(
    start_router: StartRouter, num_workers: tuple[int, int], served_by: str
) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    leaving, staying = router.router._handler._placement.shards
    leaving.leaving = True

    def say_loads() -> None:
        for route, num in zip(routes, num_workers, strict=True):
            route.say_load(scheduler_pb2.SchedulerLoad(num_workers=num, num_open=3, num_routers=1))

    say_loads()
    await router.until(lambda: leaving.says_load and staying.says_load and staying.has_workers == (num_workers[1] > 0))
    calls = [router.generate(request_id=str(number)) for number in range(3)]
    for _ in calls:
        await next_submit(routes[served_by == "staying"])
        say_loads()
    await router.stub_round_trip()
    assert [route.num_submits for route in routes] == ([3, 0] if served_by == "leaving" else [0, 3])
    for call in calls:
        call.cancel()
    await router.until_empty()
