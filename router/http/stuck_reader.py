"""A connection whose client has stopped reading: cut once the client has taken nothing for too long.

Closing it would wait until the client has taken what is written, which may be never, and hold that in memory as long.
What still waits is compared while nothing can be added: the writer is paused, or the answer is whole. So a buffer that
stays as it is means that nothing is taken. Time is counted in looks: a process that was stopped itself blames nobody.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

from lorrery.chassis.log import get_logger

LOOKS = 6
TIMEOUT_LOOKS = 4
"""Looks within the time-out. There are more, so that a stream's own cut (`chassis.writes`) has a name and is counted
before its connection goes."""

_NO_LINGER = struct.pack("ii", 1, 0)
"""A close resets the connection, where the kernel would hold what it has to send for minutes more."""

_log = get_logger("router.http")


class ReaderWatch:
    """Watches what one client leaves unread.

    Args:
        transport: of the connection.
        unread_bytes: returns how much is written that the client has not taken.
        loop: of the transport.
        timeout_seconds: how long a client may take nothing; its connection is cut after half as long again.
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
        """Watch from now on, if it does not yet: nothing more is written until `end`."""
        if self._timer is None and (unread := self._unread_bytes()):
            self._before_bytes, self._num_same = unread, 0
            self._timer = self._loop.call_later(self._look_seconds, self._look)

    def end(self) -> None:
        """Watch no more: there may be more to write, or the connection is gone."""
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
