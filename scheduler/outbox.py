"""Messages to one worker, in order, until its stream's writer takes them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from lorrery.scheduler.wire_workers import ToWorker


class Outbox:
    """See the module."""

    def __init__(self) -> None:
        self._messages: deque[ToWorker] = deque()
        self._wake = asyncio.Event()

    def send(self, message: ToWorker) -> None:
        """Queue a message; never waits."""
        self._messages.append(message)
        self._wake.set()

    async def write_all(self, write: Callable[[ToWorker], Awaitable[None]]) -> None:
        """Write queued messages, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages:
                await write(self._messages.popleft())
