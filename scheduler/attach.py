"""One worker's Attach stream, from its hello to its end: receives steps and heartbeats, sends plans."""

from collections.abc import AsyncIterator

import grpc.aio

from lorrery.scheduler import wire_workers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.hello import first_message
from lorrery.scheduler.messages import ProtocolError
from lorrery.scheduler.watch import Loss
from lorrery.scheduler.workers import INTERNAL, Dispatcher
from lorrery.service.errors import Conflict, InvalidRequest, Reason, WorkerGivenUp, WrongWorker
from lorrery.service.names import quoted, why_no_name
from lorrery.service.network import status
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.wire_time import from_wire

log = get_logger("scheduler")


class AttachStreams:
    """Serves Attach streams.

    Args:
        settings: of the cluster.
        cluster: which the workers join.
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster = settings, cluster
        self._timeout_seconds = settings.scheduler.worker_timeout_seconds

    async def serve(
        self,
        requests: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> None:
        """Serve one stream until it ends.

        Raises:
            RequestError: alone or in a group: an invalid message, or the worker was given up.
        """
        hello = (await first_message(requests, context, self._cluster.awake)).hello
        name = hello.worker_id
        if (why := why_no_name(name)) is not None:
            await status.abort(context, InvalidRequest(f"worker_id {why}; see worker.name", field="worker_id"))
        try:
            announced = wire_workers.read_worker_hello(hello)
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from None
        if 2 * hello.heartbeat_seconds > self._timeout_seconds:
            await status.abort(context, _heartbeats_too_rare(hello.heartbeat_seconds, self._timeout_seconds))
        old = self._cluster.workers.get(name)
        if old is not None and hello.instance_id and old.instance_id == hello.instance_id:
            old.give_up(Loss.SUPERSEDED, "the worker has dialled again")
            self._cluster.detach(old)
        elif old is not None:
            log.warning("worker_refused", worker_id=name, reason="its name is taken")
            message = (
                f"a worker named {quoted(name)} is attached already; each needs a name of its own:"
                " set worker.name, or leave it unset for HOST-PID"
            )
            await status.abort(context, Conflict(message, Reason.NAME_TAKEN, field="worker.name", value=quoted(name)))
        try:
            kv_source = hello.kv_events if hello.HasField("kv_events") else None
            worker = self._cluster.attach(announced, hello.instance_id, kv_source)
        except (ValueError, LookupError) as error:
            log.warning("worker_refused", worker_id=name, reason=str(error))
            raise WrongWorker(str(error)) from None
        try:
            now_ps, faults_from_ps = self._cluster.clock.now_ps(), self._cluster.faults.from_ps
            unix_ns = self._cluster.traces.unix_ns(now_ps)
            await context.write(wire_workers.welcome(self._settings.time_scale, now_ps, faults_from_ps, unix_ns))
            await until_first_ends(
                self._read_worker(requests, worker),
                worker.outbox.write_all(context.write),
                worker.until_given_up(),
                self._watch(worker),
            )
        finally:
            self._cluster.detach(worker)
        if worker.loss:
            raise WorkerGivenUp(worker.loss)

    async def _read_worker(self, messages: AsyncIterator[pb.AttachRequest], worker: Dispatcher) -> None:
        async for message in messages:
            worker.heard()
            try:
                self._receive(message, worker)
            except ProtocolError as error:
                worker.give_up(Loss.PROTOCOL, str(error))
            except Exception as error:
                worker.give_up(Loss.ERROR, INTERNAL, error)

    def _receive(self, message: pb.AttachRequest, worker: Dispatcher) -> None:
        kind, now_ps = message.WhichOneof("message"), self._cluster.clock.now_ps()
        if kind == "step":
            worker.step_done(wire_workers.read_step(message.step, now_ps))
        elif kind == "draining":
            self._cluster.drain_worker(worker)
        elif kind == "heartbeat":
            beat = message.heartbeat
            if beat.number:
                worker.answer(beat.number, now_ps)
            if beat.plan_id:
                worker.promised(beat.plan_id, from_wire(beat.step_end_ps, now_ps))
        elif kind == "faults_taken":
            worker.faults_taken(from_wire(message.faults_taken.from_ps, now_ps))
        elif kind == "hello":
            raise ProtocolError("hello is the first message, and no other")

    async def _watch(self, worker: Dispatcher) -> None:
        """Give up a worker that is silent, or makes no progress with its plan, for too long."""
        awake, watch = self._cluster.awake, worker.watch
        while (loss := watch.loss(awake.now())) is None:
            await awake.sleep_until(watch.due)
        limit = f"for {self._timeout_seconds:g} s (worker_timeout_seconds)"
        said = "nothing was heard of the worker" if loss is Loss.SILENT else "the worker made no progress with its plan"
        worker.give_up(loss, f"{said} {limit}")


def _heartbeats_too_rare(every_seconds: float, timeout_seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"the worker beats every {every_seconds:g} s; worker.heartbeat_seconds must be at most half of"
        f" scheduler.worker_timeout_seconds ({timeout_seconds:g})",
        field="worker.heartbeat_seconds",
        value=every_seconds,
        limit=timeout_seconds / 2,
    )
