"""Listens for HTTP: uvicorn does the protocol, without what it would do to the process (signals, logs, the loop)."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lorrery.chassis.server import dialable, listening_socket

_SEND_BUFFER_BYTES = 1 << 17
"""What the kernel takes for a reader that has stopped; by itself it would let that grow to megabytes."""
_CLOSE_SECONDS = 1
"""How long connections may take to end once the server stops."""


class WebServer:
    """Serves an app, in the loop that runs it.

    Args:
        app: answers.
        address: HOST:PORT to listen at; port 0 takes a free one.
        setting: where `address` comes from, for messages.
        options: more for uvicorn.
    """

    def __init__(self, app: ASGIApp, address: str, setting: str, **options: Any) -> None:  # noqa: ANN401  uvicorn checks them
        self._address, self._setting = address, setting
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it has a line for each request that is none
        config = uvicorn.Config(
            app,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            **options,
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None

    def listen(self) -> str:
        """Take the address, and return it as it can be dialled.

        Raises:
            LorreryError: it cannot be taken.
        """
        self._socket = listening_socket(self._setting, self._address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted ones inherit it
        return dialable(self._address, self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._socket is not None
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="uvicorn")
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
