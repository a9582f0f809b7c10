"""One `Generate` call, from its first message to its last: read it, give it to a shard, write the answer as it arrives.

Every protocol has its own `Call`; that of all gRPC protocols is here.

The handler writes the messages for which it has to wait; its open request writes those that can be sent without
waiting. However the call ends, the open request is released in `finally`, which carries a client's cancellation or
deadline to the scheduler.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from uuid import uuid4

from lorrery.router import wire
from lorrery.router.access import Access, ApiKey, check_tokens, taken_back
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.faults import METADATA_KEY, Injector
from lorrery.router.logprobs import LogprobModel, OutputLogprobs
from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest, Output, WriteNow
from lorrery.router.placement import Placement
from lorrery.router.reader import RequestReader, unknown_model
from lorrery.router.request import Finish, Request
from lorrery.router.sampling import SamplingParams
from lorrery.router.timing import Timing
from lorrery.router.tracing import OutputTrace
from lorrery.service.clocks import UptimeClock
from lorrery.service.errors import InjectedFault, Overloaded, Reason, RequestError, Unauthenticated, UnknownName
from lorrery.service.network import status
from lorrery.service.network.calls import Writes
from lorrery.service.network.credentials import metadata_values
from lorrery.tokenizer.base import Tokenizer
from lorrery.v1 import router_pb2
from lorrery.vocabulary.endings import CancelCause

REVOCATION_SECONDS = 1.0
"""How often the keys of open streams are checked; the keys file is read at most once a second."""

# How long the finish of a stream that was stopped here waits for the scheduler's usage.
LAST_WORD_SECONDS = 1.0


class Call(Protocol):
    """One client's call, whatever its protocol: where a request's output goes."""

    @property
    def aborted(self) -> bool:
        """Whether its cancellation was requested by the client in another call."""
        ...

    @property
    def refused_together(self) -> bool:
        """Whether its cancellation follows from the refusal of another output of the client's request."""
        ...

    @property
    def complete(self) -> bool:
        """Whether its cancellation comes from a client that has the last message and does not wait for the end."""
        ...

    @property
    def fault_rules(self) -> Sequence[str]:
        """Fault rules that the call carries."""
        ...

    def write(self, message: router_pb2.GenerateResponse, /) -> Awaitable[Any]:
        """Send a message; returns once the reader's buffers have taken it."""
        ...

    @property
    def write_now(self) -> WriteNow | None:
        """A function that sends a message without waiting; None if the protocol has none."""
        ...

    def take_logprobs(self, logprobs: OutputLogprobs, /) -> bool:
        """Accept the log-probabilities, to be queried when tokens are rendered; False: they must be in the messages.

        They follow from a token and its position but take fifty times as much memory, and only non-gRPC clients can
        skip them.
        """
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the call's deadline; None: it has none."""
        ...

    @property
    def deadline_has_passed(self) -> bool:
        """Whether a call that ends now does so because of its deadline."""
        ...


def cause_of(call: Call, error: BaseException | None) -> CancelCause:
    """Return why a call ends before its output has: by its client, or by an error of its own."""
    if isinstance(error, asyncio.CancelledError):
        if call.aborted:
            return CancelCause.ABORTED
        if call.refused_together:
            return CancelCause.REFUSED_TOGETHER
        return CancelCause.DEADLINE if call.deadline_has_passed else CancelCause.CLIENT_LEFT
    if isinstance(error, InjectedFault):
        return CancelCause.FAULT
    if isinstance(error, Unauthenticated):
        return CancelCause.KEY_TAKEN_BACK
    if isinstance(error, Overloaded) and error.reason == Reason.SLOW_READER:
        return CancelCause.SLOW_READER
    return CancelCause.FAILED


