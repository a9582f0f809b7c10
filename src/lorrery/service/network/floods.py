"""Ends connections to a gRPC server on which much comes that is no call.

gRPC's core bounds the calls that a connection has open, but neither those that the client resets as fast as it begins
them (HTTP/2 rapid reset, CVE-2023-44487), of which it keeps some 14 kB each until Python has taken them from a queue,
nor other frames, such as SETTINGS, all of which it reads and answers. A flood is recognised in four ways:

* Most of the calls that the client began within `LOOK_SECONDS` it ended before their first message, `MAX_EMPTY_CALLS`
  of them, or `MAX_EMPTY_CALLS_OF_USERS` if calls of its connection had messages before.
* Within `LOOK_SECONDS` it called methods that there are not, `MAX_EMPTY_CALLS_OF_USERS` times.
* More than `MAX_WAITING_CALLS` of the server's calls have sent nothing yet; the connection with most of them is ended.
* It sent `MAX_IDLE_BYTES` beyond what it needed: what the kernel received on the connection, less all messages, less
  `BYTES_PER_CALL` for each call that was served, less `IDLE_BYTES_PER_SECOND`. The figure is Linux's; elsewhere this
  rule does not apply.

gRPC in Python closes no connection, so the socket is looked for among the process's, and shut down.
"""

import asyncio
import ctypes
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from urllib.parse import unquote

from lorrery.service.names import Recent
from lorrery.service.telemetry.log import BoundedLog, get_logger

LOOK_SECONDS = 0.25
MAX_EMPTY_CALLS = 20
MAX_EMPTY_CALLS_OF_USERS = 400
"""A client may cancel all that it has just begun."""
MAX_WAITING_CALLS = 2_000
"""A call takes some 40 kB. Clients send its message with it, so few calls wait even when thousands come at once."""
MAX_IDLE_BYTES = 1 << 24
"""gRPC's window and the kernel's buffer of a client that sends large messages are under way at once."""
IDLE_BYTES_PER_SECOND = 1 << 18
BYTES_PER_CALL = 1 << 12

_BUSY = 0.1
"""Share of a core that gRPC's threads must take for a look at all connections to be worth its time."""
_NUM_USERS = 1 << 14
_TRIM_SECONDS = 5.0
"""From the end of a connection until what its calls took is free, and can be given back to the system."""
_BYTES_RECEIVED = slice(128, 136)
"""Of Linux's struct tcp_info: tcpi_bytes_received, a u64."""

_Peer = tuple[str, int]
"""Address and port of a client."""


