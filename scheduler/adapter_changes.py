"""Applies run-time changes of adapters: in the core, at the routers, in the journal and the log.

A load on request comes first to the workers, which read the weights, and then to everybody else; so an adapter that
cannot be loaded is not known. Loads of one name go one after another. Without workers there is nothing to load into;
a worker that attaches later loads an adapter with the first request.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from lorrery.scheduler import wire_routers
from lorrery.scheduler.adapters import LoadedAdapters
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import AdapterLoaded, AdapterUnloaded, Facts
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.workers import Dispatcher
from lorrery.service.clocks import DeviceClock
from lorrery.service.errors import Reason, Unavailable
from lorrery.service.names import quoted
from lorrery.service.telemetry.log import get_logger
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog, WhenKnown

MAX_LOGGED_CHANGES = 16
"""Changes to adapters in one call that are logged at INFO, a line each; the rest is logged at DEBUG."""

log = get_logger("scheduler.adapters")


class AdapterChanges:
    """Applies the changes that `LoadedAdapters` decides or merges, and at the start those that it has from its file.

    Args:
        loaded: decides changes, and merges those that others decide.
        core: resolves the adapters that requests name.
        facts: of the scheduler.
        factory: builds adapters.
        routers: connected; they are sent changes.
        workers: attached; they retire adapters that are out of use.
        clock: device clock.
    """

    def __init__(
        self,
        loaded: LoadedAdapters,
        core: ClusterCore,
        facts: Facts,
        factory: ReplicaFactory,
        routers: Collection[RouterLink],
        workers: Mapping[str, Dispatcher],
        clock: DeviceClock,
    ) -> None:
        self._loaded = loaded
        self._core = core
        self._facts = facts
        self._factory = factory
        self._routers = routers
        self._workers = workers
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by adapter id, of running loads
        self._num_numbered = len(core.adapters)
        self._carry_out(self.log.changes)

    @property
    def log(self) -> AdapterLog:
        """The log of all known loads and unloads."""
        return self._loaded.log

    async def load(self, adapter_id: str, rank: int, when_known: WhenKnown = WhenKnown.KEEP) -> None:
        """Load an adapter on all workers, make it known, and send the change to all routers.

        Raises:
            Conflict, Overloaded: see `LoadedAdapters.check`.
            Unavailable: a worker has given the load up; the adapter is as known as before.
        """
        async with self._locks.setdefault(adapter_id, asyncio.Lock()):
            change = self._loaded.check(adapter_id, rank, when_known)
            if change is None:
                await self.load_weights(adapter_id)
                return
            await self._load_weights(self._factory.adapter(adapter_id, rank, change.version))
            self._loaded.check(adapter_id, rank, when_known)  # others may have changed it meanwhile
            await self._changed(self._loaded.merge([change]))

    async def load_weights(self, adapter_id: str) -> None:
        """Load a known adapter on the workers that do not have it; an unknown one is ignored.

        Raises:
            Unavailable: a worker has given the load up.
        """
        adapter = self._core.adapters.get(adapter_id)
        if adapter is not None:
            await self._load_weights(adapter)

    async def _load_weights(self, adapter: Adapter) -> None:
        at_ps = self._clock.now_ps()
        begun = [(name, worker.load(adapter, at_ps)) for name, worker in list(self._workers.items())]
        loads = {name: over for name, over in begun if over is not None}
        if not loads:
            return
        await asyncio.wait(loads.values())
        failed = [name for name, over in loads.items() if not over.result()]
        if failed:
            message = f"adapter {quoted(adapter.adapter_id)} could not be loaded on worker {failed[0]}"
            raise Unavailable(message, Reason.ADAPTER_LOAD, adapter_id=adapter.adapter_id, worker_id=failed[0])

    async def unload(self, adapter_id: str) -> bool:
        """Decide to unload an adapter; return whether it was known."""
        news = self._loaded.unload(adapter_id)
        await self._changed(news)
        return bool(news)

    async def learn(
        self, changes: Iterable[AdapterChange], forgotten: int | None = None, told_by: RouterLink | None = None
    ) -> None:
        """Merge changes that were decided elsewhere; see `LoadedAdapters.merge`."""
        news = self._loaded.merge(changes, forgotten)
        if forgotten is None:
            await self._changed(news, told_by)
        elif news:
            adapters = self.log
            await self._changed(news, told_by, wire_routers.write_changes(adapters.changes, adapters.forgotten))

    async def _changed(
        self,
        news: list[AdapterChange],
        told_by: RouterLink | None = None,
        message: wire_routers.AdapterChanges | None = None,
    ) -> None:
        self._carry_out(news)
        if news:
            tell = wire_routers.adapter_changes(wire_routers.write_changes(news) if message is None else message)
            for router in self._routers:
                if router is not told_by:
                    router.send(tell)
        await self._loaded.save()

    def _carry_out(self, changes: Sequence[AdapterChange]) -> None:
        at_ps = self._clock.now_ps()
        log_change = log.info
        for number, (version, adapter_id, rank) in enumerate(changes):
            if number == MAX_LOGGED_CHANGES:
                log.info("adapters_changed", and_more="at the level debug")
                log_change = log.debug
            if rank:
                adapter = self._factory.adapter(adapter_id, rank, version, self._number(adapter_id))
                before = self._core.load_adapter(adapter)
            else:
                before = self._core.unload_adapter(adapter_id)
            known = AdapterLoaded(adapter_id, rank, version) if rank else AdapterUnloaded(adapter_id)
            self._facts.publish((known,), at_ps)
            if before is not None:
                for worker in self._workers.values():
                    worker.retired(before.key, at_ps)
            if rank:
                log_change("adapter_loaded", adapter_id=adapter_id, rank=rank, version=version)
            else:
                was = {} if before is None else {"rank": before.rank}  # None: it was not known here
                log_change("adapter_unloaded", adapter_id=adapter_id, **was, version=version)

    def _number(self, adapter_id: str) -> int:
        """Return the number of an adapter that is loaded: as in vLLM the next one, or that of the one it replaces."""
        known = self._core.adapters.get(adapter_id)
        if known is not None:
            return known.number
        self._num_numbered += 1
        return self._num_numbered
