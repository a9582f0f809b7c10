"""One router as the scheduler sees it: what it owns, and what is on its way to it.

The scheduler never waits for a router inside a step: outcomes gather here, and one writer sends whatever has gathered
in one message. A router that keeps up gets one message per step; a slow one gets several steps merged; one that is so
slow that `max_pending_tokens` gather is cut off, and resumes its streams on a new connection.
"""

import asyncio
from collections.abc import Awaitable, Callable

from lorrery.v1 import scheduler_pb2 as pb

from chassis.clock import DeviceClock
from scheduler.live import Live


class RouterLink:
    """The way back to one router.

    Args:
        router_id: as it announced itself.
        clock: stamps messages.
        max_pending_tokens: bound on what may gather.
    """

    def __init__(self, router_id: str, clock: DeviceClock, max_pending_tokens: int) -> None:
        self.router_id = router_id
        self.owned: dict[int, Live] = {}
        self._clock = clock
        self._max_pending_bytes = 4 * max_pending_tokens
        self._handles: list[bytes] = []
        self._token_ids: list[bytes] = []
        self._pending_bytes = 0
        self._step_ps = 0
        self._finished: list[pb.Finished] = []
        self._others: list[pb.RouteResponse] = []
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

    def finished(self, message: pb.Finished) -> None:
        """Send the end of a sequence, after its tokens."""
        self._finished.append(message)
        self._wake.set()

    def refused(self, handle: int, reason: pb.RefusalReason.ValueType, message: str) -> None:
        """Send that a request ends without further tokens."""
        self.send(pb.RouteResponse(refused=pb.Refused(handle=handle, reason=reason, message=message)))

    def send(self, message: pb.RouteResponse) -> None:
        """Send anything else."""
        self._others.append(message)
        self._wake.set()

    async def write_all(self, write: Callable[[pb.RouteResponse], Awaitable[None]]) -> None:
        """Write what gathers, until cancelled; returns if too much gathers."""
        while not self._overrun:
            await self._wake.wait()
            self._wake.clear()
            for message in self._take():
                await write(message)

    def _take(self) -> list[pb.RouteResponse]:
        messages: list[pb.RouteResponse] = []
        if self._handles or self._finished:
            tokens = pb.Tokens(
                sent_ps=self._clock.now_ps(),
                step_ps=self._step_ps,
                handles_u32=b"".join(self._handles),
                token_ids_u32=b"".join(self._token_ids),
                finished=self._finished,
            )
            self._handles, self._token_ids, self._finished = [], [], []
            self._pending_bytes = 0
            messages.append(pb.RouteResponse(tokens=tokens))
        messages += self._others
        self._others = []
        return messages
