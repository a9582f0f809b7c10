"""One router as the scheduler sees it: what it owns, and what is on its way to it.

The scheduler never waits for a router inside a step: outcomes gather here, and one writer sends whatever has gathered
in one message. A router that keeps up gets one message per step; a slow one gets several steps merged; one that is so
slow that `max_pending_tokens` gather is cut off, and resumes its streams on a new connection.
"""

import asyncio
from collections.abc import Awaitable, Callable

from lorrery.chassis.clock import DeviceClock
from lorrery.scheduler import wire
from lorrery.scheduler.core.refusals import Refusal


class RouterLink:
    """The way back to one router.

    Args:
        router_id: as it announced itself.
        clock: stamps messages.
        max_pending_tokens: bound on what may gather.

    Attributes:
        owned: the scheduler's handles of its requests, by its own.
    """

    def __init__(self, router_id: str, clock: DeviceClock, max_pending_tokens: int) -> None:
        self.router_id = router_id
        self.owned: dict[int, int] = {}
        self._clock = clock
        self._max_pending_bytes = 4 * max_pending_tokens
        self._handles: list[bytes] = []
        self._token_ids: list[bytes] = []
        self._pending_bytes = 0
        self._step_ps = 0
        self._finished: list[wire.FinishedMessage] = []
        self._others: list[wire.ToRouter] = []
        self._wake = asyncio.Event()
        self._overrun = False

    def tokens(self, handles_u32: bytes, token_ids_u32: bytes, step_ps: int) -> None:
        """Send the tokens of one step."""
        self._handles.append(handles_u32)
        self._token_ids.append(token_ids_u32)
        self._step_ps = step_ps
        self._pending_bytes += len(handles_u32)
        self._overrun = self._overrun or self._pending_bytes > self._max_pending_bytes
        self._wake.set()

    def finished(self, message: wire.FinishedMessage) -> None:
        """Send the end of a sequence, after its tokens."""
        self._finished.append(message)
        self._wake.set()

    def refused(self, handle: int, refusal: Refusal) -> None:
        """Send that a request ends without further tokens."""
        self.send(wire.refused(handle, refusal))

    def send(self, message: wire.ToRouter) -> None:
        """Send anything else."""
        self._others.append(message)
        self._wake.set()

    async def write_all(self, write: Callable[[wire.ToRouter], Awaitable[None]]) -> None:
        """Write what gathers, until cancelled; returns if too much gathers."""
        while not self._overrun:
            await self._wake.wait()
            self._wake.clear()
            for message in self._take():
                await write(message)

    def _take(self) -> list[wire.ToRouter]:
        messages: list[wire.ToRouter] = []
        if self._handles or self._finished:
            handles_u32, token_ids_u32 = b"".join(self._handles), b"".join(self._token_ids)
            messages.append(
                wire.tokens(self._clock.now_ps(), self._step_ps, handles_u32, token_ids_u32, self._finished)
            )
            self._handles, self._token_ids, self._finished = [], [], []
            self._pending_bytes = 0
        messages += self._others
        self._others = []
        return messages
