"""A worker process: one or more mock GPUs, each a separate worker to the scheduler.

The GPUs share the catalogue, the step-time model with its tables, the tokenizer's words, the channel to the scheduler,
the metrics endpoint and the health service. What each GPU has of its own is in `hosted.py`.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from uuid import uuid4

import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.service.installed import need_extra
from lorrery.service.names import gpu_names, quoted
from lorrery.service.network.server import RECEIVE_BYTES
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.tracing import open_tracer
from lorrery.worker import wire
from lorrery.worker.build import answers_of, device_of
from lorrery.worker.engine_metrics import Engine
from lorrery.worker.hosted import HostedGpu
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.schedulers import Schedulers
from lorrery.worker.timekeeping import RealtimePriority

log = get_logger("worker")


class WorkerService:
    """The worker as `service.process` runs it: SERVING while all its GPUs are attached.

    Args:
        settings: of the cluster.
        registry: where its metrics are registered.
        priority: real-time priority of the process; None: it is an ordinary one.

    Raises:
        SettingsError: unknown GPU or model, or a model that does not fit.
    """

    name = "worker"
    receive_bytes = RECEIVE_BYTES

    def __init__(
        self, settings: Settings, registry: CollectorRegistry, priority: RealtimePriority | None = None
    ) -> None:
        self._settings, self._registry, self._priority = settings, registry, priority
        self.tracer = open_tracer(settings.tracing, self.name, registry)
        self._device = device_of(settings)
        self._answers = answers_of(settings)
        self._instance_id = uuid4().hex
        own = settings.worker
        names = gpu_names(own.name or f"{socket.gethostname()}-{os.getpid()}", own.gpus)
        self._gpus = [self._host(name, number) for number, name in enumerate(names)]
        self._num_attached = 0

    def _host(self, name: str, number: int) -> HostedGpu:
        settings, own, device, answers = self._settings, self._settings.worker, self._device, self._answers
        gpu, model = device.deployment.gpu, device.deployment.model
        engine = Engine.of(settings, self._registry, device.pool_tokens, number)
        metrics = WorkerMetrics(
            self._registry,
            name,
            device.pool_tokens,
            gpu=gpu.name,
            model=model.name,
            tensor_parallel=own.tensor_parallel,
            peak_flops=gpu.tflops * 1e12,
            peak_bytes=gpu.gb_per_second * 1e9,
            engine=engine,
        )
        hello = wire.hello(
            worker_id=name,
            gpu=gpu.name,
            model=model.name,
            tensor_parallel=own.tensor_parallel,
            kv_pool_tokens=device.pool_tokens,
            step_time_model=own.step_time,
            needs_prompts=answers.needs_prompts,
            instance_id=self._instance_id,
            heartbeat_seconds=own.heartbeat_seconds,
            device_settings=device.settings,
            pace=device.pace,
            front_end=device.deployment.front_end,
        )
        kv_events = None
        if own.kv_events.endpoint is not None:
            need_extra("kv-events", f"worker.kv_events.endpoint {quoted(own.kv_events.endpoint)}")
            from lorrery.worker.kv_events import Publisher  # ZeroMQ, imported only where it is used

            kv_events = Publisher(own.kv_events.of_gpu(number), name, model.name, metrics)
        return HostedGpu(name, settings, device.step_time, answers, hello, metrics, engine, self.tracer, kv_events)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add no service: a worker dials the scheduler, and serves health checks only."""
        del server
        return ()

    async def listen(self) -> Mapping[str, str]:
        """See `Service`: return the addresses at which KV events are published, as reached from this machine."""
        addresses: dict[str, str] = {}
        for number, gpu in enumerate(self._gpus):
            if gpu.kv_events is not None:
                gpu.kv_events.listen()
                source, which = gpu.kv_events.source("127.0.0.1"), f".{number}" if len(self._gpus) > 1 else ""
                addresses |= {f"kv_events{which}": source.endpoint, f"kv_events_replay{which}": source.replay_endpoint}
        return addresses

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """See `HostedGpu.run`."""

        async def set_attached(attached: bool) -> None:
            was_whole = self._num_attached == len(self._gpus)
            self._num_attached += 1 if attached else -1
            if was_whole or self._num_attached == len(self._gpus):
                await set_ready(not was_whole)

        schedulers = Schedulers(self._settings)
        try:
            await until_first_ends(
                *(gpu.run(schedulers, set_attached) for gpu in self._gpus),
                schedulers.keep_balanced(self._gpus),
                self._tell_extrapolated(),
                *(() if self._priority is None else (self._priority.keep(),)),
            )
        finally:
            await schedulers.close()

    async def _tell_extrapolated(self) -> None:
        """Log once that steps were outside the measured range."""
        if self._device.can_extrapolate:
            while True:
                await asyncio.sleep(self._settings.worker.heartbeat_seconds)
                if beyond := self._device.extrapolated:
                    log.warning("step_times_extrapolated", beyond_profile=beyond)
                    break
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Stop taking new sequences, and return when none is left."""
        ends = await asyncio.gather(*(gpu.drain() for gpu in self._gpus), return_exceptions=True)
        for gpu, error in zip(self._gpus, ends, strict=True):  # the failure of one does not cut the others short
            if error is not None:
                log.error("drain_failed", worker=gpu.name, reason=repr(error))
