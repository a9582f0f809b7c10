"""A live cluster without processes: the scheduler's and the worker's own code, on an event loop whose time jumps.

Messages take random times (in order, as a stream has them), timers fire late, and now and then everything stands
still, so all that can happen between a scheduler and its workers does, quickly and the same in every run.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from lorrery.scheduler import wire_routers, wire_workers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.routers import RouterLink
from lorrery.service.clocks import DeviceClock
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from lorrery.vocabulary.endings import CancelCause
from lorrery.vocabulary.units import from_wire
from lorrery.worker import wire as worker_wire
from lorrery.worker.build import answers_of, device_of
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.pacer import Pacer, StepReport


class VirtualCluster:
    """A scheduler with workers.

    Args:
        settings: of the cluster.
        rng: for how long messages take.
        latency_seconds: the mean of that.
        skew_ps: how much the workers' clocks are ahead of the scheduler's, as another host's may be.
        cuts: whether some cancels are of outputs that end at a stop string, and some requests skip the prefix cache.
    """

    def __init__(
        self, settings: Settings, rng: random.Random, latency_seconds: float, skew_ps: int, *, cuts: bool = False
    ) -> None:
        self._cuts = cuts
        self.cluster = Cluster(settings, CollectorRegistry())
        self.cluster.slices.seconds = 0  # so that all else may come in between
        self.settings = settings
        self.workers: list[VirtualWorker] = []
        self._rng = rng
        self._latency_seconds = latency_seconds
        self.skew_ps = skew_ps
        self.errors: list[BaseException] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_handles = 0
        self.router = RouterLink("router", self.cluster.clock, 10**9)

    def submit(
        self,
        sampling: pb.Sampling,
        prompt: list[int],
        adapter_id: str = "",
        produced: tuple[int, ...] = (),
        priority: int = 0,
    ) -> int:
        """Send a request; return the router's handle."""
        self._num_handles += 1
        message = pb.Submit(
            handle=self._num_handles,
            request_id=f"r{self._num_handles}",
            adapter_id=adapter_id,
            tenant_id="t",
            prompt_token_ids_u32=u32.pack(prompt),
            produced_token_ids_u32=u32.pack(produced),
            sampling=sampling,
            priority=priority,
            skips_prefix_cache=self._cuts and self._num_handles % 5 == 0,
        )
        self.cluster.requests.submit(wire_routers.read_submit(message), self.router)
        return self._num_handles

    def cancel(self, handle: int) -> None:
        cause = CancelCause.STOP_TEXT if self._cuts and handle % 2 else CancelCause.CLIENT_LEFT
        self.cluster.requests.cancel(self.router, handle, cause, 1)

    def attach(self) -> "VirtualWorker":
        worker = VirtualWorker(self, len(self.workers))
        self.workers.append(worker)
        return worker

    def ended(self, task: "asyncio.Task[None]") -> None:
        """Note what went wrong in a worker, if anything."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)
            if not self.failed.done():
                self.failed.set_result(None)

    def delay(self) -> float:
        return self._rng.expovariate(1 / self._latency_seconds) if self._latency_seconds else 0.0

    async def over(self) -> None:
        """Return once no request is left, or something went wrong."""
        empty = asyncio.ensure_future(self.cluster.requests.empty.wait())
        await asyncio.wait([empty, self.failed], return_when=asyncio.FIRST_COMPLETED)
        empty.cancel()

    async def close(self) -> None:
        for worker in self.workers:
            worker.die()
        await asyncio.sleep(1.0)
        self.cluster.close_journal()


class VirtualWorker:
    """A worker, from attaching to its death."""

    def __init__(self, owner: VirtualCluster, number: int) -> None:
        settings, cluster = owner.settings, owner.cluster
        device = device_of(settings)
        self._owner = owner
        self._answers = answers_of(settings)
        hello = WorkerHello(
            worker_id=f"w{number}",
            gpu=device.deployment.gpu.name,
            model=device.deployment.model.name,
            tensor_parallel=1,
            max_total_token_num=device.pool_tokens,
            step_time_model=settings.worker.step_time,
            needs_prompts=self._answers.needs_prompts,
        )
        self.alive = True
        self.dispatcher = cluster.attach(hello)
        clock = self._clock = DeviceClock.synced(settings.time_scale, cluster.clock.now_ps() + owner.skew_ps)
        metrics = WorkerMetrics(CollectorRegistry(), "worker", device.pool_tokens, peak_flops=1e15, peak_bytes=1e12)
        self.pacer = Pacer(MockGpu(device.step_time, self._answers.table), clock, metrics, self._report)
        self._down: asyncio.Queue[pb.AttachResponse] = asyncio.Queue()
        self._up: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(job)
            for job in (
                self.dispatcher.outbox.write_all(self._write),
                self._carry(self._down, self._receive),
                self._carry(self._up, self._arrive),
                self.pacer.run(),
            )
        ]
        for task in self._tasks:
            task.add_done_callback(owner.ended)

    def drain(self) -> None:
        """Ask for no new sequences."""
        if self.alive:
            self._owner.cluster.drain_worker(self.dispatcher)

    def die(self) -> None:
        """Break the stream; what is on its way is lost."""
        if self.alive:
            self.alive = False
            for task in self._tasks:
                task.cancel()
            self._owner.cluster.detach(self.dispatcher)

    async def _write(self, message: pb.AttachResponse) -> None:
        self._down.put_nowait(message)

    def _report(self, report: StepReport) -> None:
        self._up.put_nowait(worker_wire.step_done(report))

    async def _carry(self, queue: "asyncio.Queue[Any]", deliver: Callable[[Any], None]) -> None:
        while True:
            message = await queue.get()
            await asyncio.sleep(self._owner.delay())
            deliver(message)

    def _receive(self, message: pb.AttachResponse) -> None:
        if message.WhichOneof("message") == "plan":
            self.pacer.start(worker_wire.read_plan(message.plan, self._answers, self._clock.now_ps()))
        else:
            at_ps = from_wire(message.interrupt.at_ps, self._clock.now_ps())
            self.pacer.interrupt(message.interrupt.plan_id, at_ps)

    def _arrive(self, message: pb.AttachRequest) -> None:
        self.dispatcher.step_done(wire_workers.read_step(message.step, self._owner.cluster.clock.now_ps()))


async def play(
    settings: Settings, rng: random.Random, *, num_requests: int, num_workers: int = 2, cuts: bool = False
) -> Cluster:
    """Run a random scenario: arrivals, cancels, workers that drain, die and come; return the scheduler."""
    latency_seconds, skew_ps = rng.choice([0.0, 0.0003, 0.004, 0.03]), rng.choice([0, 0, 10**9, 3 * 10**10])
    virtual = VirtualCluster(settings, rng, latency_seconds, skew_ps, cuts=cuts)
    for _ in range(num_workers):
        virtual.attach()
    if rng.random() < 0.5:
        await virtual.cluster.adapters.load("late-adapter", 8)
    adapters = ["", *virtual.cluster.core.adapters]
    shared = [int(token) for token in np.random.default_rng(1).integers(3, 900, 200)]
    pace = rng.choice([0.001, 0.02, 0.1])
    for _ in range(num_requests):
        await asyncio.sleep(rng.expovariate(1 / pace) * rng.choice([0, 1, 1]))
        most = rng.randint(1, 80)
        sampling = pb.Sampling(seed=rng.getrandbits(64), max_new_tokens=most, ignore_eos=rng.random() < 0.3)
        if rng.random() < 0.5:
            sampling.true_output_tokens = rng.randint(1, most)
        if rng.random() < 0.2:
            sampling.stop_sequences_u32.append(u32.pack([rng.randint(3, 20)]))
        if settings.worker.output.mode == "logits" and rng.random() < 0.7:
            sampling.sampler.CopyFrom(pb.Sampler(temperature=rng.uniform(0.1, 2), frequency_penalty=rng.random()))
        prompt = shared[: rng.randint(1, 200)] + [rng.randint(3, 900) for _ in range(rng.randint(0, 40))]
        produced = (7,) * rng.randint(1, 3) if rng.random() < 0.05 and most > 3 else ()
        priority = rng.randint(-2, 2) if settings.scheduler.policy == "priority" else 0
        handle = virtual.submit(sampling, prompt, rng.choice(adapters), produced, priority)
        _chance(rng, 0.2, virtual.cancel, handle, within_seconds=rng.choice([0.0, 0.05, 1.0]))
    for worker in list(virtual.workers):
        _chance(rng, 0.3, worker.die, within_seconds=1.0)
        _chance(rng, 0.2, worker.drain, within_seconds=1.0)
    asyncio.get_running_loop().call_later(rng.random(), virtual.attach)
    async with asyncio.timeout(1000):
        await virtual.over()
    await virtual.close()
    if virtual.errors:
        raise virtual.errors[0]
    return virtual.cluster


def _chance(
    rng: random.Random, probability: float, what: Callable[..., object], *arguments: object, within_seconds: float
) -> None:
    if rng.random() < probability:
        asyncio.get_running_loop().call_later(rng.random() * within_seconds, what, *arguments)
