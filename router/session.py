"""One Route stream between a router and a scheduler: what is written on it, and the tokens that it brings.

Submits wait in a dict with at most one entry per open request; cancels that accumulate are sent in one message, and so
are changes to adapters. A handle belongs to one stream and is never reused on it.

Fan-out is from one frame per step to one message per client's stream. A frame names handles and tokens. A dict maps a
handle to its open request (`open_request.py`), whose handler sleeps on one future. There is no task, queue or lock per
token. Where a client's edge can write without waiting, as HTTP can while its reader keeps up, the handler sleeps until
the last message, which saves a third of the cost of an event. The last hop costs 20 to 35 us of CPU per message,
whether it holds one token or sixteen, so a router that cannot keep up gains most by sending fewer messages.
`context.write` does not show that it is behind: it returns once the bytes are buffered.

All messages of a frame are made before the first is written. Writes in quick succession share system calls and wake the
client less often: five microseconds of work between two writes cost ten; done before the writes, they cost five.

The rule: the first and the last token of a stream are sent at once. A token in between is sent at once while the router
keeps up, that is, while its lateness is below a quarter of a step. Otherwise tokens accumulate, and one timer flushes
every stream after a gap of eight times the lateness, at most four steps, at most `max_flush_gap_seconds`.

Lateness = the time a frame took to arrive beyond the smallest ever seen (frames queue in front of a busy process) + the
time from its receipt until the event loop ran the callbacks that it caused.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import grpc
import grpc.aio

from lorrery.router import wire
from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish
from lorrery.router.wire import TokensFrame
from lorrery.service.clocks import DeviceClock
from lorrery.service.errors import Internal, NeverFits, RequestError
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause
from lorrery.vocabulary.units import PS_PER_SECOND, from_wire

_LATE_STEPS = 0.25
_GAP_PER_LAG = 8.0
_MAX_GAP_STEPS = 4.0
_FLUSHED_AT_ONCE = 64
"""Streams flushed in one iteration of the loop, two milliseconds of work; one client may have a thousand."""
_JUMP_SECONDS, _JUMP_STEPS = 5.0, 10.0  # a frame this late means that a clock has jumped


class Fanout:
    """The open requests of one Route stream.

    Args:
        time_scale: wall seconds per device second.
        max_pending_tokens: a request with more tokens waiting has a slow reader.
        max_gap_seconds: longest time for which tokens are held back, in wall seconds.
        metrics: of the router.
        on_slow_reader: called with such a request after it has been removed.
    """

    def __init__(
        self,
        time_scale: float,
        *,
        max_pending_tokens: int,
        max_gap_seconds: float,
        metrics: RouterMetrics,
        on_slow_reader: Callable[[OpenRequest], None],
    ) -> None:
        self.open_requests: dict[int, OpenRequest] = {}
        self._withdrawn: dict[int, asyncio.Future[Finish | None]] = {}
        self._left: set[int] = set()  # cancelled, whose usage is still to be counted
        self.time_scale = time_scale
        self._clock: DeviceClock | None = None
        self._max_pending_tokens = max_pending_tokens
        self._max_gap_seconds = max_gap_seconds
        self._metrics = metrics
        self._on_slow_reader = on_slow_reader
        self._loop = asyncio.get_running_loop()
        self._delivered = self._loop_delay_seconds = 0.0
        self._gap_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, handle: int, open_request: OpenRequest) -> None:
        """Register `open_request` under `handle`."""
        self.open_requests[handle] = open_request
        if not open_request.resumed:
            self._metrics.admission.observe(time.monotonic() - open_request.arrived)
        open_request.fanout, open_request.handle, open_request.time_scale = self, handle, self.time_scale

    def remove(self, open_request: OpenRequest) -> None:
        """Unregister `open_request`; tokens that still arrive for it are dropped."""
        del self.open_requests[open_request.handle]
        open_request.fanout = None

    def leave(self, open_request: OpenRequest) -> None:
        """Unregister `open_request`, which is cancelled; the scheduler's answer to that has its usage, to be counted.

        Without a token written it has no prompt that was counted, and may have no worker, which would answer.
        """
        if self._metrics.engine is not None and open_request.written:
            self._left.add(open_request.handle)
        self.remove(open_request)

    def withdraw(self, open_request: OpenRequest) -> "asyncio.Future[Finish | None]":
        """Unregister `open_request`, but wait for the finish with which the scheduler answers its cancel.

        Returns:
            A future for the finish; its result is None if the finish cannot come any more. A caller that no longer
            waits has to cancel it.
        """
        handle = open_request.handle
        self.remove(open_request)
        future = self._withdrawn[handle] = self._loop.create_future()
        future.add_done_callback(lambda _: self._withdrawn.pop(handle, None))
        return future

    def refused(self, handle: int) -> OpenRequest | None:
        """Unregister `handle`; return its request if it is open."""
        open_request = self.open_requests.get(handle)
        if open_request is not None:
            self.remove(open_request)
            return open_request
        self._left.discard(handle)
        if (future := self._withdrawn.get(handle)) is not None and not future.done():
            future.set_result(None)
        return None

    def hold(self) -> bool:
        """Return whether a stream's next token should wait for the flush; if so, make sure that one is scheduled."""
        if not self._gap_seconds:
            return False
        self._arm()
        return True

    def deliver(self, frame: TokensFrame) -> None:
        """Distribute the tokens of a frame. Costs about a dict look-up and an append per token."""
        received = self._measure(frame)
        at_once = not self._gap_seconds
        open_requests, max_pending = self.open_requests, self._max_pending_tokens
        awake: list[OpenRequest] = []
        slow: list[OpenRequest] = []
        dropped = 0
        for handle, token_id in zip(frame.handles, frame.token_ids, strict=True):
            open_request = open_requests.get(handle)
            if open_request is None:
                dropped += 1
                continue
            open_request.token_ids.append(token_id)
            if open_request.waiter is None:
                if len(open_request.token_ids) - open_request.written > max_pending:
                    slow.append(open_request)
            elif at_once or not open_request.written:
                awake.append(open_request)
        for handle, finish in frame.finished:
            open_request = open_requests.get(handle)
            if open_request is not None:
                self.remove(open_request)
                open_request.finish = finish
                awake.append(open_request)
            elif (future := self._withdrawn.get(handle)) is not None and not future.done():
                future.set_result(finish)
            elif handle in self._left:
                self._left.remove(handle)
                if self._metrics.engine is not None:
                    self._metrics.engine.looked_up(finish.usage)
        # Only now, so that a message has all tokens of its frame, and the last one the finish too. Scheduled before the
        # writes below, whose time is not a delay of the loop.
        self._loop.call_soon(self._measure_loop)
        for open_request in awake:
            open_request.wake(received)
        self._metrics.flush()
        if awake:
            self._loop.call_soon(self._written, received, len(awake))
        self._delivered = time.monotonic()
        if dropped:
            self._metrics.dropped_tokens += dropped
        if not at_once:
            self._arm()
        for open_request in slow:
            if open_request.fanout is self:
                self.leave(open_request)
                self._on_slow_reader(open_request)

    def close(self) -> list[OpenRequest]:
        """Unregister every open request, in the order of submission, and return them."""
        if self._timer is not None:
            self._timer.cancel()
        open_requests = list(self.open_requests.values())
        self.open_requests.clear()
        for future in self._withdrawn.values():
            if not future.done():
                future.set_result(None)
        for open_request in open_requests:
            open_request.fanout = None
            if len(open_request.token_ids) > open_request.written:
                open_request.wake()
        return open_requests

    def _measure(self, frame: TokensFrame) -> float:
        """Update the lateness from a frame; return when the frame was received."""
        clock = self._clock
        if clock is None:
            clock = self._clock = DeviceClock.synced(self.time_scale, frame.sent_ps)
        sent_ps = from_wire(frame.sent_ps, clock.now_ps())
        clock.observe(sent_ps)
        received = time.monotonic()
        step_seconds = frame.step_ps / PS_PER_SECOND * self.time_scale
        late_seconds = max(0.0, received - clock.to_monotonic(sent_ps))
        if late_seconds > max(_JUMP_SECONDS, _JUMP_STEPS * step_seconds):
            # A clock has jumped, or frames were held up; in the latter case the next frames correct the new clock at
            # once.
            self._clock, late_seconds = DeviceClock.synced(self.time_scale, frame.sent_ps), 0.0
        late_seconds += self._loop_delay_seconds
        if late_seconds < _LATE_STEPS * step_seconds:
            self._gap_seconds = 0.0
        else:
            self._gap_seconds = min(_GAP_PER_LAG * late_seconds, _MAX_GAP_STEPS * step_seconds, self._max_gap_seconds)
        self._metrics.lag.observe(late_seconds)
        return received

    def _measure_loop(self) -> None:
        self._loop_delay_seconds = time.monotonic() - self._delivered

    def _written(self, received: float, num_messages: int) -> None:
        """Record that the handlers woken by a frame have had their turn to write."""
        self._metrics.stream_out.observe_many(time.monotonic() - received, num_messages)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._gap_seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._flush_some(iter(list(self.open_requests.values())))

    def _flush_some(self, left: Iterator[OpenRequest]) -> None:
        at = time.monotonic()
        num_messages = 0
        some = list(islice(left, _FLUSHED_AT_ONCE))
        for open_request in some:
            if open_request.fanout is self and len(open_request.token_ids) > open_request.written:
                num_messages += open_request.waiter is not None
                open_request.wake(at)
        self._metrics.flush()
        if some:
            self._loop.call_soon(self._flush_some, left)
        if num_messages:
            self._loop.call_soon(self._written, at, num_messages)


