"""One stream to the scheduler, from its welcome to its end: plans come in, steps and heartbeats go out."""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import grpc.aio

from lorrery.service.clocks import DeviceClock
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import WORKER_LOSS, Fault, parse_fault
from lorrery.service.faults.rules import RuleBook
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.units import from_wire
from lorrery.worker import wire
from lorrery.worker.build import spells_of
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.steptime import Spells
from lorrery.worker.engine_metrics import Engine
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.pacer import Pacer, Plan, StepReport
from lorrery.worker.tracing import SequenceTraces

if TYPE_CHECKING:
    from lorrery.worker.kv_events import Publisher


class WorkerFaults:
    """The faults of one worker, from its attachment on.

    Args:
        settings: of the cluster; some of its faults may name this worker.
        name: name of the worker.
        from_ps: origin of the times in the settings' faults.
    """

    def __init__(self, settings: Settings, name: str, from_ps: int) -> None:
        self._name = name
        self._book = RuleBook()
        self._book.plan(settings.planned_faults(), from_ps)
        # A loss that names a whole process is not among them: whatever runs the process kills it.
        asked = map(parse_fault, settings.faults)
        losses = [fault for fault in asked if (fault.kind, fault.worker) == (WORKER_LOSS, name)]
        self._losses = [fault.begun_at(from_ps) for fault in losses]

    @property
    def spells(self) -> Spells:
        """When the worker is slow or frozen."""
        return spells_of(self._book.sets, self._name)

    def next_loss(self, at_ps: int) -> Fault | None:
        """Return the settings' first loss of this worker that is not over at `at_ps`, in device time; None: no more."""
        losses = [fault for fault in self._losses if fault.until_ps > at_ps]
        return min(losses, key=lambda fault: fault.at_ps, default=None)

    def take(self, rules: Iterable[str], from_ps: int, *, add: bool) -> Spells:
        """Apply an operator's faults from `from_ps` on; return when the worker is slow or frozen.

        Args:
            rules: one fault each, as text.
            from_ps: origin of the times in the rules.
            add: whether the faults set before stay in force.

        Raises:
            ValueError: a rule cannot be parsed.
        """
        try:
            faults = [parse_fault(rule) for rule in rules]
        except SettingsError as error:
            raise ValueError(str(error)) from None
        self._book.take(faults, from_ps, add=add)
        return self.spells


CLOSE_SECONDS = 1.0
"""How long a drained worker waits for the scheduler to close the stream."""
JUMP_SECONDS = 1.0
"""Largest wall time by which the scheduler's clock may turn out to be behind this worker's estimate of it."""
MAX_OUTGOING = 4096
"""Outgoing messages queued for a slow stream, a minute of 15 ms steps; one more and the stream counts as broken."""

_log = get_logger("worker")

Call = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


class StreamBrokenError(Exception):
    """The stream to the scheduler can no longer be used; the message says why."""


