"""What a server answers that is sent no message, none that can be read, or whose servicer raises."""

from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio
import pytest
from google.protobuf.struct_pb2 import Value
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lorrery.service.errors import Conflict
from lorrery.service.network import status
from lorrery.service.network.server import new_server

BROKEN = b"\x0b"


async def _echo(request: Value, _context: status.Context) -> Value:
    if request.string_value == "bug":
        raise ZeroDivisionError("the price of sugar")
    return request


async def _last(requests: AsyncIterator[Value], _context: status.Context) -> Value:
    value = Value()
    async for value in requests:
        if value.bool_value:
            raise ExceptionGroup("of tasks", [Conflict("twice")])
    return value


async def _each(requests: AsyncIterator[Value], _context: status.Context) -> AsyncIterator[Value]:
    async for value in requests:
        yield value


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = new_server()
    coders = {"request_deserializer": Value.FromString, "response_serializer": Value.SerializeToString}
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo, **coders),
        "Last": grpc.stream_unary_rpc_method_handler(_last, **coders),
        "Each": grpc.stream_stream_rpc_method_handler(_each, **coders),
    }
    server.add_registered_method_handlers("test", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def ending(channel: grpc.aio.Channel, method: str, messages: Iterable[bytes]) -> tuple[grpc.StatusCode, str, str]:
    """Return status, text and reason with which a call of these messages ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.stream_unary(f"/test/{method}")(iter(messages), timeout=60)
    found, info = rpc_status.from_call(caught.value), error_details_pb2.ErrorInfo()
    assert isinstance(found, status_pb2.Status)
    assert found.details[0].Unpack(info)
    return caught.value.code(), caught.value.details() or "", info.reason


@pytest.mark.parametrize("method", ["Echo", "Last", "Each"])
async def test_a_message_that_cannot_be_read_is_an_invalid_argument_and_no_line_in_the_log(
    channel: grpc.aio.Channel, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text, reason = await ending(channel, method, [BROKEN])
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE")
    assert text.startswith("the message cannot be read: ")
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


async def test_a_call_without_its_message_ends(channel: grpc.aio.Channel) -> None:
    code, text, _ = await ending(channel, "Echo", [])
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message; it takes one")


async def test_an_error_of_a_request_that_a_task_raises_is_the_status_of_the_call(channel: grpc.aio.Channel) -> None:
    message = Value(bool_value=True).SerializeToString()
    assert await ending(channel, "Last", [message]) == (grpc.StatusCode.ALREADY_EXISTS, "twice", "ADAPTER_EXISTS")


async def test_a_bug_is_internal_and_its_text_stays_in_the_log(channel: grpc.aio.Channel) -> None:
    code, text, reason = await ending(channel, "Echo", [Value(string_value="bug").SerializeToString()])
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "sugar" not in text