class Generation:
    """Answers `Generate` calls.

    Args:
        access: maps callers to tenants.
        reader: parses clients' messages.
        tokenizer: for output text.
        logprobs: for the log-probabilities of outputs.
        placement: sends requests to shards.
        injector: injects faults.
        metrics: of the router.
        reader_timeout_seconds: longest time for which a client may take nothing.
    """

    def __init__(
        self,
        access: Access,
        reader: RequestReader,
        tokenizer: Tokenizer,
        logprobs: LogprobModel,
        placement: Placement,
        injector: Injector,
        metrics: RouterMetrics,
        reader_timeout_seconds: float,
    ) -> None:
        self._access = access
        self._reader = reader
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._placement = placement
        self._injector = injector
        self._metrics = metrics
        self._reader_timeout_seconds = reader_timeout_seconds
        self._callers: dict[OpenRequest, ApiKey] = {}
        self._writes: Writes[OpenRequest] = Writes(UptimeClock(), reader_timeout_seconds)

    async def stream(
        self,
        message: router_pb2.GenerateRequest,
        caller: ApiKey,
        call: Call,
        timing: Timing,
        trace: OutputTrace | None = None,
        constraint: SharedConstraint | None = None,
    ) -> None:
        """Stream one request's output.

        Args:
            message: the client's request.
            caller: permissions of the caller.
            call: receives the output.
            timing: of the request, from its arrival; gets its tenant and adapter here.
            trace: records what happens; None: the call is not traced.
            constraint: on the output; None: the message's.

        Raises:
            RequestError: the request is refused, or fails before its end.
        """
        tenant_id = self._access.tenant(caller, message.tenant_id)
        timing.tenant_id = tenant_id
        timing.adapter_id = adapter_id = self._reader.adapter_id(message)
        self._placement.check_standing_refusals(adapter_id, message.group.id or message.request_id, tenant_id)
        request = await self._reader.read(message, caller, constraint)
        if trace is not None:
            trace.request, trace.model, trace.timing = request, self._reader.served[0], timing
        faults = self._injector.choose(request, call.fault_rules)
        await self._injector.before(faults)
        stalls, cut = list(faults.stalls), faults.cut
        output = Output(request, self._tokenizer)
        logprobs = None if request.top_logprobs is None else self._logprobs.of(request)
        if logprobs is not None and call.take_logprobs(logprobs):
            logprobs = None

        def make_message(
            token_ids: list[int], finish: Finish | None, time_scale: float, frame_at: float | None
        ) -> tuple[wire.Message, bool]:
            timing.time_scale = time_scale
            if is_cut := cut is not None and output.num_tokens + len(token_ids) >= cut.after:
                token_ids, finish = token_ids[: cut.after - output.num_tokens], None
            token_ids, text, finish = output.push(token_ids, finish)
            timing.message(len(token_ids), output.num_tokens, frame_at)
            if is_cut or finish is None:
                response = wire.generate_response(token_ids, text)
            else:
                timing.finish(request.prompt_tokens, output.num_tokens, finish)
                response = wire.last_response(token_ids, text, finish)
                if trace is not None:
                    trace.finish = finish
            if logprobs is not None and request.top_logprobs is not None:
                first = output.num_tokens - len(token_ids)
                at = enumerate(token_ids, first)
                wire.add_logprobs(response, [logprobs.at(*place, request.top_logprobs) for place in at])
            # No finish, but stopped: a stop string that shows only in the text, see `_finish_stopped`.
            return response, is_cut or finish is not None or output.stopped

        as_it_comes = cut is None and not stalls
        arrived = timing.arrived
        open_request = OpenRequest(request, make_message, call.write_now if as_it_comes else None, arrived)
        open_request.trace = trace
        if (remaining := call.time_remaining()) is not None:
            open_request.waits_until = time.monotonic() + remaining
        timing.submits(request.prompt_tokens, request.sampling.max_new_tokens, request.group)
        self._placement.submit(open_request)
        self._callers[open_request] = caller
        try:
            while not open_request.over:
                if stalls:
                    await self._injector.stall(stalls, output)
                response = await open_request.next_message()
                if cut is not None and open_request.over and output.num_tokens == cut.after:
                    if cut.after:
                        await self._writes.write(open_request, call.write(response))
                    raise InjectedFault(cut.text, cut.status)
                if open_request.over and not response.HasField("finish"):
                    finish = await self._finish_stopped(open_request, output, response, call)
                    if trace is not None:
                        trace.finish = finish
                    timing.finish(request.prompt_tokens, output.num_tokens, finish)
                else:
                    await self._writes.write(open_request, call.write(response))
        except asyncio.CancelledError:
            if open_request.cut is None or open_request.task is None or open_request.task.uncancel() > 0:
                raise
            raise open_request.cut from None
        except UnknownName:
            if message.model not in ("", message.adapter_id) and adapter_id:
                raise unknown_model(message.model, self._reader.served[0]) from None
            raise
        finally:
            if trace is not None:
                trace.num_tokens = output.num_tokens
            if open_request.finish is not None:
                timing.left(open_request.finish.usage)
            del self._callers[open_request]
            self._placement.release(open_request, cause_of(call, sys.exception()), output.num_tokens)

    async def count(self, caller: ApiKey, adapter_id: str, tokens: int) -> None:
        """Count something against the rates of a key as a prompt without output; its scheduler does.

        Args:
            caller: the key.
            adapter_id: whose scheduler is asked; empty: any.
            tokens: of the prompt.

        Raises:
            RequestError: the key may not have it, at all or now.
        """
        if not (self._access.counts and caller.has_rates):
            return
        check_tokens(caller, 0, tokens)
        request_id = uuid4().hex
        request = Request(
            request_id, adapter_id, caller.tenant, b"", SamplingParams(), (), 0, key=caller, only_counted_tokens=tokens
        )
        open_request = OpenRequest(request, lambda token_ids, finish, *_: (wire.generate_response(token_ids, ""), True))
        self._placement.submit(open_request)
        try:
            await open_request.next_message()
        finally:
            self._placement.release(open_request, CancelCause.CLIENT_LEFT, 0)

    async def _finish_stopped(
        self, open_request: OpenRequest, output: Output, response: wire.Message, call: Call
    ) -> Finish:
        """End a stream at a stop string that shows only in its text; the scheduler is still working on the request.

        The scheduler answers the cancel with the request's usage. The text does not wait for that answer, the finish
        does. Returns the finish.
        """
        last_word = self._placement.withdraw(open_request, output.num_tokens)
        try:
            await self._writes.write(open_request, call.write(response))
            done, _ = await asyncio.wait([last_word], timeout=LAST_WORD_SECONDS)
            upstream = last_word.result() if done else None
        finally:
            last_word.cancel()
        finish = output.stop_finish(upstream)
        await self._writes.write(open_request, call.write(wire.last_response((), "", finish)))
        return finish

    async def cut_stuck_readers(self) -> None:
        """Cut off clients that read nothing for `reader_timeout_seconds`, until cancelled."""
        seconds = self._reader_timeout_seconds
        while True:
            for open_request in await self._writes.stuck():
                self._metrics.slow_readers.inc()
                open_request.cut_off(
                    Overloaded(
                        f"the reader took nothing for {seconds:g} s; reader_timeout_seconds is {seconds:g}",
                        Reason.SLOW_READER,
                        field="reader_timeout_seconds",
                        limit=seconds,
                    )
                )

    async def cut_revoked(self) -> None:
        """End the streams of revoked API keys, until cancelled."""
        while self._access.counts:
            await asyncio.sleep(REVOCATION_SECONDS)
            for open_request, caller in list(self._callers.items()):
                if not self._access.is_valid(caller):
                    open_request.cut_off(taken_back(caller))


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
