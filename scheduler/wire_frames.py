"""The frames of a scheduler as wire messages, its watchers, and the history that frames are made from."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import Facts
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.subscribers.frames import BASE_MODEL, CoreFrame, Watcher, WorkerSnapshot
from lorrery.scheduler.subscribers.history import History
from lorrery.service.clocks import DeviceClock
from lorrery.service.faults.kinds import Fault
from lorrery.v1 import frame_pb2 as pb
from lorrery.v1 import scheduler_pb2
from lorrery.view.frame import checked_hz
from lorrery.vocabulary import u32
from lorrery.vocabulary.u32 import pack

FrameMessage = scheduler_pb2.WatchFramesResponse
_PS_PER_US = 1_000_000
_MAX_U32 = 2**32 - 1


class WorkerRuns(Protocol):
    """What a driver knows of a worker's execution."""

    hello: WorkerHello

    @property
    def step_ps(self) -> int:
        """How long its last step took; 0: it is idle."""
        ...

    @property
    def computes(self) -> tuple[bool, bool]:
        """Whether the current step computes prompts, and whether it decodes."""
        ...

    @property
    def num_tokens(self) -> int:
        """Output tokens since it attached."""
        ...

    @property
    def busy_ps(self) -> int:
        """Time in steps since it attached."""
        ...

    @property
    def late_ps(self) -> int:
        """Time that it stood idle although it had a plan, since it attached."""
        ...


def write_frame(
    frame: CoreFrame,
    workers: Mapping[str, WorkerRuns],
    time_scale: float,
    faults: Iterable[tuple[Fault, int]] = (),
) -> FrameMessage:
    """Return the message of a frame.

    Args:
        frame: of the core.
        workers: those of its snapshot, by name.
        time_scale: wall seconds per device second.
        faults: that are on, with how often each has happened.
    """
    now = frame.now
    position = {worker.name: number for number, worker in enumerate(now.workers, start=1)}
    message = pb.Frame(
        at_ps=now.at_ps,
        adapters_new=frame.adapters_new,
        tenants_new=frame.tenants_new,
        workers=[_worker(worker, workers[worker.name], frame.preempted.get(worker.name, 0)) for worker in now.workers],
        num_unplaced=now.num_unplaced,
        num_held=now.num_held,
        tenants=[
            pb.TenantFrame(
                tenant=row.tenant + 1,
                num_running=row.use.num_running,
                num_waiting=row.use.num_waiting,
                oldest_ps=row.use.oldest_ps,
                output_tokens=row.output_tokens,
                num_refused=row.num_refused,
            )
            for row in frame.tenants
        ],
        adapters=[
            pb.AdapterFrame(
                adapter=row.adapter + 1,
                num_running=row.use.num_running,
                num_waiting=row.use.num_waiting,
                num_loads=row.counts.num_loads,
                num_evictions=row.counts.num_evictions,
                num_thrash=row.counts.num_thrashes,
                unloaded=row.unloaded,
            )
            for row in frame.adapters
        ],
        totals=pb.FrameTotals(
            requests=frame.totals.requests,
            finished=frame.totals.finished,
            refused=frame.totals.refused,
            cancelled=frame.totals.cancelled,
            prompt_tokens=frame.totals.prompt_tokens,
            output_tokens=frame.totals.output_tokens,
            preempted=frame.totals.preempted,
            moved=frame.totals.moved,
            workers_lost=frame.totals.workers_lost,
            loads=frame.totals.loads,
            prefix_queries=frame.totals.prefix_queries,
            prefix_hits=frame.totals.prefix_hits,
            dropped=frame.totals.dropped,
            failed=frame.totals.failed,
        ),
        ended=[
            pb.EndedRequest(
                request=one.handle,
                worker=position.get(one.worker, 0),
                adapter=row.adapter + 1,
                tenant=row.tenant + 1,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                arrived_ps=one.arrived_ps,
                queue_ps=one.phases.queue_ps,
                adapter_load_ps=one.phases.adapter_load_ps,
                prefill_ps=one.phases.prefill_ps,
                decode_ps=one.phases.decode_ps,
                outcome=one.outcome,
            )
            for row in frame.ended
            for one in (row.ended,)
        ],
        num_more_ended=frame.num_more_ended,
        events=[pb.FrameEvent(at_ps=event.at_ps, kind=event.kind, text=event.text) for event in frame.events],
        num_more_events=frame.num_more_events,
        missing=[
            pb.MissingWorker(
                worker_id=one.name,
                gpu=one.origin.gpu,
                tensor_parallel=one.origin.tensor_parallel,
                pool_tokens=one.pool_tokens,
                lost_ps=one.lost_ps,
            )
            for one in frame.missing
        ],
        faults=[pb.ActiveFault(rule=fault.text, num_met=num_met) for fault, num_met in faults],
    )
    return FrameMessage(frame=message, time_scale=time_scale)


