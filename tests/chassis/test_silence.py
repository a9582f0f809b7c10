import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from lorrery.chassis.errors import LorreryError
from lorrery.chassis.sections import TlsSettings
from lorrery.chassis.silence import NOTHING, why_silent
from lorrery.loadgen.client import RouterClient
from lorrery.orrery.live import LiveFeed


@contextlib.asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_load_at_an_http_server_names_its_protocol():
    async with http_server() as target, RouterClient(target, TlsSettings()) as client:
        with pytest.raises(LorreryError, match=r"within 0.3 s: something listens there.* or --protocol openai"):
            await client.cluster(0.3)


async def test_a_feed_of_an_http_server_asks_for_the_grpc_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lorrery.orrery.live.ANSWER_SECONDS", 0.3)
    async with http_server() as target, LiveFeed(target) as feed:
        with pytest.raises(LorreryError, match=r"within 0.3 s: something listens there.*give the router's gRPC"):
            await feed.hello()


@pytest.mark.parametrize("target", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "unix:/nowhere", "nowhere"])
async def test_where_nothing_listens_nothing_answers(target: str):
    assert await why_silent(target) == NOTHING
