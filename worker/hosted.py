"""One GPU of a worker process, a worker of its own to the scheduler: attaches, runs plans, re-attaches after a loss.

The worker dials, so no service has to discover it. A broken stream means that the worker is lost: it drops every
sequence, the scheduler queues them again, and unsent messages about them are discarded. `schedulers.py` chooses the
scheduler to dial; it may differ between two attachments.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from lorrery.service.clocks import DeviceClock
from lorrery.service.network.channel import own_host
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.tracing import Tracer
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.units import NEVER, from_wire
from lorrery.worker import wire
from lorrery.worker.attachment import CLOSE_SECONDS, Attachment, Call, StreamBrokenError, WorkerFaults
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.steptime import StepTimeModel
from lorrery.worker.engine_metrics import Engine
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.pacer import LONGEST_SLEEP_SECONDS
from lorrery.worker.tracing import SequenceTraces

if TYPE_CHECKING:
    from lorrery.worker.kv_events import Publisher

WELCOME_SECONDS = 10.0
"""How long a scheduler may take to answer the worker's hello."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
"""Delay between two attempts to attach: doubled each time, drawn from its upper half so that workers spread."""
REFUSED_RETRY_SECONDS = {
    grpc.StatusCode.FAILED_PRECONDITION: 10.0,  # another base model: only new settings on one side help
    grpc.StatusCode.UNAUTHENTICATED: LAST_RETRY_SECONDS,  # a token that is being changed
    grpc.StatusCode.PERMISSION_DENIED: 10.0,
    grpc.StatusCode.INVALID_ARGUMENT: 10.0,  # an invalid hello: also needs new settings
    grpc.StatusCode.ALREADY_EXISTS: LAST_RETRY_SECONDS,  # its name is in use, perhaps by its own broken stream
}
"""Retry delay after a scheduler has refused this worker, by status."""
WARN_AFTER_SECONDS, WARN_EVERY_SECONDS = 10.0, 60.0
"""How long attempts may fail before one is logged as a warning, and the delay to the next warning."""


class Dial(Protocol):
    """Finds and dials schedulers for a GPU."""

    async def choose(self, worker: str) -> str | None:
        """Return the address to attach to; None: there is none now."""
        ...

    async def open_stream(self, address: str) -> Call:
        """Open a stream to the scheduler at `address`."""
        ...


