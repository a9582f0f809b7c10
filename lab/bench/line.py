"""A network link that can be cut: a TCP proxy on loopback that stops forwarding, or drops its connections."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Line:
    """Forwards connections to a target; use with `async with`.

    Args:
        target: HOST:PORT.

    Attributes:
        address: HOST:PORT to dial instead.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop listening, and drop every connection."""
        assert self._server is not None
        self._server.close()
        self.mend()
        self.drop()

    def cut(self) -> None:
        """Forward nothing, in either direction; connections stay open, and new ones wait."""
        self._open.clear()

    def mend(self) -> None:
        """Resume forwarding, including data received meanwhile."""
        self._open.set()

    def drop(self) -> None:
        """End every connection at once."""
        for end in self._ends:
            end.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError):
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends = (writer, far_writer)
            self._ends.update(ends)
            try:
                await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
            finally:
                self._ends.difference_update(ends)
                for end in ends:
                    end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