def _worker(worker: WorkerSnapshot, runs: WorkerRuns, num_preempted: int) -> pb.WorkerFrame:
    prefills, decodes = runs.computes
    residents = worker.residents
    return pb.WorkerFrame(
        worker_id=worker.name,
        gpu=runs.hello.gpu,
        tensor_parallel=runs.hello.tensor_parallel,
        draining=worker.draining,
        requests_u32=pack(worker.handles),
        request_adapters_u32=_numbers(worker.adapters),
        request_tenants_u32=_numbers(worker.tenants),
        prompt_tokens_u32=pack(worker.prompt_tokens),
        output_tokens_u32=pack(worker.output_tokens),
        num_waiting=worker.num_waiting,
        oldest_ps=worker.oldest_ps,
        kv_tokens=worker.kv_tokens,
        pool_tokens=worker.pool_tokens,
        adapters_u32=_numbers(one.adapter for one in residents),
        adapter_states_u32=pack([one.state for one in residents]),
        adapter_ranks_u32=pack([one.rank for one in residents]),
        adapter_left_us_u32=pack([min(one.left_ps // _PS_PER_US, _MAX_U32) for one in residents]),
        num_host_adapters=worker.num_host,
        step_ps=runs.step_ps,
        prefills=prefills,
        decodes=decodes,
        num_tokens=runs.num_tokens,
        busy_ps=runs.busy_ps,
        num_preempted=num_preempted,
        late_ps=runs.late_ps,
    )


def _numbers(values: Iterable[int]) -> bytes:
    """Pack numbers of names, counted from 1 on the wire, where 0 is the base model."""
    return u32.pack([value - BASE_MODEL for value in values])


class Feed:
    """Frames of one scheduler.

    Args:
        core: of the scheduler.
        facts: of the scheduler, before any is published.
        workers: attached, by name.
        clock: device clock.
        active_faults: returns the faults that are on at a time, with how often each has happened.
    """

    def __init__(
        self,
        core: ClusterCore,
        facts: Facts,
        workers: Mapping[str, WorkerRuns],
        clock: DeviceClock,
        active_faults: Callable[[int], Sequence[tuple[Fault, int]]],
    ) -> None:
        self._history = History()
        self._core = core
        self._workers = workers
        self._clock = clock
        self._active_faults = active_faults
        facts.subscribe(self._history)

    async def frames(self, hz: float) -> AsyncGenerator[FrameMessage]:
        """Yield frames at `hz` per second; none is made before the previous one is taken.

        Raises:
            InvalidRequest: `hz` is too low or too high.
        """
        seconds = 1 / checked_hz(hz)
        watcher = Watcher(self._history, known=self._core.adapters)
        due = time.monotonic()
        while True:
            now_ps = self._clock.now_ps()
            frame = watcher.frame(self._core, now_ps)
            yield write_frame(frame, self._workers, self._clock.time_scale, self._active_faults(now_ps))
            due = max(due + seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
