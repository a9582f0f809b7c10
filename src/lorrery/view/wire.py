"""The feed of a running cluster, as a client of one router: merges frames, one per scheduler, into one of the cluster.

Schedulers share nothing, not even a clock. Here their tables of names are merged, their requests get unique numbers,
their times are converted to one clock, and their counts are summed; the counts of a lost scheduler are kept.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import msgspec

from lorrery.service.errors import LorreryError
from lorrery.service.installed import VERSION
from lorrery.service.network.channel import open_channel, why_silent
from lorrery.service.network.credentials import bearer
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import frame_pb2, router_pb2, router_pb2_grpc
from lorrery.view.frame import (
    BASE_MODEL,
    NO_WORKER,
    USUAL_HZ,
    AdapterRow,
    EndedRow,
    EventRow,
    FaultRow,
    Frame,
    Hello,
    MissingRow,
    ObjectiveRow,
    ResidentRow,
    RunningRow,
    Shard,
    TenantRow,
    Totals,
    Worker,
    event_kind,
    kind_of,
)
from lorrery.vocabulary import u32
from lorrery.vocabulary.units import PS_PER_SECOND

ANSWER_SECONDS = 5.0
"""Timeout of the router's answer, in wall seconds."""
PLAIN = TlsSettings()
_POLL_SECONDS = 0.2


