"""What a connection may cost: time, bytes, and their number."""

import asyncio
import gzip
import json
import logging
import re
import time

import pytest

from tests.cluster.harness import wait_until
from tests.router.http.conftest import TIMEOUT_SECONDS, StartHttp, one_answer, rest_of

GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "hello"}'
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def refused(answer: bytes) -> int:
    """Return the status of an answer, which has a reason."""
    status, content = int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])
    error = content.get("error", {"message": content.get("detail"), "code": status})
    assert (error["code"], bool(error["message"])) == (status, True)
    return status


async def test_a_request_that_comes_too_slowly_is_told_so_and_cut(start_http: StartHttp) -> None:
    router = await start_http(router={"http_request_seconds": 0.3})
    slow_head, slow_body = GET[:-4], WHOLE[:-3]
    for sent in (slow_head, slow_body):
        begun = time.monotonic()
        async with router.connection() as (reader, writer):

            async def drip(writer: asyncio.StreamWriter = writer) -> None:
                while True:
                    await asyncio.sleep(0.1)  # never long without a byte
                    writer.write(b" ")

            writer.write(sent)
            dripping = asyncio.create_task(drip()) if sent is slow_head else None
            answer = await rest_of(reader)
            assert time.monotonic() - begun >= 0.2
            if dripping is not None:
                dripping.cancel()
            assert refused(answer) == 408


async def test_a_second_request_has_its_time_from_its_first_byte(start_http: StartHttp) -> None:
    router = await start_http(router={"http_request_seconds": 0.3})
    async with router.connection() as (reader, writer):
        for _ in range(2):
            writer.write(WHOLE)
            assert b"200 OK" in await one_answer(reader)
        writer.write(b"\r\n")  # no request: the time runs all the same
        assert await rest_of(reader) == b""
    async with router.connection() as (reader, writer):
        writer.write(WHOLE)
        assert b"200 OK" in await one_answer(reader)
        writer.write(WHOLE[:-1])
        assert refused(await rest_of(reader)) == 408


async def test_a_silent_connection_is_closed_without_a_word(start_http: StartHttp) -> None:
    router = await start_http(router={"http_request_seconds": 0.2, "http_idle_seconds": 0.2})
    assert await router.exchange(b"") == b""
    async with router.connection() as (reader, writer):
        writer.write(GET)
        assert b"200 OK" in await one_answer(reader)
        assert await rest_of(reader) == b""


async def test_connections_over_the_limit_hear_why_they_are_closed(start_http: StartHttp) -> None:
    router = await start_http(router={"http_max_connections": 2})
    async with router.connection() as (reader, writer), router.connection() as (other, other_writer):
        for one, its_writer in ((reader, writer), (other, other_writer)):
            its_writer.write(GET)
            assert b"200 OK" in await one_answer(one)
        assert refused(await router.exchange(GET)) == 503
    closing = GET.replace(b"host: localhost", b"host: localhost\r\nconnection: close")

    async def is_room() -> bool:
        return b"200 OK" in await router.exchange(closing)

    await wait_until(is_room)


async def test_a_head_without_end_is_refused(start_http: StartHttp) -> None:
    router = await start_http()
    for head in (
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 20_000,
    ):
        assert refused(await router.exchange(head)) == 431


async def test_a_head_that_is_whole_has_the_same_limit(start_http: StartHttp) -> None:
    router = await start_http()
    long_target = GET.replace(b"/version", b"/version?" + b"x" * 70_000)
    long_header = GET.replace(b"host: localhost", b"host: localhost\r\ny: " + b"y" * 66_000)
    many_headers = GET.replace(b"host: localhost", b"host: localhost" + b"\r\nabc: de" * 8_000)
    for head in (long_target, long_header, many_headers):
        assert refused(await router.exchange(head)) == 431
    async with router.connection() as (reader, writer):
        for part in (GET, long_header[:16_000], long_header[16_000:32_000], long_header[32_000:]):
            writer.write(part)
            await writer.drain()
        assert b"200 OK" in await one_answer(reader)
        assert refused(await rest_of(reader)) == 431
    closing = GET.replace(b"host: localhost", b"host: localhost\r\nconnection: close\r\ny: " + b"y" * 60_000)
    assert (await router.exchange(closing)).startswith(b"HTTP/1.1 200 OK")


