"""How calls of a server begin and end, for all servicers and clients.

By default gRPC's server answers an undecodable message with UNKNOWN and logs a traceback, does the same for a
servicer's exception and sends its text to the client, and leaves a call without a message open for ever. Here, for all
servicers including health and reflection:

    an undecodable message, or none where one is required         INVALID_ARGUMENT, nothing in the log
    none within `MESSAGE_SECONDS`                                 the same
    a `RequestError` raised by a servicer, alone or in a group    its status
    another exception                                             INTERNAL, logged in full, details withheld

So a servicer may raise at any point of its streams.

gRPC's `write` returns once the reader's flow-control window has room for the message, so a reader that stops blocks the
write for as long as its connection lives; `Writes` finds it. Time is counted in ticks of the `UptimeClock`, so that a
suspended process blames no reader, and a write does not read a clock.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from inspect import isasyncgenfunction
from itertools import takewhile
from typing import Any, Generic, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lorrery.service.clocks import UptimeClock
from lorrery.service.errors import Internal, InvalidRequest, RequestError
from lorrery.service.network import status
from lorrery.service.network.floods import Floods
from lorrery.service.telemetry.log import get_logger

MESSAGE_SECONDS = 30.0
"""How long a call may take to send its message, where it has one."""

_Method = Callable[..., Any]
_GONE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""Raised by reads and writes after the client has gone."""
_log = get_logger("service.network.calls")


class CallGuard(grpc.aio.ServerInterceptor):
    """Interceptor in front of every servicer.

    Attributes:
        floods: what comes on the connections of its server.
    """

    def __init__(self) -> None:
        self.floods = Floods()
        self._watching: asyncio.Task[None] | None = None
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._open: set[asyncio.Task[Any]] = set()

    async def all_ended(self, seconds: float) -> None:
        """Return when no call is open, or after `seconds`.

        A stopped server cancels its calls without waiting for them. If the loop then ends, they are cancelled again,
        and gRPC logs a traceback for each.
        """
        if self._watching is not None:
            self._watching.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=seconds)

    def watch(self, port: int) -> None:
        """End connections to the server's port on which much comes that is no call; until `all_ended`."""
        self._watching = asyncio.create_task(self.floods.watch(port), name="floods")

    def call(self, context: status.Context) -> "_Call":
        """Return the bounds of a call, and register the current task as one."""
        if (task := asyncio.current_task()) is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        return _Call(self.floods, context.peer())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a call; None: no such method."""
        method: str = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None and (handler := await continuation(handler_call_details)) is not None:
            guarded = self._guarded[method] = _guard(method, handler, self.call)
        return guarded


class _Call:
    """A call from its begin to its end, as `Floods` counts it."""

    __slots__ = ("_floods", "_has_message", "_peer")

    def __init__(self, floods: Floods, peer: str) -> None:
        self._floods, self._peer, self._has_message = floods, peer, False

    def __enter__(self) -> None:
        _current.set(self)
        self._floods.call_began(self._peer)

    def received(self, num_bytes: int) -> None:
        if not self._has_message:
            self._has_message = True
            self._floods.call_has_message(self._peer)
        self._floods.received(self._peer, num_bytes)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._has_message:
            self._floods.call_waits_no_more(self._peer)
        if kind is None:
            self._floods.call_served(self._peer)
        elif kind is asyncio.CancelledError and not self._has_message:
            self._floods.call_was_empty(self._peer)


_current: ContextVar[_Call | None] = ContextVar("call", default=None)


def _guard(
    method: str, handler: "grpc.RpcMethodHandler[Any, Any]", begin: Callable[[status.Context], "_Call"]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a handler that reads its messages itself; gRPC would decode that of a unary request before any hook."""
    behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    (behaviour,) = cast("list[_Method]", [behaviour for behaviour in behaviours if behaviour is not None])

    async def requested(messages: AsyncIterator[object]) -> object:
        if handler.request_streaming:
            return messages
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                async for message in messages:
                    return message
        except TimeoutError:
            pass
        raise InvalidRequest("the call has no message; it takes one", field="message")

    async def call(messages: AsyncIterator[object], context: status.Context) -> object:
        with begin(context):
            try:
                return await behaviour(await requested(messages), context)
            except Exception as error:
                await _end(method, error, context)

    async def stream(messages: AsyncIterator[object], context: status.Context) -> AsyncIterator[object]:
        with begin(context):
            try:
                async for response in behaviour(await requested(messages), context):
                    yield response
            except Exception as error:
                await _end(method, error, context)

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    guarded: grpc.RpcMethodHandler[Any, Any] = cast("_Method", make)(
        stream if isasyncgenfunction(behaviour) else call,
        request_deserializer=_reads(cast("_Method | None", handler.request_deserializer)),
        response_serializer=handler.response_serializer,
    )
    return guarded


def _reads(deserialize: _Method | None) -> Callable[[bytes], object] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> object:
        if (call := _current.get()) is not None:
            call.received(len(data))
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest(f"the message cannot be read: {error}", field="message") from None

    return read


async def _end(method: str, error: Exception, context: status.Context) -> NoReturn:
    """End a call whose servicer has raised."""
    leaves = _leaves(error)
    aborted = next((leaf for leaf in leaves if isinstance(leaf, grpc.aio.AbortError)), None)
    if aborted is not None:
        raise aborted from None  # it already has a status
    refusal = next((leaf for leaf in leaves if isinstance(leaf, RequestError)), None)
    try:
        if refusal is not None:
            await status.abort(context, refusal)
        for leaf in leaves:
            if isinstance(leaf, _GONE):
                raise leaf
        if isinstance(error, NotImplementedError):  # raised by generated servicers for methods that are not implemented
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
        _log.error("call_failed", method=method, exc_info=error)
        await status.abort(context, Internal(str(error)), "internal error; the service's log has more")
    except _GONE:
        raise asyncio.CancelledError from None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


TICKS = 4
"""Ticks per time-out; a write may therefore last a quarter longer."""

_K = TypeVar("_K")


class Writes(Generic[_K]):
    """The writes under way, at most one per key.

    Args:
        uptime: measures the time.
        timeout_seconds: how long a write may take.
    """

    def __init__(self, uptime: UptimeClock, timeout_seconds: float) -> None:
        self._uptime = uptime
        self._tick_seconds = timeout_seconds / TICKS
        self._tick = 0
        self._begun: dict[_K, int] = {}  # in order of start

    async def write(self, key: _K, writing: Awaitable[None]) -> None:
        """Await a write."""
        self._begun[key] = self._tick
        try:
            await writing
        finally:
            self._begun.pop(key, None)

    async def stuck(self) -> list[_K]:
        """Wait until some writes exceed the time-out; return their keys, once for each write."""
        while True:
            await self._uptime.sleep_until(self._uptime.now() + self._tick_seconds)
            self._tick += 1
            keys = [key for key, _ in takewhile(lambda begun: begun[1] < self._tick - TICKS, self._begun.items())]
            for key in keys:
                del self._begun[key]
            if keys:
                return keys
