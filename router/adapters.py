"""Calls that concern the whole cluster: adapters and status, gathered from every connected shard.

A load or unload is decided by one shard, the first by address of those connected, so that changes have one order. It
gives the change a version, with which the other shards adopt it. Routers and shards that miss a change get it on their
streams (`vocabulary.adapters`).
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Collection, Iterable
from typing import TypeVar

import grpc
import grpc.aio

from lorrery.router import wire
from lorrery.router.checks import check_adapter_id
from lorrery.router.placement import Placement
from lorrery.router.shard import Shard
from lorrery.service.errors import InvalidRequest, RankOverLimit, Reason, Unavailable, UnknownName
from lorrery.service.names import quoted, why_no_name
from lorrery.service.network.channel import failing_when_closed
from lorrery.service.network.status import reason_of
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog

CALL_SECONDS = 5.0
"""Timeout of a call to a scheduler."""
LOAD_SECONDS = 3600.0
"""Timeout of a load, which takes as long as the slowest worker does; the client may have a shorter one."""
STATUS_SECONDS = 1.0
"""Age up to which a cluster status is reused."""

_T = TypeVar("_T")
_log = get_logger("router.adapters")


async def list_adapters(placement: Placement, model: str) -> router_pb2.ListAdaptersResponse:
    """Return every adapter that a connected shard has: first those of the settings, then in the order of loading.

    `lorrery load` picks adapters by their index in this list, `lorrery simulate` by their index in the settings.

    Raises:
        Unavailable: no shard is connected.
        grpc.aio.AioRpcError: a shard did not answer.
    """
    statuses = await _all(_status(shard, scheduler_pb2.GetStatusRequest()) for shard in connected(placement))
    known: dict[str, types_pb2.Adapter] = {}
    for status in statuses:
        for adapter in status.adapters:
            known.setdefault(adapter.adapter_id, adapter)
    return router_pb2.ListAdaptersResponse(adapters=wire.adapter_messages(known.values()), model=model)


async def find_adapter(placement: Placement, adapter_id: str) -> types_pb2.Adapter | None:
    """Return an adapter as a connected shard has it; None: no shard does. Independent of the number of adapters.

    Raises:
        Unavailable: no shard is connected.
        grpc.aio.AioRpcError: a shard did not answer.
    """
    shards = connected(placement)
    if why_no_name(adapter_id) is not None:
        return None
    request = scheduler_pb2.GetStatusRequest(adapter_id=adapter_id)
    statuses = await _all(_status(shard, request) for shard in shards)
    # A scheduler of an earlier version may return all adapters.
    adapters = (adapter for status in statuses for adapter in status.adapters)
    return next((adapter for adapter in adapters if adapter.adapter_id == adapter_id), None)


async def load(
    placement: Placement,
    adapter: types_pb2.Adapter,
    max_lora_rank: int,
    models: Collection[str],
    when_known: scheduler_pb2.WhenKnown.ValueType = scheduler_pb2.WHEN_KNOWN_UNSPECIFIED,
) -> int:
    """Load an adapter at every shard, and register it there; return its version.

    A shard that cannot load it undoes the change at all of them.

    Args:
        placement: has the shards.
        adapter: to load.
        max_lora_rank: of the deployment.
        models: names of the base model.
        when_known: what happens if it is known.

    Raises:
        InvalidRequest: the id is invalid, or the rank is 0.
        RankOverLimit: the rank exceeds `max_lora_rank`.
        Unavailable: no shard is connected.
        grpc.aio.AioRpcError: the deciding shard's error.
    """
    check_adapter_id(adapter.adapter_id, models)
    name = quoted(adapter.adapter_id)
    if adapter.rank < 1:
        raise InvalidRequest(f"adapter {name} has rank 0; it must be at least 1", field="rank", value=0, limit=1)
    if adapter.rank > max_lora_rank:
        raise RankOverLimit(
            f"adapter {name} has rank {adapter.rank}; max_lora_rank is {max_lora_rank}",
            field="rank",
            value=adapter.rank,
            limit=max_lora_rank,
        )
    decides, *others = connected(placement)
    request = scheduler_pb2.RegisterAdapterRequest(
        adapter=types_pb2.Adapter(adapter_id=adapter.adapter_id, rank=adapter.rank), when_known=when_known
    )
    answer = await _register(decides, request)
    change = wire.adapter_change(answer.adapter)
    if change is not None:
        taken_over = scheduler_pb2.RegisterAdapterRequest(adapter=answer.adapter)
        try:
            await _all(_tell(_register(shard, taken_over), passes=Reason.ADAPTER_LOAD) for shard in others)
        except BaseException:
            with contextlib.suppress(UnknownName):
                await unload(placement, adapter.adapter_id, models)
            raise
        placement.learn([change], told_by=decides)
    return answer.adapter.version


async def unload(placement: Placement, adapter_id: str, models: Collection[str]) -> None:
    """Unregister an adapter at every shard, for new requests.

    Raises:
        InvalidRequest: the id is invalid.
        UnknownName: the adapter is not loaded.
        Unavailable: no shard is connected.
        grpc.aio.AioRpcError: the deciding shard's error.
    """
    check_adapter_id(adapter_id, models)
    decides, *others = connected(placement)
    request = scheduler_pb2.UnregisterAdapterRequest(adapter_id=adapter_id)
    try:
        answer = await _unregister(decides, request)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.NOT_FOUND:
            raise
        name = quoted(adapter_id)
        raise UnknownName(f"adapter {name} is not loaded", field="adapter_id", value=name) from None
    placement.learn([AdapterChange(answer.version, adapter_id, 0)], told_by=decides)
    taken_over = scheduler_pb2.UnregisterAdapterRequest(adapter_id=adapter_id, version=answer.version)
    await _all(_tell(_unregister(shard, taken_over)) for shard in others)


class AdapterPaths:
    """The folders that adapters come from: those of the settings, and those of loads through this router.

    Args:
        settings: of the cluster.
        log: which version of each is the latest, whoever loaded it.
    """

    def __init__(self, settings: Settings, log: AdapterLog) -> None:
        self._listed = {spec.id: spec.path for spec in settings.adapters.registry if spec.path is not None}
        self._loaded: dict[str, tuple[int, str]] = {}  # version and path
        self._log = log
        self._max_loaded = settings.adapters.max_loaded_adapters

    def get(self, adapter_id: str) -> str:
        """Return the folder of the latest version of an adapter; empty: it is not known here."""
        latest = self._log.latest(adapter_id)
        if latest is None:
            return self._listed.get(adapter_id, "")
        version, path = self._loaded.get(adapter_id, (0, ""))
        return path if version == latest.version else ""

    def add(self, adapter_id: str, version: int, path: str) -> None:
        """Add a folder; answers to two loads of one adapter may come in any order."""
        self._loaded[adapter_id] = max((version, path), self._loaded.get(adapter_id, (0, "")))
        if len(self._loaded) > self._max_loaded:
            self._loaded = {name: loaded for name, loaded in self._loaded.items() if self.get(name)}


class ClusterStatus:
    """The state of the cluster, requested from the shards at most once a second, however many callers there are.

    Args:
        placement: has the shards.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._asked_at = -math.inf
        self._answer: asyncio.Future[router_pb2.GetClusterStatusResponse] | None = None

    async def has_workers(self) -> bool:
        """Return whether any shard has a worker; a negative answer is never reused."""
        if not _any_worker(await self._at_most_old()):
            self._asked_at = -math.inf
            return _any_worker(await self._at_most_old())
        return True

    async def get(self, *, adapter_figures: bool = False) -> router_pb2.GetClusterStatusResponse:
        """Return the status of every shard; for a shard that is not connected or does not answer, only its address.

        The result is a copy that the caller may change. With the figures of adapters it is requested anew.
        """
        if adapter_figures:
            return await _cluster_status(self._placement, adapter_figures=True)
        answer = await self._at_most_old()
        copy = router_pb2.GetClusterStatusResponse()
        copy.CopyFrom(answer)
        return copy

    async def _at_most_old(self) -> router_pb2.GetClusterStatusResponse:
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now >= self._asked_at + STATUS_SECONDS):
            self._asked_at = now
            self._answer = asyncio.ensure_future(_cluster_status(self._placement))
        # A caller that is cancelled must not cancel the query for the others.
        return await asyncio.shield(self._answer)


