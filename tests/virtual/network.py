"""gRPC between virtual hosts: the calls of `grpc.aio`, on connections that are slow, break, and lose what they carry.

Services call it as they do the library: `Network.channel` stands in for `grpc.aio.insecure_channel`, a `Server`
(`server.py`) takes the servicers, and messages travel as bytes. Each call is a connection by itself: what one direction
carries arrives in order and late by random times; between calls nothing is in order.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.virtual.clock import HOST, Host, VirtualLoop

if TYPE_CHECKING:
    from tests.virtual.server import Server

WINDOW = 256
"""Messages of one direction that may be unread before a write waits."""
REFUSED_SECONDS = 0.05
"""How often a call that waits for its server looks whether there is one."""

_NOWHERE = Context()
EOF = grpc.aio.EOF


@dataclass(frozen=True)
class End:
    """The last that one side says: half-closed, cancelled, or a status."""

    code: grpc.StatusCode | None = None
    details: str = ""
    metadata: tuple[Any, ...] = ()
    cancelled: bool = False


class _Pipe:
    """One direction of a call."""

    def __init__(self, network: "Network", rng: random.Random, to: Callable[[], Host | None], window: int) -> None:
        self._network, self._rng, self._to, self._window = network, rng, to, window
        self._flying: deque[bytes | End] = deque()
        self._arrived: deque[bytes | End] = deque()
        self._num_unread = 0
        self._last = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()
        self.broken = False
        self.on_end: Callable[[End], None] = lambda end: None

    async def write(self, message: bytes) -> None:
        """Send a message; wait while the reader's window is full."""
        while self._num_unread >= self._window:
            waiter = self._network.loop.create_future()
            self._writers.append(waiter)
            await waiter
        self.send(message)

    def send(self, message: bytes | End) -> None:
        if self.broken:
            return
        self._num_unread += 1
        self._schedule(message, self._network.delay(self._rng))

    def _schedule(self, message: bytes | End, delay: float) -> None:
        self._flying.append(message)
        self._last = max(self._last + 1e-9, self._network.loop.clock.now + delay)
        self._network.loop.call_at(self._last, self._arrive, context=_NOWHERE)

    def _arrive(self) -> None:
        if self.broken:
            return
        host = self._to()
        if host is not None and host.runs_from > self._network.loop.clock.now:  # it stands still; what comes waits
            self._network.loop.call_at(host.runs_from + 1e-6, self._arrive, context=_NOWHERE)
            return
        self.put(self._flying.popleft())

    def put(self, message: bytes | End) -> None:
        """Let a message be there."""
        self._arrived.append(message)
        if isinstance(message, End):
            self.on_end(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def end_now(self, end: End) -> None:
        """Let this be the last that the reader sees, and what is still on its way be lost."""
        self.broken = True
        self._num_unread = 0
        self._free()
        if not self._arrived or self._arrived[-1] != end:
            self.put(end)

    async def read(self) -> bytes | End:
        """Return the next message; an end stays."""
        while not self._arrived:
            self._reader = self._network.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._arrived[0]
        if not isinstance(message, End):
            self._arrived.popleft()
            self._num_unread -= 1
            self._free()
        return message

    @property
    def end(self) -> End | None:
        """The end, once all before it has been read."""
        first = self._arrived[0] if self._arrived else None
        return first if isinstance(first, End) else None

    @property
    def is_cancelled(self) -> bool:
        """Whether the sender has gone."""
        return any(isinstance(message, End) and message.cancelled for message in self._arrived)

    def _free(self) -> None:
        while self._writers:
            waiter = self._writers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class Call:
    """A call, on the side of its client; of any kind."""

    def __init__(
        self,
        network: "Network",
        address: str,
        method: "Method",
        *,
        window: int = WINDOW,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        wait_for_ready: bool = False,
    ) -> None:
        self.network, self.method, self.metadata = network, method, tuple(metadata)
        self.client = HOST.get()
        self.server: Server | None = None
        self.task: asyncio.Task[None] | None = None
        self._address = address
        self._rng = network.next_rng()
        self._cancelled = False
        self._local: End | None = None
        self.deadline = None if timeout is None else network.loop.clock.now + timeout
        self.up = _Pipe(network, self._rng, lambda: None if self.server is None else self.server.host, WINDOW)
        self.down = _Pipe(network, self._rng, lambda: self.client, window)
        network.calls[self] = None
        self._connecting = asyncio.ensure_future(self._connect(wait_for_ready))
        if timeout is not None:
            late = End(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            network.loop.call_later(timeout, self._give_up, late)

    async def _connect(self, wait_for_ready: bool) -> None:
        loop = self.network.loop
        await asyncio.sleep(self.network.delay(self._rng))
        if self.client is not None and not self.client.alive:
            return
        while (server := self.network.servers.get(self._address)) is None or not server.host.alive:
            if not wait_for_ready:
                self._give_up(End(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"))
                return
            await asyncio.sleep(REFUSED_SECONDS * (1 + self._rng.random()))
            if self.over:
                return
        self.server = server
        at = max(loop.clock.now + self.network.delay(self._rng), server.host.runs_from + 1e-6)
        loop.call_at(at, server.begin, self, context=_NOWHERE)

    @property
    def over(self) -> bool:
        return self._cancelled or self._local is not None or self.down.end is not None

    @property
    def _end(self) -> End | None:
        return self._local or self.down.end

    def done(self) -> bool:
        return self.over

    def _give_up(self, end: End) -> None:
        """End the call from this side."""
        if self.over:
            return
        self._local = end
        self.up.send(End(cancelled=True))
        self.down.end_now(end)
        self.network.calls.pop(self, None)

    def cancel(self) -> bool:
        if self.over:
            return False
        self._give_up(End(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        self._cancelled = True
        return True

    async def write(self, message: Any) -> None:
        await asyncio.shield(self._connecting)
        if self.over:
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self.up.write(self.method.serialize(message))
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        if not self.over:
            self.up.send(End())

    async def read(self) -> Any:
        if self.over:
            self._raise_for_status()
            return EOF
        try:
            message = await self.down.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(message, End):
            self.network.calls.pop(self, None)
            self._raise_for_status()
            return EOF
        return self.method.deserialize(message)

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        end = self._end
        assert end is not None
        if end.code is not grpc.StatusCode.OK:
            assert end.code is not None
            raise grpc.aio.AioRpcError(
                end.code, grpc.aio.Metadata(), grpc.aio.Metadata(*end.metadata), details=end.details
            )

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self.read()
        if answer is not EOF:
            await self.read()
        return answer

    def cut(self, seconds_client: float, seconds_server: float) -> None:
        """Break the connection: what is on its way is lost, and each side notices in its own time."""
        loop = self.network.loop
        self.up.broken = self.down.broken = True
        lost = End(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        loop.call_later(seconds_client, self._notice, lost, context=_NOWHERE)
        loop.call_later(seconds_server, self._server_notices, context=_NOWHERE)

    def _notice(self, end: End) -> None:
        host = self.client
        if host is not None and host.runs_from > self.network.loop.clock.now:
            self.network.loop.call_at(host.runs_from + 1e-6, self._notice, end, context=_NOWHERE)
        elif not self.over:
            self.down.end_now(end)
            self.network.calls.pop(self, None)

    def _server_notices(self) -> None:
        host = None if self.server is None else self.server.host
        if host is not None and host.runs_from > self.network.loop.clock.now:
            self.network.loop.call_at(host.runs_from + 1e-6, self._server_notices, context=_NOWHERE)
            return
        self.up.end_now(End(cancelled=True))


@dataclass
class Method:
    name: str
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
    server_serialize: Callable[[Any], bytes] = bytes


class Channel:
    """`grpc.aio.Channel`, to one address."""

    def __init__(self, network: "Network", address: str, window: int = WINDOW) -> None:
        self._network, self._address, self._window = network, address, window

    def _stub(self, path: str, request_serializer: Any, response_deserializer: Any, has_request: bool) -> Any:
        def begin(*request: Any, **options: Any) -> Call:
            if options.get("wait_for_ready") is None:
                options.pop("wait_for_ready", None)
            if options.get("metadata") is None:
                options.pop("metadata", None)
            method = Method(path, request_serializer, response_deserializer)
            call = Call(self._network, self._address, method, window=self._window, **options)
            if has_request:
                call.up.send(request_serializer(request[0]))
                call.up.send(End())
            return call

        return begin

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._stub(path, request_serializer, response_deserializer, False)

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._stub(path, request_serializer, response_deserializer, True)

    unary_unary = unary_stream

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY  # each call connects by itself

    async def close(self) -> None:
        pass


class Network:
    """What connects the hosts.

    Args:
        loop: theirs.
        rng: for how long messages take.
        latency_seconds: the mean of that.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, latency_seconds: float) -> None:
        self.loop, self.rng = loop, rng
        self.servers: dict[str, Server] = {}
        self.calls: dict[Call, None] = {}
        self._latency_seconds = latency_seconds
        self._num_calls = 0
        self._seed = rng.getrandbits(64)

    def next_rng(self) -> random.Random:
        self._num_calls += 1
        return random.Random(self._seed + self._num_calls)

    def delay(self, rng: random.Random) -> float:
        """Draw how long a message takes; one in fifty takes ten times as long."""
        delay = rng.expovariate(1 / self._latency_seconds)
        return 10 * delay if rng.random() < 0.02 else delay

    def channel(self, address: str, options: Any = None, **_: Any) -> Channel:
        """Stand in for `grpc.aio.insecure_channel`."""
        del options
        return Channel(self, address)

    def between(self, *methods: str) -> list[Call]:
        """Return the open calls of these methods, in the order in which they were begun."""
        return [call for call in self.calls if call.method.name.rpartition("/")[2] in methods and not call.over]

    def lose(self, host: Host) -> None:
        """Break every connection of a host whose process has ended."""
        for call in list(self.calls):
            if call.client is host or (call.server is not None and call.server.host is host):
                call.cut(self.delay(self.rng), self.delay(self.rng))