class Attachment:
    """One attachment of a GPU to a scheduler, for as long as its stream lasts.

    Args:
        call: the stream, after its welcome.
        gpu: the GPU that runs the plans.
        clock: this worker's estimate of the scheduler's device clock.
        metrics: of the worker.
        answers: output model.
        faults: of this worker.
        kv_events: publishes the events of the prefix cache; None: off.
        traces: makes spans; None: off.
        engine: metrics under other engines' names; None: off.
    """

    def __init__(
        self,
        call: Call,
        gpu: MockGpu,
        clock: DeviceClock,
        metrics: WorkerMetrics,
        answers: Answers,
        faults: WorkerFaults,
        kv_events: "Publisher | None",
        traces: SequenceTraces | None,
        engine: Engine | None,
    ) -> None:
        self._traces = traces
        self._call, self._clock, self._answers, self._faults = call, clock, answers, faults
        self._kv_events, self._engine = kv_events, engine
        self._outgoing: deque[pb.AttachRequest | None] = deque()
        self._more: asyncio.Future[None] | None = None  # while the writer waits
        self._pacer = Pacer(gpu, clock, metrics, self._report, faults.spells)
        self._ended = asyncio.Event()
        self._to_end = asyncio.Event()
        self._num_beats, self._beat_at = 0, 0.0

    async def run(self, heartbeat_seconds: float, until_lost: Coroutine[Any, Any, None]) -> None:
        """Serve until the scheduler ends the stream.

        Args:
            heartbeat_seconds: wall time between two heartbeats.
            until_lost: raises when the GPU is to be lost.

        Raises:
            StreamBrokenError: the stream is too slow, or the scheduler sent an invalid message.
            grpc.aio.AioRpcError: the stream broke.
        """
        try:
            await until_first_ends(
                self._read(),
                self._write(),
                self._pacer.run(),
                self._beat(heartbeat_seconds),
                until_lost,
                self._until_to_end(),
            )
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._ended.set()
            if self._traces:
                self._traces.detached(self._pacer.boundary_ps)

    def end(self) -> None:
        """End the stream now; the scheduler queues the running sequences on other workers."""
        self._to_end.set()

    async def _until_to_end(self) -> None:
        await self._to_end.wait()

    async def drain(self) -> None:
        """Finish the sequences on this worker, report them, and close the stream."""
        self._send(wire.DRAINING)
        ended = asyncio.ensure_future(self._ended.wait())
        finished = asyncio.ensure_future(self._finish())
        try:
            await asyncio.wait((ended, finished), return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.is_set():
                await asyncio.wait((ended,), timeout=CLOSE_SECONDS)
        finally:
            for task in (ended, finished):
                task.cancel()

    async def _finish(self) -> None:
        await self._pacer.empty.wait()
        self._put(None)

    def _report(self, report: StepReport) -> None:
        if self._traces:
            self._traces.stepped(report)
        self._send(wire.step_done(report))

    def _send(self, message: pb.AttachRequest) -> None:
        if len(self._outgoing) >= MAX_OUTGOING:
            raise StreamBrokenError(f"{MAX_OUTGOING} messages wait for the scheduler")
        self._put(message)

    def _put(self, message: pb.AttachRequest | None) -> None:
        self._outgoing.append(message)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _write(self) -> None:
        """Write queued messages until None, which closes the stream; a heartbeat written after that would break it."""
        outgoing, loop = self._outgoing, asyncio.get_running_loop()
        while True:
            while not outgoing:  # not an asyncio.Queue, which costs much more per message
                self._more = loop.create_future()
                await self._more
            message = outgoing.popleft()
            if message is None:
                break
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError:
                raise StreamBrokenError("the scheduler ended the stream") from None
        await self._call.done_writing()
        await self._ended.wait()

    async def _beat(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            self._pacer.count()
            self._num_beats, self._beat_at = self._num_beats + 1, time.monotonic()
            self._send(wire.heartbeat(self._num_beats, self._pacer.progress))

    def _answered(self, answer: pb.HeartbeatAnswer, now_ps: int) -> None:
        if answer.number != self._num_beats:
            return
        ahead_seconds = self._clock.observe(from_wire(answer.sent_ps, now_ps), self._beat_at)
        if ahead_seconds > JUMP_SECONDS:
            # Steps here were scheduled at times that the scheduler's clock has not reached. A new stream starts afresh.
            raise StreamBrokenError(f"the clock of this host or of the scheduler's has jumped by {ahead_seconds:.3f} s")

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, pb.AttachResponse):
                return
            try:
                await self._receive(message)
            except ValueError as error:
                _log.exception("message_refused")
                raise StreamBrokenError(str(error)) from None

    async def _receive(self, message: pb.AttachResponse) -> None:
        now_ps = self._clock.now_ps()
        match message.WhichOneof("message"):
            case "plan":
                self._clock.observe(from_wire(message.plan.sent_ps, now_ps))
                plan = await self._read_plan(message.plan, now_ps)
                if self._traces is not None and ((parents := wire.parents(message.plan)) or self._traces):
                    self._traces.planned(plan, parents)
                self._show(message.plan)
                self._pacer.start(plan)
            case "interrupt":
                self._pacer.interrupt(message.interrupt.plan_id, from_wire(message.interrupt.at_ps, now_ps))
            case "heartbeat_answer":
                self._show(message.heartbeat_answer)
                self._answered(message.heartbeat_answer, now_ps)
            case "faults":
                faults, from_ps = message.faults, max(now_ps, self._pacer.boundary_ps + 1)
                if faults.HasField("from_ps"):
                    from_ps = from_wire(faults.from_ps, now_ps)
                self._pacer.use(self._faults.take(faults.rules, from_ps, add=faults.add))
                self._send(wire.faults_taken(from_ps))
            case "kv_events" if self._kv_events is not None:
                self._kv_events.publish(message.kv_events)
            case other:
                raise ValueError(f"the scheduler sent {other} in the middle of the stream")

    def _show(self, message: pb.Plan | pb.HeartbeatAnswer) -> None:
        if self._engine is not None and message.HasField("engine"):
            self._pacer.count()  # first count the tokens that the scheduler's counts refer to
            self._engine.take(message.engine)

    async def _read_plan(self, message: pb.Plan, now_ps: int) -> Plan:
        if any(join.sampling.stop_sequences_u32 for join in message.joins):
            # Finding where they stop means generating the whole output, which could take long enough to miss
            # heartbeats.
            return await asyncio.to_thread(wire.read_plan, message, self._answers, now_ps)
        return wire.read_plan(message, self._answers, now_ps)