async def test_an_error_of_the_connection_has_a_request_id_too(start_http: StartHttp) -> None:
    router = await start_http(router={"http_request_seconds": 0.3})
    named = GET.replace(b"host: localhost", b"host: localhost\r\nx-request-id: mine")
    for sent, status, request_id in (
        (b"no HTTP\r\n\r\n", 400, b""),
        (named.replace(b"host: localhost", b"host: localhost\r\nhost: y"), 400, b"mine"),
        (named.replace(b"mine", b"mine\r\ntransfer-encoding: gzip"), 501, b"mine"),
        (named.replace(b"mine", b"mine\r\ny: " + b"y" * 66_000), 431, b"mine"),
        (WHOLE.replace(b"host: localhost", b"host: localhost\r\nx-request-id: mine")[:-1], 408, b"mine"),
        (named + b"no HTTP\r\n\r\n", 400, b""),  # behind a request that has an id
    ):
        head, *others = reversed((await router.exchange(sent)).split(b"HTTP/1.1 "))
        assert int(head.split()[0]) == status
        (found,) = re.findall(rb"\r\nx-request-id: ([^\r]*)\r\n", head)
        assert found == request_id or (not request_id and re.fullmatch(rb"[0-9a-f]{32}", found)), found
        assert len(others) == 1 + sent.count(b"no HTTP") * sent.count(b"mine")


