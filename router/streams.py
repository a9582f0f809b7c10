"""Fan-out: from one frame per step to one message per stream.

A frame names handles and tokens; a dict turns a handle into its open request, whose handler sleeps on one future. There
is no task, queue or lock per token. Where a client's edge can write without waiting, as HTTP's can while its reader
keeps up, the handler sleeps on until the last message: that saves a third of what an event costs. The last hop costs 20
to 35 us of CPU a message, be it of one token or of sixteen, so a router that cannot keep up gets most from saying less
often. `context.write` is no help in noticing: it returns once the bytes are buffered.

A frame's messages are all made before the first is written. Writes that follow one another closely share system calls
and wake the client less often: five microseconds of work between two writes cost ten, done ahead they cost five.

The rule: the first and the last token of a stream leave at once. Between them a token leaves at once while the router
keeps up, that is, while it is late by less than a quarter of a step. Otherwise tokens gather, and one timer flushes
every stream after a gap of eight times the lateness, at most four steps, at most `max_flush_gap_seconds`.

How late the router is = the time a frame took to arrive beyond the least ever seen (frames queue up in front of a busy
process) + the time from its receipt until the loop got round to what it caused.
"""

import asyncio
import time
from array import array
from collections.abc import Callable

from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.errors import Internal, RequestError
from lorrery.chassis.log import get_logger
from lorrery.chassis.trace_context import TraceContext, log_fields
from lorrery.router.metrics import RouterMetrics
from lorrery.router.request import Finish, Request, Usage
from lorrery.router.tracing import OutputTrace
from lorrery.router.wire import Message, TokensFrame
from lorrery.vocabulary.adapter_log import AdapterChange
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.vocabulary.wire_time import from_wire

_LATE_STEPS = 0.25
_GAP_PER_LAG = 8.0
_MAX_GAP_STEPS = 4.0
_JUMP_SECONDS, _JUMP_STEPS = 5.0, 10.0  # so late is no frame of a scheduler that shares its clock's rate with us

_log = get_logger("router.streams")


MakeMessage = Callable[[list[int], Finish | None, float, float | None], tuple[Message, bool]]
"""Turns new tokens, the finish if they are the last, and the time scale into a message; says whether it is the last.

It also gets the time (`time.monotonic`) of what has the message made now, a frame or a flush; None: its handler does.

It must not hold the open request: the two would wait for the garbage collector, and the prompt with them.
"""

WriteNow = Callable[[Message], bool]
"""Sends a message at once; says whether it could, without waiting. Where it could not, nothing of it is sent.

It must not hold the open request either.
"""


class OpenRequest:
    """One open request: what was received for it, and how much of that its handler has taken.

    Args:
        request: what is asked of a scheduler.
        make_message: called once for each message, in order.
        write_now: takes messages before the last while the handler waits; None: the handler writes them all.
        arrived: when its call came, by `time.monotonic`; None: now.

    Attributes:
        token_ids: every token received so far, over all resumptions.
        written: how many of them are in messages.
        finish: set once, after the last token.
        error: set where the request fails.
        over: the last message has been made.
        fanout: where its tokens come from now; None while no shard works on it.
        handle: its number there.
        resumed: it was with a scheduler whose stream broke.
        adapter: the load at run time that brought its adapter, as far as we know; None: none did. A resumption asks for
            the same.
        waits_until: when its client goes, on the clock of `time.monotonic`; None: it does not.
        cut: what its handler, which has been cancelled for it, ends with: its reader was too slow.
        task: its handler.
        time_scale: wall seconds per device second, where it was submitted last.
        trace: takes note of what happens; None: it belongs to no trace.
    """

    __slots__ = (
        *("_make_message", "_write_now", "adapter", "arrived", "cut", "error", "fanout", "finish", "handle", "over"),
        *("request", "resumed", "task", "time_scale", "token_ids", "trace", "waiter", "waits_until", "written"),
    )

    def __init__(
        self,
        request: Request,
        make_message: MakeMessage,
        write_now: WriteNow | None = None,
        arrived: float | None = None,
    ) -> None:
        self.request = request
        self.arrived = time.monotonic() if arrived is None else arrived
        self._make_message = make_message
        self._write_now = write_now
        self.token_ids: array[int] = array("I")
        self.written = 0
        self.finish: Finish | None = None
        self.error: RequestError | None = None
        self.fanout: Fanout | None = None
        self.handle = 0
        self.resumed = False
        self.adapter: AdapterChange | None = None
        self.waits_until: float | None = None
        self.cut: RequestError | None = None
        self.over = False
        self.waiter: asyncio.Future[Message | None] | None = None
        self.time_scale = 1.0
        self.trace: OutputTrace | None = None
        self.task = asyncio.current_task()

    async def next_message(self) -> Message:
        """Return the next message when there is one, and it is time to write it.

        Raises:
            RequestError: the request failed.
        """
        if self._must_wait():
            waiter: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
            self.waiter = waiter
            try:
                message = await waiter
            finally:
                self.waiter = None
        else:
            message = self._message()
        if message is None:
            assert self.error is not None
            raise self.error
        return message

    def wake(self, at: float | None = None) -> None:
        """Write what is there, or let the handler do so, or learn that there is an error.

        Args:
            at: when the frame arrived, or the flush began, that this belongs to; by `time.monotonic`.
        """
        waiter = self.waiter
        if waiter is None:
            return
        if not waiter.done():
            message = self._message(at)
            if message is not None and not self.over and self._write_now is not None:
                try:
                    if self._write_now(message):
                        return
                except Exception as error:  # as in `_message`
                    _log.exception("write_failed", **self.log_fields)
                    self.error, message = Internal(str(error)), None
            waiter.set_result(message)
        self.waiter = None

    @property
    def context(self) -> TraceContext | None:
        """The span that it is; None: it belongs to no trace."""
        return None if self.trace is None else self.trace.context

    @property
    def log_fields(self) -> dict[str, str]:
        """What lines of the log say of it, of tasks that are not its own."""
        return {"request_id": self.request.request_id, **log_fields(self.context)}

    def _must_wait(self) -> bool:
        if self.finish is not None or self.error is not None:
            return False
        if len(self.token_ids) == self.written:
            return True
        return self.written > 0 and self.fanout is not None and self.fanout.hold()

    def _message(self, at: float | None = None) -> Message | None:
        if self.error is not None:
            return None
        written, self.written = self.written, len(self.token_ids)
        try:
            token_ids = self.token_ids[written:].tolist()
            message, self.over = self._make_message(token_ids, self.finish, self.time_scale, at)
        except Exception as error:  # one request's fault must not take the others' frame along
            _log.exception("message_failed", **self.log_fields)
            self.error = Internal(str(error))
            return None
        return message

    def finish_if_complete(self) -> bool:
        """End the request if every token of it is here and only the scheduler's word on that was lost.

        There is nothing left to resume. What else the usage would say, the lost scheduler alone knew.

        Returns:
            Whether it has ended.
        """
        sampling, num_tokens = self.request.sampling, len(self.token_ids)
        if num_tokens and self.token_ids[-1] == self.request.eos_id and not sampling.ignore_eos:
            reason = FinishReason.EOS
        elif num_tokens >= sampling.max_new_tokens:
            reason = FinishReason.LENGTH
        else:
            return False
        if self.error is None and self.finish is None:
            self.finish = Finish(reason, Usage(self.request.prompt_tokens, num_tokens))
            self.wake()
        return True

    def fail(self, error: RequestError) -> None:
        """End the request with an error."""
        if self.error is None and self.finish is None:
            self.error = error
            self.wake()

    def cut_off(self, error: RequestError) -> None:
        """End the request with an error while its handler is stuck in a write, even of the last message."""
        if self.cut is None:
            self.cut = error
            self.fail(error)
            if self.task is not None:
                self.task.cancel()


