"""The first message of a stream, which identifies the peer."""

from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import grpc.aio

from lorrery.service.clocks import AwakeClock
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import scheduler_pb2 as pb

HELLO_SECONDS = 10.0
"""How long a stream may be open before its hello."""

_Request = TypeVar("_Request", pb.RouteRequest, pb.AttachRequest)
_Response = TypeVar("_Response", pb.RouteResponse, pb.AttachResponse)


async def first_message(
    requests: AsyncIterator[_Request], context: grpc.aio.ServicerContext[_Request, _Response], awake: AwakeClock
) -> _Request:
    """Return a stream's first message, which must be a hello and come in time.

    Raises:
        InvalidRequest: it is not a hello.
        AbortError: it did not come; the stream has its status.
    """
    try:
        first = await awake.within(HELLO_SECONDS, anext(requests, None))
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS:g} s")
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequest("the first message must be hello", field="hello")
    return first