async def test_a_target_that_is_no_url_is_told_so(start_http: StartHttp, caplog: pytest.LogCaptureFixture) -> None:
    router = await start_http()
    for target in (b"http://", b"http://[::1", b"http://a:99999999/"):
        sent = b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert refused(await router.exchange(sent)) == 400, target
    assert refused(await router.exchange(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n")) == 400
    async with router.connection() as (reader, writer):
        writer.write(GET)
        assert b"200 OK" in await one_answer(reader)
        writer.write(b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert refused(await rest_of(reader)) == 400
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]


async def test_what_is_refused_behind_requests_leaves_them_their_answers(start_http: StartHttp) -> None:
    router = await start_http()
    chunked = POST + b"transfer-encoding: chunked\r\n\r\nno length\r\n"
    for behind in (b"\0garbage\r\n\r\n", b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n", chunked):
        for num_before in (0, 1, 3):
            async with router.connection() as (reader, writer):
                writer.write(WHOLE * num_before + behind + GET)
                for _ in range(num_before):
                    assert b"200 OK" in await one_answer(reader)
                assert refused(await rest_of(reader)) == 400
    async with router.connection() as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % (len(BODY) - 3) + BODY)
        assert refused(await one_answer(reader)) == 400
        assert refused(await rest_of(reader)) == 400


async def test_what_is_no_http_is_told_so(start_http: StartHttp) -> None:
    router = await start_http()
    assert refused(await router.exchange(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")) == 400
    twice = POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello"
    assert refused(await router.exchange(twice)) == 400


@pytest.mark.parametrize(
    ("head", "status", "why"),
    [
        (b"GET /version HTTP/1.1\r\n", 400, "0 headers host; send one"),
        (b"GET /version HTTP/1.1\r\nhost: a\r\nhost: b\r\n", 400, "2 headers host; send one"),
        (b"GET /version HTTP/1.0\r\nhost: a\r\nhost: b\r\n", 400, "2 headers host; send one"),
        (POST + b"transfer-encoding: gzip, chunked\r\n", 501, "'gzip, chunked'; chunked is the only one"),
        (POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", 501, "'gzip'; chunked is the only one"),
    ],
)
async def test_a_head_that_others_may_read_otherwise_is_refused(
    start_http: StartHttp, head: bytes, status: int, why: str
) -> None:
    router = await start_http()
    answer = await router.exchange(WHOLE + head + b"\r\n5\r\nhello\r\n0\r\n\r\n")
    whole, refused = answer.split(b"HTTP/1.1 ")[1:]
    assert whole.startswith(b"200 OK")
    assert refused.startswith(b"%d " % status)
    assert why in json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_requests_are_counted_by_route_method_and_status(start_http: StartHttp) -> None:
    router = await start_http()
    nothing = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
    long = POST + b"content-length: %d\r\n\r\n" % 10**12
    for sent in (WHOLE, WHOLE, POST + b"content-length: 1\r\n\r\n{", nothing, GET, long):
        async with router.connection() as (reader, writer):
            writer.write(sent)
            await one_answer(reader)
    shown = (await router.exchange(b"GET /metrics HTTP/1.0\r\n\r\n")).decode().splitlines()
    assert {line for line in shown if line.startswith("http_requests_total") and not line.endswith(" 0.0")} == {
        'http_requests_total{handler="/tokenize",method="POST",status="2xx"} 2.0',
        'http_requests_total{handler="/tokenize",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="POST",status="4xx"} 1.0',
    }
    assert 'http_request_duration_seconds_count{handler="/tokenize",method="POST"} 3.0' in shown
    assert "http_request_duration_highr_seconds_count 5.0" in shown


async def test_http_1_0_needs_no_host_and_gets_no_chunks(start_http: StartHttp) -> None:
    router = await start_http()
    head, _, content = (await router.exchange(b"GET /metrics HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    assert content.startswith(b"# HELP")


async def test_requests_in_a_row_are_answered_in_order(start_http: StartHttp) -> None:
    router = await start_http()
    async with router.connection() as (reader, writer):
        writer.write(GET + WHOLE + GET)
        answers = [await one_answer(reader) for _ in range(3)]
    assert [b'"version"' in answer for answer in answers] == [True, False, True]
    assert b'"tokens"' in answers[1]


async def test_many_requests_in_a_row_are_answered_too(start_http: StartHttp) -> None:
    router = await start_http()
    async with router.connection() as (reader, writer):
        writer.write(WHOLE * 50)
        answers = [await one_answer(reader) for _ in range(50)]
    assert len({answer.partition(b"\r\n\r\n")[2] for answer in answers}) == 1
    closing = GET.replace(b"host: localhost", b"host: localhost\r\nconnection: close")
    answer = await router.exchange(WHOLE * 20 + closing)
    assert answer.count(b"HTTP/1.1 200 OK") == 21


async def test_a_client_may_wait_for_leave_to_send_its_body(start_http: StartHttp) -> None:
    router = await start_http()
    head = POST + b"expect: 100-continue\r\n"
    async with router.connection() as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(BODY))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert b"200 OK" in await one_answer(reader)
    async with router.connection() as (reader, writer):
        writer.write(head + b"content-length: 10000000000\r\n\r\n")
        assert refused(await rest_of(reader)) == 413


async def test_only_json_is_read(start_http: StartHttp) -> None:
    router = await start_http()
    closing = b"connection: close\r\ncontent-length: %d\r\n" % len(BODY)
    for kind in (
        b"",
        b"content-type: text/plain\r\n",
        b"content-type: application/x-www-form-urlencoded\r\n",
        b"content-type: application/vnd.api+json\r\n",
    ):
        sent = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + kind + closing + b"\r\n" + BODY
        assert refused(await router.exchange(sent)) == 400
    for kind in (b"application/json; charset=utf-8", b"Application/JSON"):
        sent = (
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: " + kind + b"\r\n" + closing + b"\r\n" + BODY
        )
        assert b"200 OK" in await router.exchange(sent)


async def test_a_body_is_never_unpacked(start_http: StartHttp) -> None:
    router = await start_http()
    head = POST + b"connection: close\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    packed = gzip.compress(BODY)
    assert refused(await router.exchange(head % len(packed) + packed)) == 400
    assert b"200 OK" in await router.exchange(head % len(BODY) + BODY)


async def test_a_slash_behind_a_route_is_redirected(start_http: StartHttp) -> None:
    router = await start_http()
    get = GET.replace(b"/version", b"/v1/models/?a=b").replace(
        b"host: localhost", b"host: localhost\r\nconnection: close"
    )
    post = get.replace(b"GET /v1/models/", b"POST /v1/completions/")
    for sent, location in ((get, b"http://localhost/v1/models?a=b"), (post, b"http://localhost/v1/completions?a=b")):
        answer = await router.exchange(sent)
        assert answer.startswith(b"HTTP/1.1 307 ")
        assert b"\r\nlocation: " + location + b"\r\n" in answer


async def test_every_answer_has_an_id_the_client_s_own_if_there_is_one(start_http: StartHttp) -> None:
    router = await start_http()
    async with router.connection() as (reader, writer):
        writer.write(GET.replace(b"host: localhost", b"host: localhost\r\nx-request-id: mine"))
        assert b"x-request-id: mine\r\n" in await one_answer(reader)
        writer.write(b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await one_answer(reader)
        assert refused(answer) == 404
        assert b"x-request-id: " in answer


async def test_pages_of_other_sites_may_call_where_the_settings_name_them(start_http: StartHttp) -> None:
    asks = b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: https://a.example\r\n"
    asks += b"access-control-request-method: POST\r\nconnection: close\r\n\r\n"
    closed = await start_http()
    assert b"access-control-allow-origin" not in await closed.exchange(asks)
    router = await start_http(router={"http_allowed_origins": ["https://a.example"]})
    assert b"access-control-allow-origin: https://a.example" in await router.exchange(asks)
    assert b"access-control-allow-origin" not in await router.exchange(asks.replace(b"a.example", b"b.example"))