class Fanout:
    """The open requests of one Route stream.

    Args:
        time_scale: wall seconds per device second.
        max_pending_tokens: a request with more than this waiting has a slow reader.
        max_gap_seconds: longest time tokens are held back; wall seconds.
        on_slow_reader: called with such a request, which is no longer here by then.
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
        """Expect tokens for `open_request` under `handle`."""
        self.open_requests[handle] = open_request
        if not open_request.resumed:
            self._metrics.admission.observe(time.monotonic() - open_request.arrived)
        open_request.fanout, open_request.handle, open_request.time_scale = self, handle, self.time_scale

    def remove(self, open_request: OpenRequest) -> None:
        """Expect no more tokens for `open_request`; what still comes is dropped."""
        del self.open_requests[open_request.handle]
        open_request.fanout = None

    def withdraw(self, open_request: OpenRequest) -> "asyncio.Future[Finish | None]":
        """Expect only the finish of `open_request`, with which the scheduler answers its cancel.

        Returns:
            What is done once the finish is here, or with None once it cannot come any more. To be cancelled by a caller
            that no longer waits.
        """
        handle = open_request.handle
        self.remove(open_request)
        future = self._withdrawn[handle] = self._loop.create_future()
        future.add_done_callback(lambda _: self._withdrawn.pop(handle, None))
        return future

    def refused(self, handle: int) -> OpenRequest | None:
        """Expect nothing more under `handle`; return its request if it is open."""
        open_request = self.open_requests.get(handle)
        if open_request is not None:
            self.remove(open_request)
        elif (future := self._withdrawn.get(handle)) is not None and not future.done():
            future.set_result(None)
        return open_request

    def hold(self) -> bool:
        """Return whether a stream's next token should wait for the flush, and see to it that there is one."""
        if not self._gap_seconds:
            return False
        self._arm()
        return True

    def deliver(self, frame: TokensFrame) -> None:
        """Hand out what a frame brings. Costs about a dict look-up and an append per token."""
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
        # Only now: a message has all tokens of its frame, and the last one the finish too. What is written here, or by
        # the handlers that this wakes, is no delay of the loop.
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
                self.remove(open_request)
                self._on_slow_reader(open_request)

    def close(self) -> list[OpenRequest]:
        """Let go of every open request, in the order of submission, and return them."""
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
        """Note how late a frame is; return when it was received."""
        clock = self._clock
        if clock is None:
            clock = self._clock = DeviceClock.synced(self.time_scale, frame.sent_ps)
        sent_ps = from_wire(frame.sent_ps, clock.now_ps())
        clock.observe(sent_ps)
        received = time.monotonic()
        step_seconds = frame.step_ps / PS_PER_SECOND * self.time_scale
        late_seconds = max(0.0, received - clock.to_monotonic(sent_ps))
        if late_seconds > max(_JUMP_SECONDS, _JUMP_STEPS * step_seconds):
            # A clock has jumped, or frames were held up; if so, those behind this one set the new clock right at once.
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
        """Note that the handlers which a frame has woken have had their turn to write."""
        self._metrics.stream_out.observe_many(time.monotonic() - received, num_messages)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._gap_seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        at = time.monotonic()
        num_messages = 0
        for open_request in self.open_requests.values():
            if len(open_request.token_ids) > open_request.written:
                num_messages += open_request.waiter is not None
                open_request.wake(at)
        self._metrics.flush()
        if num_messages:
            self._loop.call_soon(self._written, at, num_messages)
