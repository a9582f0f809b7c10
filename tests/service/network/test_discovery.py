"""Names and their addresses, from a real name server and from the system."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from lorrery.service.network.discovery import Discovery, resolve
from lorrery.service.network.targets import DnsName
from tests.cluster.name_server import name_server

PATIENCE_SECONDS = 60.0


async def test_a_name_has_the_addresses_that_its_server_says() -> None:
    async with name_server() as server:
        server.addresses = {"s.test": ["127.0.0.3", "127.0.0.2"], "six.test": ["::1"], "both.test": ["::1", "1.2.3.4"]}
        of_s = Discovery([server.target("s.test", 7), "127.0.0.9:8"], 5.0)
        assert of_s.addresses == {"127.0.0.9:8": ""}
        assert await of_s.look()
        assert of_s.addresses == {"127.0.0.2:7": "s.test", "127.0.0.3:7": "s.test", "127.0.0.9:8": ""}
        assert not await of_s.look()
        others = Discovery([server.target("six.test", 7), server.target("both.test", 7)], 5.0)
        await others.look()
        assert list(others.addresses) == ["[::1]:7", "1.2.3.4:7"]  # a host with both is one host


async def test_the_system_resolves_names_without_a_server() -> None:
    assert await resolve(DnsName("localhost", 7)) == ["127.0.0.1"]


async def test_a_server_that_is_away_or_knows_nothing_takes_no_address_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with name_server() as server:
        server.addresses = {"s.test": ["127.0.0.2"]}
        discovery = Discovery([server.target("s.test", 7)], 5.0)
        await discovery.look()
        for addresses in ({}, {"s.test": []}):
            server.addresses = addresses
            assert not await discovery.look()
        server.answers = False
        with monkeypatch.context() as impatient:
            impatient.setattr("lorrery.service.network.discovery.ANSWER_SECONDS", 0.05)
            assert not await discovery.look()
        assert list(discovery.addresses) == ["127.0.0.2:7"]
        server.answers, server.addresses = True, {"s.test": ["127.0.0.3"]}
        assert await discovery.look()
        assert list(discovery.addresses) == ["127.0.0.3:7"]


@pytest.mark.parametrize("error", [OSError("away"), TimeoutError(), UnicodeEncodeError("idna", "x", 0, 1, "label")])
async def test_whatever_becomes_of_a_question_is_no_change(error: Exception) -> None:
    async def resolve(_name: DnsName) -> Sequence[str]:
        raise error

    assert not await Discovery(["dns:///s:7"], 5.0, resolve).look()


async def test_a_name_is_asked_again_in_time_and_sooner_after_a_loss() -> None:
    answers: list[Sequence[str]] = [["10.0.0.1"]]
    asked = asyncio.Event()

    async def resolve(_name: DnsName) -> Sequence[str]:
        asked.set()
        return answers[-1]

    changed = asyncio.Event()
    for seconds, soon in ((0.01, False), (3600.0, True)):
        discovery = Discovery(["dns:///s:7"], seconds, resolve)
        await discovery.look()
        changed.clear()
        running = asyncio.create_task(discovery.run(changed.set))
        answers.append(["10.0.0.2", f"10.0.0.{len(answers) + 2}"])
        if soon:
            discovery.look_soon()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await changed.wait()
        assert set(discovery.addresses) == {f"{host}:7" for host in answers[-1]}
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_addresses_alone_are_never_asked_for() -> None:
    async def resolve(_name: DnsName) -> Sequence[str]:
        raise AssertionError("asked")

    discovery = Discovery(["a:1", "b:2"], 0.01, resolve)
    assert not await discovery.look()
    await discovery.run(lambda: None)
    assert discovery.addresses == {"a:1": "", "b:2": ""}
    assert not discovery.has_names
