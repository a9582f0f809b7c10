"""What a client's program can read of an error, over a real socket."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lorrery.service.errors import Conflict, InvalidRequest, Overloaded, Reason, RequestError, UnknownName
from lorrery.service.network import status

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


@pytest.fixture
async def server() -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server()
    yield server
    await server.stop(None)


async def refused(server: grpc.aio.Server, error: RequestError, message: str | None = None) -> grpc.aio.AioRpcError:
    """Return what a client gets of a call that ends with `error`, through a server that passes another's on."""

    async def fail(_request: bytes, context: status.Context) -> bytes:
        await status.abort(context, error, message)

    async def pass_on(request: bytes, context: status.Context) -> bytes:
        try:
            return await channel.unary_unary("/test/Fail")(request)
        except grpc.aio.AioRpcError as found:
            await status.pass_on(context, found)

    handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in (("Fail", fail), ("PassOn", pass_on))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/PassOn")(b"", timeout=60)
    return caught.value


def details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo | None]:
    found = rpc_status.from_call(error)
    assert isinstance(found, status_pb2.Status)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert found.details[0].Unpack(info)
    return info, retry if len(found.details) > 1 and found.details[1].Unpack(retry) else None


async def test_an_error_says_reason_domain_and_facts_beside_its_text(server: grpc.aio.Server):
    error = await refused(server, Conflict("known with rank 8", field="rank", value=16, known=8))
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "known with rank 8")
    info, retry = details(error)
    assert (info.reason, info.domain) == ("ADAPTER_EXISTS", "lorrery")
    assert dict(info.metadata) == {"field": "rank", "value": "16", "known": "8"}
    assert retry is None


async def test_what_may_pass_says_when_to_try_again(server: grpc.aio.Server):
    _, retry = details(await refused(server, Overloaded("full", Reason.QUEUE_FULL)))
    assert retry is not None
    assert retry.retry_delay.seconds == 1


async def test_text_can_be_withheld_and_need_not_be_ascii(server: grpc.aio.Server):
    error = await refused(server, UnknownName("no such adapter: 'ü'"), "no such adapter: 'ä'")
    assert error.details() == "no such adapter: 'ä'"
    assert details(error)[0].reason == "UNKNOWN_ADAPTER"


def test_every_reason_that_helps_to_retry_has_a_status_that_says_so():
    statuses = {kind.usual_reason: status.GRPC_STATUS[kind] for kind in status.GRPC_STATUS}
    for reason in status.RETRY_SECONDS.keys() & statuses.keys():
        assert statuses[reason] in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


def test_the_page_of_errors_lists_every_reason_with_its_retry():
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {reason: (code, retry.strip()) for code, reason, retry in rows}
    assert listed.keys() == set(Reason)
    for reason in Reason:
        code, retry = listed[reason]
        assert retry == (f"{seconds} s" if (seconds := status.RETRY_SECONDS.get(reason)) else "no"), reason
        assert code in {known.name for known in status.GRPC_STATUS.values()}, reason
    for kind, code in status.GRPC_STATUS.items():
        assert listed[kind.usual_reason][0] == code.name


def test_a_status_fits_into_headers_whatever_it_says() -> None:
    wide = "\U0001f9a0" * 5000
    error = InvalidRequest(f"adapter_id is {wide}", field="adapter_id", value=wide, limit=512, known=wide)
    answer = status.status_of(error)
    assert answer.message.startswith("adapter_id is \U0001f9a0")
    assert len(quote(answer.message)) + answer.ByteSize() * 4 // 3 < 8192