class LiveFeed:
    """See `Feed`; open it with `async with` in the loop that uses it.

    Args:
        target: HOST:PORT of the router, or any gRPC target.
        tls: the client's side of TLS; empty means plain text.
        api_key: an operator's, sent with every call; empty: none.
    """

    def __init__(self, target: str, tls: TlsSettings = PLAIN, api_key: str = "") -> None:
        self._target = target
        self._tls = tls
        self._metadata = bearer(api_key) if api_key else ()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._target, self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def hello(self) -> Hello:
        """Return the hello of the cluster as soon as one of its schedulers is connected.

        Raises:
            LorreryError: the router does not answer, refuses this key, or has no scheduler.
        """
        answered = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    shard = _first_connected(await self._status())
                    answered = True
                    if shard is not None:
                        break
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            why = "no scheduler is connected to it" if answered else await why_silent(self._target, self._opened())
            raise LorreryError(f"no cluster at {self._target} within {ANSWER_SECONDS:g} s: {why}") from None
        return Hello("live", shard.model, f"{shard.model} at {self._target}", VERSION, time_scale=shard.time_scale)

    async def frames(self, hz: float = USUAL_HZ) -> AsyncGenerator[Frame]:
        """See `Feed.frames`."""
        call = self._stub().WatchCluster(
            router_pb2.WatchClusterRequest(hz=hz), metadata=self._metadata, wait_for_ready=True
        )
        joiner = Joiner()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                message = await call.read()
            while isinstance(message, router_pb2.WatchClusterResponse):
                frame = joiner.frame(message)
                if frame is not None:
                    yield frame
                message = await call.read()
        except TimeoutError:
            raise LorreryError(f"no cluster at {self._target} within {ANSWER_SECONDS:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def _status(self) -> router_pb2.GetClusterStatusResponse:
        call = self._stub().GetClusterStatus(
            router_pb2.GetClusterStatusRequest(), wait_for_ready=True, metadata=self._metadata
        )
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":  # known to type checkers only
        return router_pb2_grpc.RouterServiceStub(self._opened())

    def _opened(self) -> grpc.aio.Channel:
        assert self._channel is not None, "open it with async with"
        return self._channel

    def _error(self, error: grpc.aio.AioRpcError) -> LorreryError:
        return LorreryError(f"{self._target}: {error.code().name}: {error.details()}")


def _first_connected(status: router_pb2.GetClusterStatusResponse) -> router_pb2.Shard | None:
    return next((shard for shard in status.shards if shard.connected and shard.time_scale > 0), None)


_TOTALS = Totals.__struct_fields__
_US = 1e-6
_HANDLES = 2**32


def seconds(ps: int) -> float:
    """Convert picoseconds to seconds, rounded to microseconds."""
    return round(ps / PS_PER_SECOND, 6)


class _Names:
    """A cluster-wide table of names; names not yet in a frame are collected in `new`."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self.new: list[str] = []

    def index(self, name: str) -> int:
        """Return the index of a name; a new name gets the next one."""
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self._index)
            self.new.append(name)
        return index

    def take_new(self) -> list[str]:
        """Return the new names, and clear the list."""
        new, self.new = self.new, []
        return new


class _ShardState:
    """State of one scheduler.

    Attributes:
        adapters: the scheduler's index -> the cluster's index; 0 is the base model.
        tenants: the same, from 1.
        frame: the newest one; None: the watch has ended.
        last: the newest one of all watches.
        had: counts of the scheduler's earlier lives.
    """

    def __init__(self) -> None:
        self.watch = 0
        self.begin(0)
        self.frame: frame_pb2.Frame | None = None
        self.last: frame_pb2.Frame | None = None
        self.had: dict[str, int] = dict.fromkeys(_TOTALS, 0)

    def begin(self, watch: int) -> None:
        """Start a new watch of the scheduler."""
        self.watch = watch
        self.adapters = [BASE_MODEL]
        self.tenants = [0]
        self.offset_ps: int | None = None


class Joiner:
    """Builds frames from a watch.

    Args:
        now: wall seconds on a monotonic clock.
    """

    def __init__(self, now: float | None = None) -> None:
        self._adapters, self._tenants = _Names(), _Names()
        self._shards: list[_ShardState] = []
        self._began = time.monotonic() if now is None else now
        self._connected: list[bool] = []
        self._at = 0.0  # of the previous frame
        self._first_ps: int | None = None  # the first scheduler's clock when the watch began

    def frame(self, message: router_pb2.WatchClusterResponse, now: float | None = None) -> Frame | None:
        """Return the next frame; None: the message has nothing new.

        Args:
            message: the next message of the watch.
            now: wall seconds.
        """
        wall = (time.monotonic() if now is None else now) - self._began
        while len(self._shards) < len(message.shards):
            self._shards.append(_ShardState())
        fresh: list[bool] = []
        for state, shard in zip(self._shards, message.shards, strict=True):
            fresh.append(shard.HasField("frame"))
            if shard.HasField("frame"):
                self._take(state, shard, wall)
            elif not shard.connected:
                state.frame = None
        connected = [shard.connected for shard in message.shards]
        if not any(fresh) and connected == self._connected:
            return None
        self._connected = connected
        return self._joined(message, fresh)

    def _take(self, state: _ShardState, shard: router_pb2.ShardFrame, wall: float) -> None:
        frame = shard.frame
        if state.watch != shard.watch:
            state.begin(shard.watch)
            if state.last is not None and _has_restarted(state.last, frame):
                for name in _TOTALS:
                    state.had[name] += getattr(state.last.totals, name)
        state.adapters += [self._adapters.index(name) for name in frame.adapters_new]
        state.tenants += [self._tenants.index(name) for name in frame.tenants_new]
        state.frame = state.last = frame
        if self._first_ps is None:
            self._first_ps = frame.at_ps - round(wall / shard.time_scale * PS_PER_SECOND)
        if state.offset_ps is None:
            state.offset_ps = self._first_ps + round(wall / shard.time_scale * PS_PER_SECOND) - frame.at_ps

    def _joined(self, message: router_pb2.WatchClusterResponse, fresh: list[bool]) -> Frame:
        at = 0.0
        missing: list[MissingRow] = []
        faults = {one.rule: one.num_met for one in message.faults}
        workers: list[Worker] = []
        tenants: dict[int, list[float]] = {}
        adapters: dict[int, list[int]] = {}
        totals = dict.fromkeys(_TOTALS, 0)
        ended: list[EndedRow] = []
        events: list[EventRow] = []
        more_ended = more_events = unplaced = held = 0
        for number, state in enumerate(self._shards):
            for name in _TOTALS:
                totals[name] += state.had[name] + (0 if state.last is None else getattr(state.last.totals, name))
            frame = state.frame
            if frame is None:
                continue
            offset_ps = state.offset_ps or 0
            at = max(at, seconds(frame.at_ps + offset_ps))
            num_before = len(workers)
            workers += [self._worker(number, state, worker) for worker in frame.workers]
            unplaced += frame.num_unplaced
            held += frame.num_held
            missing += [
                MissingRow(
                    number,
                    one.worker_id,
                    one.gpu,
                    one.tensor_parallel,
                    one.pool_tokens,
                    seconds(one.lost_ps + offset_ps),
                )
                for one in frame.missing
            ]
            for fault in frame.faults:
                faults[fault.rule] = faults.get(fault.rule, 0) + fault.num_met
            for tenant in frame.tenants:
                _add_tenant(tenants.setdefault(state.tenants[tenant.tenant], [0, 0, 0.0, 0, 0]), tenant)
            for adapter in frame.adapters:
                _add_adapter(adapters.setdefault(state.adapters[adapter.adapter], [0, 0, 0, 0, 0, 1]), adapter)
            if fresh[number]:
                ended += [self._ended(number, state, one, num_before, offset_ps) for one in frame.ended]
                events += [
                    EventRow(seconds(event.at_ps + offset_ps), kind, event.text)
                    for event in frame.events
                    if (kind := event_kind(event.kind)) is not None
                ]
                more_ended += frame.num_more_ended
                more_events += frame.num_more_events
        if at <= self._at:  # a scheduler that was slightly ahead is gone
            at = self._at + 1e-6
        self._at = at
        return Frame(
            at=at,
            adapters_new=self._adapters.take_new(),
            tenants_new=self._tenants.take_new(),
            shards=[Shard(shard.address, shard.connected) for shard in message.shards],
            workers=workers,
            unplaced=unplaced,
            held=held,
            tenants=[
                TenantRow(tenant, int(row[0]), int(row[1]), row[2], int(row[3]), int(row[4]))
                for tenant, row in sorted(tenants.items())
            ],
            adapters=[
                AdapterRow(adapter, running, waiting, loads, evictions, thrash, unloaded=bool(unloaded))
                for adapter, (running, waiting, loads, evictions, thrash, unloaded) in sorted(adapters.items())
            ],
            totals=msgspec.convert(totals, Totals),
            ended=ended,
            ended_more=more_ended,
            events=sorted(events, key=lambda event: event.at),
            events_more=more_events,
            missing=missing,
            faults=[FaultRow(rule, num_met) for rule, num_met in faults.items()],
            objectives=[ObjectiveRow(one.name, one.num_counted, one.num_missed) for one in message.objectives],
        )

    def _request(self, number: int, state: _ShardState, handle: int) -> int:
        """Return a request number that is unique in the watch."""
        return ((state.watch - 1) * _HANDLES + handle) * len(self._shards) + number

    def _worker(self, number: int, state: _ShardState, worker: frame_pb2.WorkerFrame) -> Worker:
        adapters, tenants, count = state.adapters, state.tenants, len(self._shards)
        base = (state.watch - 1) * _HANDLES
        step = seconds(worker.step_ps)
        return Worker(
            id=worker.worker_id,
            shard=number,
            gpu=worker.gpu,
            tp=worker.tensor_parallel,
            state="draining" if worker.draining else "ready",
            running=[
                RunningRow((base + handle) * count + number, adapters[adapter], tenants[tenant], prompt, output)
                for handle, adapter, tenant, prompt, output in zip(
                    u32.unpack(worker.requests_u32),
                    u32.unpack(worker.request_adapters_u32),
                    u32.unpack(worker.request_tenants_u32),
                    u32.unpack(worker.prompt_tokens_u32),
                    u32.unpack(worker.output_tokens_u32),
                    strict=True,
                )
            ],
            waiting=worker.num_waiting,
            oldest=seconds(worker.oldest_ps),
            kv=worker.kv_tokens,
            pool=worker.pool_tokens,
            adapters=[
                ResidentRow(adapters[adapter], resident, rank, round(left * _US, 6))
                for adapter, resident, rank, left in zip(
                    u32.unpack(worker.adapters_u32),
                    u32.unpack(worker.adapter_states_u32),
                    u32.unpack(worker.adapter_ranks_u32),
                    u32.unpack(worker.adapter_left_us_u32),
                    strict=True,
                )
            ],
            host=worker.num_host_adapters,
            step=step,
            kind=kind_of(prefills=worker.prefills, decodes=worker.decodes),
            tokens=worker.num_tokens,
            busy=seconds(worker.busy_ps),
            preempted=worker.num_preempted,
            late=seconds(worker.late_ps),
        )

    def _ended(
        self, number: int, state: _ShardState, one: frame_pb2.EndedRequest, num_before: int, offset_ps: int
    ) -> EndedRow:
        return EndedRow(
            self._request(number, state, one.request),
            num_before + one.worker - 1 if one.worker else NO_WORKER,
            state.adapters[one.adapter],
            state.tenants[one.tenant],
            one.prompt_tokens,
            one.output_tokens,
            seconds(one.arrived_ps + offset_ps),
            seconds(one.queue_ps),
            seconds(one.adapter_load_ps),
            seconds(one.prefill_ps),
            seconds(one.decode_ps),
            one.outcome,
        )


def _has_restarted(last: frame_pb2.Frame, frame: frame_pb2.Frame) -> bool:
    """Return whether the first frame of a watch is of a scheduler that was started after `last`."""
    return frame.at_ps < last.at_ps or any(getattr(frame.totals, name) < getattr(last.totals, name) for name in _TOTALS)


def _add_tenant(row: list[float], tenant: frame_pb2.TenantFrame) -> None:
    row[0] += tenant.num_running
    row[1] += tenant.num_waiting
    row[2] = max(row[2], seconds(tenant.oldest_ps))
    row[3] += tenant.output_tokens
    row[4] += tenant.num_refused


def _add_adapter(row: list[int], adapter: frame_pb2.AdapterFrame) -> None:
    row[0] += adapter.num_running
    row[1] += adapter.num_waiting
    row[2] += adapter.num_loads
    row[3] += adapter.num_evictions
    row[4] += adapter.num_thrash
    row[5] &= adapter.unloaded  # schedulers may not learn of it at the same time
