"""A client's gRPC call as the handler sees it, for every gRPC protocol."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lorrery.router.faults import METADATA_KEY
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.service.network import status
from lorrery.service.network.credentials import metadata_values
from lorrery.v1 import router_pb2

FAREWELL_SECONDS = 5.0
"""How long a handler waits for a slow reader to receive the final status."""

ROUNDED_UP = 0.01
"""By how much of its timeout a call's deadline lies later here than at its client, at most: gRPC sends the timeout, not
the deadline, and its C core rounds that up to a whole 10 ms from 1 s on, 100 ms from 10 s, 1 s from 100 s."""

ON_THE_WAY_SECONDS = 0.02
"""How much later than that it may lie: for as long as the call was on its way."""


class GrpcCall:
    """The `generate.Call` of a gRPC call.

    Args:
        context: of the call.
        write: takes each message, and begins the stream; None: the call's own `write`.
    """

    refused_together = False  # a call has one output
    __slots__ = ("_context", "_deadline_slack", "aborted", "complete", "write")
    write_now = None

    def __init__(
        self, context: status.Context, write: Callable[[router_pb2.GenerateResponse], Awaitable[Any]] | None = None
    ) -> None:
        self._context = context
        timeout = context.time_remaining() or 0.0
        self._deadline_slack = min(ROUNDED_UP * timeout + ON_THE_WAY_SECONDS, timeout / 2)
        self.aborted = self.complete = False
        self.write: Callable[[router_pb2.GenerateResponse], Awaitable[Any]] = write or self._write_first

    async def _write_first(self, message: router_pb2.GenerateResponse) -> None:
        self.write = self._context.write
        await begin_stream(self._context)
        await self._context.write(message)

    @property
    def fault_rules(self) -> Sequence[str]:
        """See `Call`."""
        return metadata_values(self._context, METADATA_KEY)

    def take_logprobs(self, logprobs: OutputLogprobs) -> bool:
        """See `Call`: a gRPC client reads them in messages."""
        return False

    def time_remaining(self) -> float | None:
        """See `Call`."""
        return self._context.time_remaining()

    @property
    def deadline_has_passed(self) -> bool:
        """See `Call`; by the client's clock, which resets the call before the deadline is here."""
        remaining = self._context.time_remaining()
        return remaining is not None and remaining <= self._deadline_slack


async def begin_stream(context: status.Context) -> None:
    """Send the initial metadata, before the first message.

    gRPC would send both together. If the reader then does not take the message, and the stream is aborted for that
    reason, gRPC tries to send the metadata again, fails, and the client never receives the status.
    """
    await context.send_initial_metadata(())


async def abort_stream(context: status.Context, error: RequestError) -> None:
    """End a stream with an error's status. Never returns normally.

    For a reader that has stopped reading, the status queues behind its unread messages. After `FAREWELL_SECONDS` this
    call stops waiting; gRPC keeps the status for the reader.
    """
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            await status.abort(context, error, status.public_text(error))
    except TimeoutError:
        raise asyncio.CancelledError from None
