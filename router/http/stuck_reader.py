"""Cuts a connection whose client has taken no data for too long.

A normal close would wait until the client has taken what is written, possibly for ever, and hold it in memory. The
unread bytes are compared only while nothing can be added, because the writer is paused or the response complete, so an
unchanged buffer means that nothing is taken. Time is counted in checks, so that a suspended router does not cut its
clients.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

from lorrery.service.telemetry.log import get_logger

LOOKS = 6
TIMEOUT_LOOKS = 4
"""Checks within the time-out.

`LOOKS` is higher, so that a stream's own cut (`service.network.calls`), which has an error and is counted, comes
first.
"""

_NO_LINGER = struct.pack("ii", 1, 0)
"""Makes a close reset the connection; the kernel would otherwise keep unsent data for minutes."""

_log = get_logger("router.http")


class ReaderWatch:
    """Watches the unread output of one client.

    Args:
        transport: of the connection.
        unread_bytes: returns the bytes written that the client has not taken.
        loop: of the transport.
        timeout_seconds: how long a client may take nothing; its connection is cut after one and a half times as long.
    """

    __slots__ = ("_before_bytes", "_look_seconds", "_loop", "_num_same", "_timer", "_transport", "_unread_bytes")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        unread_bytes: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        timeout_seconds: float,
    ) -> None:
        self._transport, self._unread_bytes, self._loop = transport, unread_bytes, loop
        self._look_seconds = timeout_seconds / TIMEOUT_LOOKS
        self._timer: asyncio.TimerHandle | None = None
        self._before_bytes = self._num_same = 0

    def begin(self) -> None:
        """Start to watch, if not watching yet; nothing more may be written until `end`."""
        if self._timer is None and (unread := self._unread_bytes()):
            self._before_bytes, self._num_same = unread, 0
            self._timer = self._loop.call_later(self._look_seconds, self._look)

    def end(self) -> None:
        """Stop watching: more may be written, or the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        unread = self._unread_bytes()
        if not unread:
            return
        self._num_same = self._num_same + 1 if unread == self._before_bytes else 0
        self._before_bytes = unread
        if self._num_same == LOOKS:
            _log.info("http_reader_stuck", unread_bytes=unread, timeout_seconds=TIMEOUT_LOOKS * self._look_seconds)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._look_seconds, self._look)
