"""One router as the scheduler sees it: its requests until they end, and the messages on their way to it.

The scheduler never waits for a router inside a step: outcomes gather here, and one writer sends everything gathered in
one message. A router that keeps up gets one message per step; a slow one gets several steps merged; one that is so slow
that `max_pending_tokens` gather, or that reads nothing for a while, is cut off, and resumes its streams on a new
connection.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lorrery.scheduler import wire_routers
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.metrics import Counted
from lorrery.scheduler.subscribers.tracing import RequestTrace
from lorrery.service.clocks import DeviceClock
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.service.telemetry.spans import TraceContext

log = get_logger("scheduler.routers")


class RouterLink:
    """The stream back to one router.

    Args:
        router_id: as it announced itself.
        clock: stamps messages.
        max_pending_tokens: bound on pending messages, in tokens of 8 bytes; ends and refusals count by their size.
        earlier: the scheduler's handles of the requests of the router's other streams, by request ID.

    Attributes:
        owned: the scheduler's handles of its requests, by the router's handles.
        earlier: as given. The end of a stream that broke may become known after the router has resumed its requests.
    """

    def __init__(
        self, router_id: str, clock: DeviceClock, max_pending_tokens: int, earlier: dict[str, int] | None = None
    ) -> None:
        self.router_id = router_id
        self.owned: dict[int, int] = {}
        self.earlier = earlier or {}
        self._clock = clock
        self._max_pending_bytes = 8 * max_pending_tokens  # 4 bytes for the token, 4 for its handle
        self._handles: list[bytes] = []
        self._token_ids: list[bytes] = []
        self._pending_bytes = 0
        self._step_ps = 0
        self._finished: list[wire_routers.FinishedMessage] = []
        self._others: list[wire_routers.ToRouter] = []
        self._wake = asyncio.Event()
        self._overrun = asyncio.Event()

    def tokens(self, handles_u32: bytes, token_ids_u32: bytes, step_ps: int) -> None:
        """Send the tokens of one step."""
        self._handles.append(handles_u32)
        self._token_ids.append(token_ids_u32)
        self._step_ps = step_ps
        self._count(2 * len(handles_u32))

    def finished(self, message: wire_routers.FinishedMessage) -> None:
        """Send the end of a sequence, after its tokens."""
        self._finished.append(message)
        self._count(message.ByteSize())

    def refused(self, handle: int, refusal: Refusal) -> None:
        """Send that a request ends without further tokens."""
        self.send(wire_routers.refused(handle, refusal))

    def send(self, message: wire_routers.ToRouter) -> None:
        """Send any other message."""
        self._others.append(message)
        self._count(message.ByteSize())

    def _count(self, num_bytes: int) -> None:
        self._pending_bytes += num_bytes
        if self._pending_bytes > self._max_pending_bytes:
            self._overrun.set()
        self._wake.set()

    async def write_all(self, write: Callable[[wire_routers.ToRouter], Awaitable[None]]) -> None:
        """Write pending messages, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for message in self._take():
                await write(message)

    async def until_overrun(self) -> None:
        """Return once too much is pending."""
        await self._overrun.wait()
        log.warning("router_too_slow", router_id=self.router_id, waiting_bytes=self._pending_bytes)

    def _take(self) -> list[wire_routers.ToRouter]:
        messages: list[wire_routers.ToRouter] = []
        if self._handles or self._finished:
            handles_u32, token_ids_u32 = b"".join(self._handles), b"".join(self._token_ids)
            messages.append(
                wire_routers.tokens(self._clock.now_ps(), self._step_ps, handles_u32, token_ids_u32, self._finished)
            )
            self._handles, self._token_ids, self._finished = [], [], []
        messages += self._others
        self._others = []
        self._pending_bytes = 0
        return messages


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, from its arrival to its end: the core's sequence, and what the core must not see.

    Attributes:
        sequence: the core's view of it.
        router: that it came from.
        router_handle: its handle on that router's stream.
        adapter_id: that it names; empty: none.
        sampling: the wire's message, passed on unchanged to the worker, including the hidden true output length.
        token_ids: the output so far, for a resumption.
        num_repeats: tokens that its worker makes again and its router has: those lost in a preemption.
        counted: how much of it was counted on an earlier, broken stream.
        orphaned: whether its router's stream has ended.
        group: the client's request that it is one of several outputs of; None: it is the only one.
        context: the span that it is part of; None: none.
        trace: makes its spans; None: they are not kept.
    """

    sequence: Sequence
    router: RouterLink
    router_handle: int
    request_id: str
    adapter_id: str
    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_repeats: int = 0
    counted: Counted = Counted.NOTHING
    orphaned: bool = False
    group: OutputGroup | None = None
    context: TraceContext | None = None
    trace: RequestTrace | None = None

    @property
    def output_tokens(self) -> int:
        """Its output; of a request that its router has cut, what is kept."""
        withdrawal = self.sequence.withdrawal
        kept = None if withdrawal is None or withdrawal.cause.finish is None else withdrawal.kept_tokens
        return len(self.token_ids) if kept is None else min(kept, len(self.token_ids))

    @property
    def trace_id(self) -> str:
        """Of its spans; empty: they are not kept."""
        return "" if self.trace is None else self.trace.trace_id

    @property
    def run_context(self) -> TraceContext | None:
        """The span of its run, for its worker; None: it is not kept."""
        return None if self.trace is None else self.trace.run_context()
