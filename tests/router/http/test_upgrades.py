"""Requests that offer another protocol: answered as if they had not, their bodies read as bodies."""

import asyncio
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorrery.service.web.handshakes import head_without_upgrade
from tests.router.http.conftest import HttpRouter, StartHttp, one_answer, rest_of

OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive\r\nConnection: Upgrade\r\n",
    "foo": b"UPGRADE: foo/1, bar\r\nupgrade: baz\r\nconnection: upgrade\r\n",
}
JSON = b"content-type: application/json\r\n"
BODY = b'{"prompt": "hello"}'
SMUGGLED = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


def post(offer: bytes, body: bytes = BODY) -> tuple[bytes, bytes]:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + JSON + offer + b"content-length: %d\r\n\r\n" % len(body)
    return head, body


def chunked(offer: bytes) -> tuple[bytes, bytes]:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + JSON + offer + b"transfer-encoding: chunked\r\n\r\n"
    return head, b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n"


def get(offer: bytes) -> bytes:
    return b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n"


def status_and_body(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offer_is_passed_over_and_the_body_read(
    start_http: StartHttp, offer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_http()
    async with router.connection() as (reader, writer):
        for head, body in (post(offer), chunked(offer)):
            for segments in ([head + body], [head, body], [head[:40], head[40:-2], head[-2:] + body[:3], body[3:]]):
                for segment in segments:
                    writer.write(segment)
                    await asyncio.sleep(0)  # each its own segment, as far as a loop can say
                    await writer.drain()
                status, content = status_and_body(await one_answer(reader))
                assert (status, "tokens" in content) == (200, True), content
        writer.write(get(offer) + post(offer)[0] + BODY + get(offer))
        answers = [status_and_body(await one_answer(reader))[1] for _ in range(3)]
    assert ["version" in answer for answer in answers] == [True, False, True]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_body_behind_an_offer_is_no_request(start_http: StartHttp) -> None:
    router = await start_http()
    for leave in (b"", b"expect: 100-continue\r\n"):
        head, body = post(OFFERS["foo"] + leave, SMUGGLED)
        async with router.connection() as (reader, writer):
            writer.write(head)
            if leave:  # the head has been read before its body comes
                async with asyncio.timeout(60):
                    assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            assert status_and_body(await one_answer(reader))[0] == 400
            writer.write(get(b"connection: close\r\n"))
            rest = await rest_of(reader)
            assert rest.count(b"HTTP/1.1 ") == 1


async def test_who_offers_waits_for_leave_and_closes_as_others(start_http: StartHttp) -> None:
    router = await start_http()
    head, body = post(OFFERS["h2c"] + b"expect: 100-continue\r\n")
    async with router.connection() as (reader, writer):
        writer.write(head)
        async with asyncio.timeout(60):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert status_and_body(await one_answer(reader))[0] == 200
    closing = OFFERS["foo"].replace(b"connection: upgrade", b"connection: upgrade, close")
    assert status_and_body(await router.exchange(get(closing)))[0] == 200


async def test_a_long_head_with_an_offer_has_the_limit_of_others(start_http: StartHttp) -> None:
    router = await start_http()
    long = OFFERS["h2c"] + b"y: " + b"y" * 66_000 + b"\r\n"
    assert status_and_body(await router.exchange(get(long)))[0] == 431


async def test_no_tunnel_is_opened(start_http: StartHttp) -> None:
    router = await start_http()
    for target in (b"a:80", b"/version"):
        answer = await router.exchange(b"CONNECT " + target + b" HTTP/1.1\r\nhost: a\r\n\r\n" + SMUGGLED)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert status_and_body(answer)[0] == 400


async def test_however_a_request_is_cut_it_is_read_as_without_its_offer(start_http: StartHttp) -> None:
    router: HttpRouter = await start_http()
    head, body = post(OFFERS["h2c"])
    whole = get(OFFERS["websocket"]) + head + body
    async with router.connection() as (reader, writer):
        for cut in range(1, len(whole), 7):
            writer.write(whole[:cut])
            await writer.drain()
            writer.write(whole[cut:])
            assert b'"version"' in await one_answer(reader)
            assert b'"tokens"' in await one_answer(reader)


NAMES = st.from_regex(rb"[a-z][a-z0-9-]{0,8}", fullmatch=True)
VALUES = st.from_regex(rb"[!-~]{0,12}", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(headers=st.lists(st.tuples(NAMES | st.just(b"upgrade"), VALUES)))
def test_the_head_keeps_all_but_the_offer(headers: list[tuple[bytes, bytes]]) -> None:
    first, *lines = head_without_upgrade(b"POST", b"/a?b", "1.1", headers).split(b"\r\n")
    assert first == b"POST /a?b HTTP/1.1"
    assert lines[-2:] == [b"", b""]
    kept = [tuple(line.split(b": ", 1)) for line in lines[:-2]]
    assert kept == [header for header in headers if header[0] != b"upgrade"]