def _any_worker(status: router_pb2.GetClusterStatusResponse) -> bool:
    return any(shard.workers for shard in status.shards)


async def _cluster_status(
    placement: Placement, *, adapter_figures: bool = False
) -> router_pb2.GetClusterStatusResponse:
    shards = placement.shards
    request = scheduler_pb2.GetStatusRequest(no_adapters=True, adapter_figures=adapter_figures)
    statuses = await _all(_status_or_none(shard, request) for shard in shards)
    return router_pb2.GetClusterStatusResponse(
        shards=[
            wire.shard_status(shard.address, shard.connected, status)
            for shard, status in zip(shards, statuses, strict=True)
        ]
    )


def connected(placement: Placement) -> list[Shard]:
    """Return the connected shards sorted by address, an order that all routers share."""
    shards = [shard for shard in placement.shards if shard.connected]
    if not shards:
        raise Unavailable("no scheduler is connected", Reason.NO_SCHEDULER)
    return sorted(shards, key=lambda shard: shard.address)


async def _all(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Await all calls, then raise the first error, so that no call is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _status(shard: Shard, request: scheduler_pb2.GetStatusRequest) -> scheduler_pb2.GetStatusResponse:
    with failing_when_closed():
        return await shard.stub.GetStatus(request, timeout=CALL_SECONDS, metadata=shard.credentials)


async def _status_or_none(
    shard: Shard, request: scheduler_pb2.GetStatusRequest
) -> scheduler_pb2.GetStatusResponse | None:
    if not shard.connected:
        return None
    try:
        return await _status(shard, request)
    except grpc.aio.AioRpcError:
        return None


async def _register(
    shard: Shard, request: scheduler_pb2.RegisterAdapterRequest
) -> scheduler_pb2.RegisterAdapterResponse:
    with failing_when_closed():
        return await shard.stub.RegisterAdapter(request, timeout=LOAD_SECONDS, metadata=shard.credentials)


async def _unregister(
    shard: Shard, request: scheduler_pb2.UnregisterAdapterRequest
) -> scheduler_pb2.UnregisterAdapterResponse:
    with failing_when_closed():
        return await shard.stub.UnregisterAdapter(request, timeout=CALL_SECONDS, metadata=shard.credentials)


async def _tell(call: Awaitable[object], passes: Reason | None = None) -> None:
    """Send a change to a shard; one that does not answer gets the change when it reconnects.

    Raises:
        grpc.aio.AioRpcError: the shard's error, if its reason is `passes`.
    """
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if passes is not None and reason_of(error) == passes:
            raise
        _log.warning("shard_not_told", reason=f"{error.code().name}: {error.details()}")