class Floods:
    """What comes on the connections of one server.

    A `peer` is gRPC's name for a client, such as `ipv4:127.0.0.1:4711`.
    """

    def __init__(self) -> None:
        self._port = 0
        self._begun, self._empty, self._used = Counter[str](), Counter[str](), Counter[str]()
        self._waiting = Counter[str]()
        self._num_waiting = 0
        self._users = Recent[str, None](_NUM_USERS)
        self._ended = set[_Peer]()
        self._others = set[int]()  # inodes of what is open and no connection of the server
        self._trimming: asyncio.TimerHandle | None = None
        self._any_freed = False  # since the last trim
        self._log = BoundedLog(get_logger("service.network.floods"), "connection_ended")

    def call_began(self, peer: str) -> None:
        """Count a call; end the connection with most of those that wait for their message if there are too many."""
        self._begun[peer] += 1
        self._waiting[peer] += 1
        self._num_waiting += 1
        if self._num_waiting > MAX_WAITING_CALLS:
            worst, num = max(self._waiting.items(), key=itemgetter(1))
            self._num_waiting -= self._waiting.pop(worst)
            self._end(_peer_of(worst), f"{num} of {MAX_WAITING_CALLS} calls that have sent nothing")

    def call_waits_no_more(self, peer: str) -> None:
        """Note that a call's first message has come, or that the call ended without one."""
        if (num := self._waiting[peer]) > 0:  # those of an ended connection are forgotten
            self._num_waiting -= 1
            self._waiting[peer] = num - 1
        if num <= 1:
            del self._waiting[peer]

    def call_has_message(self, peer: str) -> None:
        """Note that a call's first message has come."""
        self.call_waits_no_more(peer)
        self._users.put(peer, None)

    def received(self, peer: str, num_bytes: int) -> None:
        """Count a message."""
        self._used[peer] += num_bytes

    def call_served(self, peer: str) -> None:
        """Count a call that ended as it should."""
        self._used[peer] += BYTES_PER_CALL

    def call_was_empty(self, peer: str) -> None:
        """Count a call that its client ended before its first message; end the connection if there are too many."""
        self._empty[peer] += 1
        self._any_freed = True
        num_empty = self._empty[peer]
        if MAX_EMPTY_CALLS <= num_empty > self._begun[peer] / 2 and (
            num_empty >= MAX_EMPTY_CALLS_OF_USERS or peer not in self._users
        ):
            self._end(_peer_of(peer), f"{num_empty} calls without a message within {LOOK_SECONDS:g} s")

    def call_of_no_method(self, peer: str) -> None:
        """Count a call of a method that there is not; end the connection if there are too many."""
        self._begun[peer] += 1
        self._empty[peer] += 1
        self._any_freed = True
        if (num := self._empty[peer]) >= MAX_EMPTY_CALLS_OF_USERS:
            self._end(_peer_of(peer), f"{num} calls of no method within {LOOK_SECONDS:g} s")

    async def watch(self, port: int) -> None:
        """Look after the connections to a port, until cancelled."""
        self._port = port
        idle: dict[_Peer, float] = {}
        before: dict[_Peer, int] | None = None
        at, cpu_at = time.monotonic(), _grpc_seconds()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, cpu_now = time.monotonic(), _grpc_seconds()
            used = Counter({_peer_of(peer): num_bytes for peer, num_bytes in self._used.items()})
            for counted in (self._begun, self._empty, self._used, self._ended):
                counted.clear()
            received = None
            if cpu_now - cpu_at > _BUSY * (now - at):
                received = {peer: _num_received(one) for peer, one in self._connections()}
            if received is not None and before is not None:
                allowed = IDLE_BYTES_PER_SECOND * (now - at)
                come = {peer: num - before.get(peer, 0) - used[peer] - allowed for peer, num in received.items()}
                idle = {peer: max(0.0, idle.get(peer, 0.0) + num) for peer, num in come.items()}
                for peer, num in idle.items():
                    if num > MAX_IDLE_BYTES:
                        self._end(peer, f"{num / 1e6:.0f} MB beyond its calls")
            else:
                idle = {}
            before = received
            at, cpu_at = now, cpu_now

    def _end(self, peer: _Peer | None, why: str) -> None:
        if peer is None or peer in self._ended:  # its last calls are still being taken from the queue
            return
        self._ended.add(peer)
        for its_peer, connection in self._connections():
            if its_peer == peer:
                connection.shutdown(socket.SHUT_RDWR)
                self._log.say("flood", peer=f"{peer[0]}:{peer[1]}", why=why)
        self._trim_later()

    def _trim_later(self) -> None:
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        if self._any_freed:  # a busy service takes long to take the calls of an ended connection from the queue
            self._any_freed = False
            self._trim_later()
        with suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)

    def _connections(self) -> Iterator[tuple[_Peer, socket.socket]]:
        """Yield the server's connections, each open for as long as the caller looks at it."""
        others, self._others = self._others, set()
        numbers: list[int] = []
        with suppress(OSError):  # no descriptor is free
            numbers = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208  no paths are needed
        for number in numbers:
            with suppress(OSError):  # closed meanwhile, or no connection
                inode = os.fstat(number).st_ino
                if inode in others:
                    self._others.add(inode)
                    continue
                copy = os.dup(number)
                try:
                    one = socket.socket(fileno=copy)
                except OSError:
                    os.close(copy)
                    self._others.add(inode)
                    continue
                with one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port:
                        yield _peer(*one.getpeername()[:2]), one
                    else:
                        self._others.add(inode)


def _peer_of(name: str) -> _Peer | None:
    """Return a client from gRPC's name for it; None: not of the network."""
    kind, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    return _peer(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


def _peer(host: str, port: int) -> _Peer:
    return host.removeprefix("::ffff:"), port  # of a socket for both families


def _grpc_seconds() -> float:
    return time.process_time() - time.thread_time()


def _num_received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
    (num_bytes,) = struct.unpack("=Q", info[_BYTES_RECEIVED])
    return int(num_bytes)
