"""The server's side of `network.py`: what `grpc.aio.Server` and its contexts do, as far as services use them.

A service's own `CallGuard` stands before the servicers.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from lorrery.service.network.calls import CallGuard
from tests.virtual.clock import Host
from tests.virtual.network import Call, End, Network


class _Context:
    """`grpc.aio.ServicerContext`, as far as services use it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.ended = False

    async def write(self, message: Any) -> None:
        if self.ended or self._gone:
            raise grpc.aio.UsageError("RPC already finished.")
        await self._call.down.write(self._call.method.server_serialize(message))

    @property
    def _gone(self) -> bool:
        return self._call.up.is_cancelled

    async def send_initial_metadata(self, _metadata: Any) -> None:
        """Nothing of it is read here."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.finish(End(code, details, tuple(trailing_metadata or ())))
        raise grpc.aio.AbortError

    def finish(self, end: End) -> None:
        if not self.ended:
            self.ended = True
            self._call.down.send(end)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._call.metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else deadline - self._call.network.loop.clock.now

    def peer(self) -> str:
        return "virtual"


class Server:
    """A server at one address; takes servicers as `grpc.aio.Server` does."""

    def __init__(self, network: Network, host: Host) -> None:
        self.host = host
        self.num_calls: dict[str, int] = {}  # by method, of which a message has been read
        self._network = network
        self._handlers: dict[str, Any] = {}
        self._guard = CallGuard()
        self._serving: dict[asyncio.Task[None], None] = {}
        self._stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Take what generated code registers; `add_registered_method_handlers` has the same again."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def listen(self, address: str) -> None:
        self._network.servers[address] = self

    def begin(self, call: Call) -> None:
        """Serve a call that has got here."""
        if not self.host.alive or self._stopping:
            call.cut(self._network.delay(self._network.rng), 0.0)
        elif not call.over:
            task = call.task = self.host.run(self._serve(call))
            self._serving[task] = None
            task.add_done_callback(self._serving.pop)
            # A client that goes is noticed wherever its handler is.
            call.up.on_end = lambda end: task.cancel() if end.cancelled else None
            if call.up.is_cancelled:
                task.cancel()

    async def _serve(self, call: Call) -> None:
        method = call.method.name
        context = _Context(call)

        async def continuation(_details: Any) -> Any:
            return self._handlers.get(method)

        handler: Any = await self._guard.intercept_service(continuation, _Details(method))
        call.method.server_serialize = handler.response_serializer
        try:
            answer = await (handler.stream_stream or handler.stream_unary)(self._requests(call, handler), context)
            if handler.stream_unary is not None and not context.ended:
                await context.write(answer)
            context.finish(End(grpc.StatusCode.OK))
        except grpc.aio.AbortError:
            pass
        finally:
            context.finish(End(grpc.StatusCode.CANCELLED, "the handler was cancelled"))

    async def _requests(self, call: Call, handler: Any) -> AsyncIterator[Any]:
        first = True
        while not isinstance(message := await call.up.read(), End):
            self.num_calls[call.method.name] = self.num_calls.get(call.method.name, 0) + first
            first = False
            yield handler.request_deserializer(message)
        if message.cancelled:
            await asyncio.get_running_loop().create_future()  # the handler is being cancelled

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, and end those that are left after the grace."""
        self._stopping = True
        if self._serving:
            await asyncio.wait(list(self._serving), timeout=grace_seconds)
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(list(self._serving))


@dataclass(frozen=True)
class _Details:
    method: str