LONGEST_WAIT_SECONDS = 24 * 3600.0
"""Upper bound on a client's remaining time as sent to the scheduler."""
MAX_CHANGES = 1024
"""Adapter changes queued for a scheduler that reads slowly; beyond that it gets the whole log instead."""
_MAX_HANDLE = 2**32 - 1

RouteCall = grpc.aio.StreamStreamCall[scheduler_pb2.RouteRequest, scheduler_pb2.RouteResponse]
_log = get_logger("router.session")


class Session:
    """One Route stream, from SchedulerHello to its end.

    Args:
        address: of the scheduler.
        call: the stream, after both hellos.
        fanout: receives its tokens.
        submit_bytes: size of the largest submit that the scheduler accepts; a larger one would break the stream.
    """

    def __init__(self, address: str, call: RouteCall, fanout: Fanout, submit_bytes: int) -> None:
        self.fanout = fanout
        self._address = address
        self._submit_bytes = submit_bytes
        self._call = call
        self._next_handle = 1
        self._submits: dict[int, OpenRequest] = {}
        self._cancels: list[wire.Cancel] = []
        self._adapters: AdapterLog | None = None
        self._changes: list[AdapterChange] = []
        self._something_to_write = asyncio.Event()

    def submit(self, open_request: OpenRequest) -> None:
        """Submit a request, or the rest of it, under a new handle."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.fanout.add(handle, open_request)
        self._submits[handle] = open_request
        self._something_to_write.set()

    def cancel(self, handle: int, cause: CancelCause, kept_tokens: int) -> bool:
        """Cancel a request at the scheduler; a submit that is still queued is dropped instead.

        Args:
            handle: the request's.
            cause: why.
            kept_tokens: output that its client has.

        Returns:
            Whether a cancel is sent, which the scheduler will answer.
        """
        if self._submits.pop(handle, None) is not None:
            return False
        self._cancels.append(wire.Cancel(handle, cause, kept_tokens))
        self._something_to_write.set()
        return True

    def tell(self, adapters: AdapterLog, changes: Sequence[AdapterChange] | None = None) -> None:
        """Send adapter changes to the scheduler, before further requests.

        Args:
            adapters: the whole log, read when the message is written.
            changes: the new changes; None: send the whole log.
        """
        if changes is not None and self._adapters is None and len(self._changes) + len(changes) <= MAX_CHANGES:
            self._changes += changes
        else:
            self._adapters, self._changes = adapters, []
        self._something_to_write.set()

    async def write(self) -> None:
        """Write queued messages, until cancelled or the stream breaks."""
        while True:
            await self._something_to_write.wait()
            self._something_to_write.clear()
            while self._adapters is not None or self._changes or self._cancels or self._submits:
                if self._adapters is not None:
                    message, self._adapters = wire.whole_log(self._adapters), None
                    await self._call.write(message)
                if self._changes:
                    changes, self._changes = self._changes, []
                    await self._call.write(wire.adapter_changes(changes))
                if self._cancels:
                    listed, self._cancels = self._cancels, []
                    for cancel in wire.cancels(listed):
                        await self._call.write(cancel)
                if self._submits:
                    handle = next(iter(self._submits))
                    if handle > _MAX_HANDLE:
                        # The next stream starts with new handles, and resumes every open request.
                        raise wire.ProtocolError("this stream has no handles left")
                    open_request = self._submits.pop(handle)
                    if (submit := self._pack(handle, open_request)) is not None:
                        await self._call.write(submit)

    def _time_left_ps(self, open_request: OpenRequest) -> int:
        """Return the time until a client's deadline, in device time; 0: none."""
        if open_request.waits_until is None:
            return 0
        seconds = min(open_request.waits_until - time.monotonic(), LONGEST_WAIT_SECONDS)
        return max(1, round(seconds / self.fanout.time_scale * PS_PER_SECOND))

    def _pack(self, handle: int, open_request: OpenRequest) -> scheduler_pb2.RouteRequest | None:
        """Return the submit message of a request; None: it cannot be sent, and the request has failed."""
        error: RequestError
        try:
            message = wire.submit(
                handle,
                open_request.request,
                open_request.token_ids,
                resumed=open_request.resumed,
                adapter=open_request.adapter,
                time_left_ps=self._time_left_ps(open_request),
                trace=open_request.context,
            )
        except Exception as cause:
            # Without the traceback, whose locals include the prompt.
            _log.error("submit_failed", **open_request.log_fields, reason=repr(cause))
            error = Internal(str(cause))
        else:
            if (size := message.ByteSize()) <= self._submit_bytes:
                if open_request.trace is not None:
                    open_request.trace.submitted(self._address, resumed=open_request.resumed)
                return message
            error = NeverFits(
                f"the request takes {size} bytes on the way to its scheduler; at most {self._submit_bytes} are taken;"
                " give a shorter prompt or fewer stop strings",
                value=size,
                limit=self._submit_bytes,
            )
        self.fanout.remove(open_request)
        open_request.fail(error)
        return None
