"""A worker's life: load the weights, attach to the scheduler, run its plans; and again when the stream breaks.

The worker dials, so nobody has to find it, and a broken stream is the loss of the worker: it forgets every sequence,
the scheduler queues them again, and what this worker still had to say about them is dropped.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.chassis.channel import Dialler, own_host
from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.credentials import ClusterToken
from lorrery.chassis.log import get_logger
from lorrery.chassis.server import RECEIVE_BYTES
from lorrery.chassis.tasks import until_first_ends
from lorrery.chassis.tracing import open_tracer
from lorrery.settings import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc as pb_grpc
from lorrery.vocabulary.wire_time import from_wire
from lorrery.worker import wire
from lorrery.worker.build import answers_of, device_of
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.engine import Engine
from lorrery.worker.faults import WorkerFaults
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.pacer import Pacer, Plan, StepReport
from lorrery.worker.tracing import SequenceTraces

if TYPE_CHECKING:
    from lorrery.worker.kv_events.publisher import Publisher

WELCOME_SECONDS = 10.0
"""How long a scheduler may take to answer the worker's hello."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
"""Between two attempts to attach: doubled each time, and drawn from the upper half so that workers spread."""
REFUSED_RETRY_SECONDS = {
    grpc.StatusCode.FAILED_PRECONDITION: 10.0,  # another base model: only new settings, there or here, will help
    grpc.StatusCode.UNAUTHENTICATED: LAST_RETRY_SECONDS,  # a token that is being changed
    grpc.StatusCode.PERMISSION_DENIED: 10.0,
    grpc.StatusCode.INVALID_ARGUMENT: 10.0,  # so too for a hello that cannot be
    grpc.StatusCode.ALREADY_EXISTS: LAST_RETRY_SECONDS,  # its name is taken, perhaps by its own broken stream
}
"""After a scheduler refused this worker."""
CLOSE_SECONDS = 1.0
"""How long a drained worker waits for the scheduler to close the stream."""
JUMP_SECONDS = 1.0
"""By so many wall seconds the scheduler's clock may turn out to be behind what this worker thinks it is."""
MAX_OUTGOING = 4096
"""Messages that may wait for a slow stream, a minute of 15 ms steps; one more and the stream counts as broken."""

_log = get_logger("worker")

_Call = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


class StreamBrokenError(Exception):
    """The stream to the scheduler is of no more use; the message says why."""


