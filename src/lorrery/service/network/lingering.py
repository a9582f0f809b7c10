"""Closes connections whose clients may still be sending, without losing the last response.

Closing a socket while data arrives resets the connection, and the client's system drops what it has not read yet. So
the connection is closed in stages (RFC 9112, 9.6): first the sending direction, then, once the client has closed its
own, the whole. Data that arrives meanwhile is read and dropped, up to a bound on time and bytes; nginx bounds the time
only. TLS has no half-close here: the client recognises the end of the response by its length.
"""

import asyncio
from collections.abc import Callable


class LingeringTransport:
    """A connection's transport, as far as uvicorn and the routes use it.

    Args:
        transport: of the connection.
        loop: of the transport.
        is_amid: returns whether the client may still be sending when its connection is closed.
        seconds: how long such a client may go on.
        max_bytes: how much it may send.

    Attributes:
        lingers: whether received data must go to `drop`.
    """

    __slots__ = (
        "_is_amid",
        "_loop",
        "_max_bytes",
        "_timer",
        "_transport",
        "abort",
        "get_extra_info",
        "get_write_buffer_size",
        "lingers",
        "pause_reading",
        "resume_reading",
        "seconds",
        "write",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_amid: Callable[[], bool],
        seconds: float,
        max_bytes: int,
    ) -> None:
        self._transport, self._loop = transport, loop
        self._is_amid = is_amid
        self.seconds, self._max_bytes = seconds, max_bytes
        self._timer: asyncio.TimerHandle | None = None
        self.lingers = False
        self.write: Callable[[bytes], None] = transport.write  # the transport's own method: called once per token
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is written and, if the client may be sending, once it has stopped."""
        if self.is_closing():
            return
        if not self._is_amid():
            self._transport.close()
            return
        self.lingers = True
        self.write = _dropped
        self.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer = self._loop.call_later(self.seconds, self._transport.close)

    def drop(self, data: bytes) -> None:
        """Drop data received after the last response."""
        self._max_bytes -= len(data)
        if self._max_bytes < 0:
            self._transport.close()

    def end(self) -> None:
        """Clean up after the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _dropped(_: bytes) -> None:
    """Write nothing."""
