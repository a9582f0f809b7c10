"""Chunks that go past uvicorn's `send` are those that it would have written."""

import asyncio
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lorrery.router.http.connection import DirectWriter


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def cycle(transport: Transport) -> RequestResponseCycle:
    """Return uvicorn's side of a request that waits for its answer."""
    return RequestResponseCycle(
        scope=cast("Any", {"method": "POST", "headers": []}),
        transport=cast("Any", transport),
        flow=FlowControl(cast("Any", transport)),
        logger=cast("Any", None),
        access_logger=cast("Any", None),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


@pytest.mark.parametrize("body", [b"", b"x", b"data: {}\n\n", b"y" * 70_000])
async def test_a_part_is_written_as_uvicorn_writes_it(body: bytes):
    transport = Transport()
    answer = cycle(transport)
    await answer.send({"type": "http.response.start", "status": 200, "headers": []})
    writer = DirectWriter(answer.send)
    assert writer.is_ready
    written: list[bytes] = []
    for direct in (False, True):
        transport.written.clear()
        if direct:
            writer.write_now(body)
        else:
            await answer.send({"type": "http.response.body", "body": body, "more_body": True})
        written.append(b"".join(transport.written))
    assert written[0] == written[1]


async def test_an_answer_of_known_length_is_left_to_uvicorn():
    answer = cycle(Transport())
    writer = DirectWriter(answer.send)
    assert not writer.is_ready
    await answer.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    assert not writer.is_ready


async def test_a_reader_that_is_behind_or_gone_is_written_nothing():
    transport = Transport()
    answer = cycle(transport)
    await answer.send({"type": "http.response.start", "status": 200, "headers": []})
    transport.written.clear()
    writer = DirectWriter(answer.send)
    answer.flow.pause_writing()
    assert not writer.is_ready
    answer.flow.resume_writing()
    answer.disconnected = True
    writer.write_now(b"x")
    assert transport.written == []