class WorkerService:
    """The worker as the chassis runs it.

    Args:
        settings: of the cluster.
        registry: where its metrics are shown.

    Raises:
        SettingsError: unknown GPU or model, or a model that does not fit.
    """

    name = "worker"
    receive_bytes = RECEIVE_BYTES

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        worker = settings.worker
        device = device_of(settings)
        gpu, model = device.deployment.gpu, device.deployment.model
        self._settings = settings
        self.tracer = open_tracer(settings.tracing, self.name, registry)
        self._answers = answers_of(settings)
        self._gpu = MockGpu(device.step_time, self._answers.table)
        self._name = name = worker.name or f"{socket.gethostname()}-{os.getpid()}"
        self._engine = Engine.of(settings, registry, device.pool_tokens)
        self._metrics = WorkerMetrics(
            registry,
            name,
            device.pool_tokens,
            gpu=gpu.name,
            model=model.name,
            tensor_parallel=worker.tensor_parallel,
            peak_flops=gpu.tflops * 1e12,
            peak_bytes=gpu.gb_per_second * 1e9,
            engine=self._engine,
        )
        self._hello = wire.hello(
            worker_id=name,
            gpu=gpu.name,
            model=model.name,
            tensor_parallel=worker.tensor_parallel,
            kv_pool_tokens=device.pool_tokens,
            step_time_model=worker.step_time,
            needs_prompts=self._answers.needs_prompts,
            instance_id=uuid4().hex,
            heartbeat_seconds=worker.heartbeat_seconds,
            device_settings=device.settings,
            pace=device.pace,
        )
        self._log = get_logger("worker").bind(worker=name)
        self._attachment: _Attachment | None = None
        self._draining = False
        self._kv_events: Publisher | None = None
        if worker.kv_events.endpoint is not None:
            # Only here: few workers publish, and ZeroMQ takes a tenth of a second to import.
            from lorrery.worker.kv_events import publisher

            self._kv_events = publisher.Publisher(worker.kv_events, name, model.name, self._metrics)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add nothing: a worker dials, and answers health checks only."""
        del server
        return ()

    async def listen(self) -> Mapping[str, str]:
        """See `Service`: where KV events are published, as reached from this machine."""
        if self._kv_events is None:
            return {}
        self._kv_events.listen()
        source = self._kv_events.source("127.0.0.1")
        return {"kv_events": source.endpoint, "kv_events_replay": source.replay_endpoint}

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Load the weights, then stay attached until cancelled."""
        if self._kv_events is None:
            await self._live(set_ready)
        else:
            async with self._kv_events:
                await until_first_ends(self._live(set_ready), self._kv_events.replay())

    async def _live(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        await asyncio.sleep(self._settings.worker.startup_seconds * self._settings.time_scale)
        if not self._draining:
            await self._stay_attached(set_ready)
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Ask for no new sequences, and return when none is left."""
        self._draining = True
        self._metrics.enter("draining")
        if self._attachment is not None:
            await self._attachment.drain()

    async def _stay_attached(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        address = self._settings.worker.scheduler
        dialler = Dialler(address, self._settings.client_tls)
        token = ClusterToken(self._settings.cluster_token)
        num_failed = 0
        try:
            while not self._draining:
                await dialler.renew()
                stub = pb_grpc.SchedulerServiceStub(dialler.channel)
                self._metrics.enter("dialling")
                attached, retry_seconds = await self._attach(stub.Attach(metadata=token.metadata()), set_ready)
                if self._draining:
                    return
                num_failed = 0 if attached else num_failed + 1
                if retry_seconds is None:
                    longest = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(num_failed, 10))
                    retry_seconds = max(FIRST_RETRY_SECONDS, random.uniform(longest / 2, longest))
                await asyncio.sleep(retry_seconds)
        finally:
            await dialler.close()

    async def _attach(self, call: _Call, set_ready: Callable[[bool], Awaitable[None]]) -> tuple[bool, float | None]:
        """Attach once, and serve until the stream ends; return whether it began, and when to try again if not soon."""
        attached = False
        kv_events = self._kv_events
        try:
            if kv_events is not None:
                source = kv_events.source(await own_host(self._settings.worker.scheduler))
                self._hello.hello.kv_events.CopyFrom(source)
            welcome = await self._greet(call)
            clock = DeviceClock.synced(welcome.time_scale, welcome.sent_ps)
            attached = True
            faults_from_ps = from_wire(welcome.faults_from_ps, welcome.sent_ps)
            faults = WorkerFaults(self._settings, self._name, faults_from_ps)
            traces = self._traces_of(welcome)
            self._attachment = _Attachment(
                call, self._gpu, clock, self._metrics, self._answers, faults, kv_events, traces, self._engine
            )
            if kv_events is not None:
                kv_events.clear()
            self._metrics.attach(attached=True)
            self._metrics.enter("attached")
            self._log.info("attached", scheduler=self._settings.worker.scheduler, time_scale=welcome.time_scale)
            await set_ready(True)
            await self._attachment.run(self._settings.worker.heartbeat_seconds)
            self._log.info("detached")
        except StreamBrokenError as error:
            (self._log.warning if attached else self._log.info)("not_attached", reason=str(error))
        except grpc.aio.AioRpcError as error:
            retry_seconds = REFUSED_RETRY_SECONDS.get(error.code())
            if retry_seconds is not None:
                self._log.error("refused", reason=error.details(), retry_seconds=retry_seconds)
                return attached, retry_seconds
            reason = f"{error.code().name}: {error.details()}"
            (self._log.warning if attached else self._log.info)("not_attached", reason=reason)
        finally:
            call.cancel()
            self._attachment = None
            if attached:
                self._gpu.clear()
                if kv_events is not None:
                    kv_events.clear()
                self._metrics.attach(attached=False)
                await set_ready(False)
        return attached, None

    def _traces_of(self, welcome: pb.WorkerWelcome) -> SequenceTraces | None:
        """Return what makes spans of an attachment; None: nobody wants them."""
        if self.tracer is None or not welcome.sent_unix_ns:
            return None
        return SequenceTraces(self.tracer, self._name, welcome.time_scale, welcome.sent_ps, welcome.sent_unix_ns)

    async def _greet(self, call: _Call) -> pb.WorkerWelcome:
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


class _Attachment:
    """One stream to the scheduler, from its welcome to its end."""

    def __init__(
        self,
        call: _Call,
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
        self._outgoing: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue(MAX_OUTGOING)
        self._pacer = Pacer(gpu, clock, metrics, self._report, faults.spells)
        self._ended = asyncio.Event()
        self._num_beats, self._beat_at = 0, 0.0

    async def run(self, heartbeat_seconds: float) -> None:
        """Serve until the scheduler ends the stream.

        Raises:
            StreamBrokenError: the stream is too slow, or the scheduler says what cannot be.
            grpc.aio.AioRpcError: the stream broke.
        """
        try:
            await until_first_ends(self._read(), self._write(), self._pacer.run(), self._beat(heartbeat_seconds))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._ended.set()
            if self._traces:
                self._traces.detached(self._pacer.boundary_ps)

    async def drain(self) -> None:
        """Finish the sequences that are here, tell their ends, and close the stream."""
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
        await self._outgoing.put(None)

    def _report(self, report: StepReport) -> None:
        if self._traces:
            self._traces.stepped(report)
        self._send(wire.step_done(report))

    def _send(self, message: pb.AttachRequest) -> None:
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            raise StreamBrokenError(f"{MAX_OUTGOING} messages wait for the scheduler") from None

    async def _write(self) -> None:
        """Write until None, which closes the stream: a heartbeat that came after that would break it."""
        while (message := await self._outgoing.get()) is not None:
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError:
                raise StreamBrokenError("the scheduler ended the stream") from None
        await self._call.done_writing()
        await self._ended.wait()

    async def _beat(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            self._num_beats, self._beat_at = self._num_beats + 1, time.monotonic()
            self._send(wire.heartbeat(self._num_beats, self._pacer.progress))

    def _answered(self, answer: pb.HeartbeatAnswer, now_ps: int) -> None:
        if answer.number != self._num_beats:
            return
        ahead_seconds = self._clock.observe(from_wire(answer.sent_ps, now_ps), self._beat_at)
        if ahead_seconds > JUMP_SECONDS:
            # What runs here was put at times that the scheduler's clock has not reached. A new stream starts anew.
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
            self._engine.take(message.engine)

    async def _read_plan(self, message: pb.Plan, now_ps: int) -> Plan:
        if any(join.sampling.stop_sequences_u32 for join in message.joins):
            # Where they stop takes a look at all that they may say: long enough for heartbeats to be missed.
            return await asyncio.to_thread(wire.read_plan, message, self._answers, now_ps)
        return wire.read_plan(message, self._answers, now_ps)