class HostedGpu:
    """One GPU of the process, attached to one scheduler after another.

    Args:
        name: name of the worker.
        settings: of the cluster.
        step_time: step-time model, shared by the GPUs of a process.
        answers: output model, shared too.
        hello: first message to a scheduler.
        metrics: of this worker.
        engine: metrics under other engines' names; None: off.
        tracer: receives spans; None: tracing is off.
        kv_events: publishes the events of its prefix cache; None: off.

    Attributes:
        scheduler: the address that it is attached to; empty: none.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        step_time: StepTimeModel,
        answers: Answers,
        hello: pb.AttachRequest,
        metrics: WorkerMetrics,
        engine: Engine | None,
        tracer: Tracer | None,
        kv_events: "Publisher | None",
    ) -> None:
        self.name = name
        self.kv_events = kv_events
        self._settings, self._answers, self._hello = settings, answers, hello
        self._gpu = MockGpu(step_time, answers.table)
        self._metrics, self._engine, self._tracer = metrics, engine, tracer
        self._log = get_logger("worker").bind(worker=name)
        self._attachment: Attachment | None = None
        self._draining = False
        self.scheduler = ""
        self._settled = asyncio.Event()  # cleared between the hello and the attachment
        self._settled.set()
        self._warn_at = math.inf  # monotonic: when the next failed attempt becomes a warning
        self._away_until = -math.inf  # monotonic: end of the current injected loss

    async def run(self, dial: Dial, set_attached: Callable[[bool], Awaitable[None]]) -> None:
        """Load the weights, then stay attached until cancelled.

        Args:
            dial: finds a scheduler.
            set_attached: called at the begin and at the end of each attachment.
        """
        if self.kv_events is None:
            await self._stay_attached(dial, set_attached)
        else:
            async with self.kv_events:
                await until_first_ends(self._stay_attached(dial, set_attached), self.kv_events.replay())

    async def drain(self) -> None:
        """Stop taking new sequences, and return when none is left."""
        self._draining = True
        self._metrics.enter("draining")
        if self._attachment is not None:
            await self._attachment.drain()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * CLOSE_SECONDS):  # for the welcome and for the drain message
                    await self._settled.wait()

    async def leave(self) -> None:
        """Move to another scheduler: drain, for at most `drain_seconds`, then end the attachment."""
        if (attachment := self._attachment) is not None and not self._draining:
            self._metrics.enter("draining")
            try:
                async with asyncio.timeout(self._settings.worker.drain_seconds):
                    await attachment.drain()
            except TimeoutError:
                self._log.info("drained_not_in_time", scheduler=self.scheduler)
            attachment.end()

    async def _stay_attached(self, dial: Dial, set_attached: Callable[[bool], Awaitable[None]]) -> None:
        await asyncio.sleep(self._settings.worker.startup_seconds * self._settings.time_scale)
        num_failed, self._warn_at = 0, time.monotonic() + WARN_AFTER_SECONDS
        while not self._draining:
            if (away_seconds := self._away_until - time.monotonic()) > 0:
                await asyncio.sleep(min(away_seconds, LONGEST_SLEEP_SECONDS))
                continue
            self._metrics.enter("dialling")
            attached, retry_seconds = False, None
            if (address := await dial.choose(self.name)) is None:
                self._say_not_attached(self._settings.worker.scheduler, "the name has no address")
            else:
                attached, retry_seconds = await self._attach(address, await dial.open_stream(address), set_attached)
            if self._draining:
                break
            num_failed = 0 if attached else num_failed + 1
            if retry_seconds is None:
                longest = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(num_failed, 10))
                retry_seconds = max(FIRST_RETRY_SECONDS, random.uniform(longest / 2, longest))
            await asyncio.sleep(retry_seconds)
        await asyncio.get_running_loop().create_future()

    async def _attach(
        self, address: str, call: Call, set_attached: Callable[[bool], Awaitable[None]]
    ) -> tuple[bool, float | None]:
        """Attach once and serve until the stream ends; return whether it was welcomed, and a retry delay or None."""
        attached = False
        kv_events = self.kv_events
        own = self._settings.worker
        try:
            if kv_events is not None:
                self._hello.hello.kv_events.CopyFrom(kv_events.source(await own_host(address)))
            if self._draining:  # drained while it looked for a scheduler; `drain` has already returned
                return False, None
            self._settled.clear()
            welcome = await self._greet(call)
            if self._draining:  # drained since it dialled: it must not get sequences
                await _take_leave(call)
                raise StreamBrokenError("drained before the welcome")
            clock = DeviceClock.synced(welcome.time_scale, welcome.sent_ps)
            attached = True
            faults = WorkerFaults(self._settings, self.name, from_wire(welcome.faults_from_ps, welcome.sent_ps))
            traces = self._traces_of(welcome)
            self._attachment = Attachment(
                call, self._gpu, clock, self._metrics, self._answers, faults, kv_events, traces, self._engine
            )
            if kv_events is not None:
                kv_events.clear()
            self.scheduler = address
            self._metrics.attach(attached=True)
            self._metrics.enter("attached")
            self._log.info("attached", scheduler=address, time_scale=welcome.time_scale)
            await set_attached(True)
            await self._attachment.run(own.heartbeat_seconds, self._until_lost(faults, clock))
            self._log.info("detached")
        except StreamBrokenError as error:
            self._say_not_attached(address, str(error), lost=attached)
        except grpc.aio.AioRpcError as error:
            retry_seconds = REFUSED_RETRY_SECONDS.get(error.code())
            if retry_seconds is not None:
                self._log.error("refused", reason=error.details(), retry_seconds=retry_seconds)
                return attached, retry_seconds
            self._say_not_attached(address, f"{error.code().name}: {error.details()}", lost=attached)
        finally:
            call.cancel()
            self._settled.set()
            self._attachment, self.scheduler = None, ""
            if attached:
                self._gpu.clear()
                if kv_events is not None:
                    kv_events.clear()
                self._warn_at = time.monotonic() + WARN_AFTER_SECONDS
                self._metrics.attach(attached=False)
                await set_attached(False)
        return attached, None

    def _say_not_attached(self, scheduler: str, reason: str, *, lost: bool = False) -> None:
        """Log that the worker is not attached: a loss as a warning, failed attempts mostly as info.

        A worker that starts together with its scheduler may fail to reach it at first; one that keeps failing needs
        attention.
        """
        say = self._log.info
        if lost or time.monotonic() >= self._warn_at:
            say = self._log.warning
            self._warn_at = time.monotonic() + WARN_EVERY_SECONDS
        say("not_attached", scheduler=scheduler, reason=reason)

    async def _until_lost(self, faults: WorkerFaults, clock: DeviceClock) -> None:
        """Wait for an injected loss of this GPU, one of several; a process of one GPU is killed from outside instead.

        Raises:
            StreamBrokenError: the GPU is lost now.
        """
        loss = faults.next_loss(clock.now_ps()) if self._settings.worker.gpus > 1 else None
        if loss is None:
            await asyncio.get_running_loop().create_future()
            return
        while (seconds := clock.to_monotonic(loss.at_ps) - time.monotonic()) > 0:  # noqa: ASYNC110  a time is awaited
            await asyncio.sleep(min(seconds, LONGEST_SLEEP_SECONDS))
        self._away_until = math.inf if loss.until_ps == NEVER else clock.to_monotonic(loss.until_ps)
        raise StreamBrokenError(f"injected fault: {loss.text}")

    def _traces_of(self, welcome: pb.WorkerWelcome) -> SequenceTraces | None:
        """Return the span maker of an attachment; None: tracing is off here or at the scheduler."""
        if self._tracer is None or not welcome.sent_unix_ns:
            return None
        return SequenceTraces(self._tracer, self.name, welcome.time_scale, welcome.sent_ps, welcome.sent_unix_ns)

    async def _greet(self, call: Call) -> pb.WorkerWelcome:
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                await call.write(self._hello)
                message = await call.read()
        except TimeoutError:
            raise StreamBrokenError(f"no welcome within {WELCOME_SECONDS:g} s") from None
        except asyncio.InvalidStateError:
            raise StreamBrokenError("the stream ended before the welcome") from None
        if not isinstance(message, pb.AttachResponse) or message.WhichOneof("message") != "welcome":
            raise StreamBrokenError("the scheduler's first message is no welcome")
        return message.welcome


async def _take_leave(call: Call) -> None:
    """Drain a stream that was just welcomed; cancelling it would count as the loss of a worker."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await call.write(wire.DRAINING)
            await call.done_writing()
            while isinstance(await call.read(), pb.AttachResponse):
                pass
    except (TimeoutError, asyncio.InvalidStateError):
        pass  # the scheduler does not answer, or has closed the stream
