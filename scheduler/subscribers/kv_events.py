"""Changes of workers' prefix caches, for readers that keep copies.

Readers are a worker itself, which publishes them as an engine would, and callers of WatchKvEvents.

The core notes changes only while there is a reader. They are taken when a step ends, in one batch, so they reach a
worker in order with its plans, and a watcher that begins in between misses none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from lorrery.scheduler import wire_workers
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.changes import BlockChange
from lorrery.service.errors import NoKvEvents

CURE = "set scheduler.prefix_cache.kind = 'blocks'"


class Watcher:
    """One caller of WatchKvEvents.

    Args:
        worker_id: the worker whose events it wants; empty: of all workers.
        max_pending_bytes: bound on bytes that wait, the first message excluded.
    """

    def __init__(self, worker_id: str, max_pending_bytes: int) -> None:
        self._worker_id = worker_id
        self._max_pending_bytes = max_pending_bytes
        self._pending: list[wire_workers.WatchedKvEvents] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._overrun = asyncio.Event()

    def wants(self, worker_id: str) -> bool:
        """Return whether it follows this worker."""
        return self._worker_id in ("", worker_id)

    def send(self, worker_id: str, events: wire_workers.KvEvents) -> None:
        """Send events; a caller that reads too slowly is marked for cut-off."""
        message = wire_workers.watched_kv_events(worker_id, events)
        if self._pending:  # the first may be large, since it may have a whole cache
            self._pending_bytes += message.ByteSize()
        if self._pending_bytes > self._max_pending_bytes:
            self._overrun.set()
        else:
            self._pending.append(message)
            self._wake.set()

    async def write_all(self, write: Callable[[wire_workers.WatchedKvEvents], Awaitable[None]]) -> None:
        """Write pending messages, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._pending, self._pending_bytes = self._pending, [], 0
            for message in messages:
                await write(message)

    async def until_overrun(self) -> None:
        """Return once too much is pending."""
        await self._overrun.wait()


class WorkerKvEvents:
    """The events of one worker.

    Args:
        worker_id: its name.
        cache: its prefix cache; without blocks there are no events.
        source: where the worker publishes them; None: nowhere, and none are sent to it.
        watchers: of all workers.
    """

    def __init__(
        self,
        worker_id: str,
        cache: PrefixCache | None,
        source: wire_workers.KvEventSource | None,
        watchers: Collection[Watcher],
    ) -> None:
        self._worker_id = worker_id
        self._cache = cache if isinstance(cache, BlockCache) else None
        self.source = source
        self._watchers = watchers
        self._on = False
        self._begun: list[BlockChange] = []  # of a batch that a new watcher has cut in two; the worker gets it whole
        for watcher in self._own_watchers():
            self.begin(watcher)
        self.switch()

    def _own_watchers(self) -> list[Watcher]:
        return [watcher for watcher in self._watchers if watcher.wants(self._worker_id)]

    def switch(self) -> None:
        """Begin to note changes if there is a reader, or stop if there is none."""
        if self._cache is not None:
            self._on = self.source is not None or bool(self._own_watchers())
            self._cache.note_changes(self._on)

    def begin(self, watcher: Watcher) -> None:
        """Send a new watcher the contents of the cache, and the others what they lack of these."""
        if self._cache is not None:
            changes = self._cache.take_changes()
            self._begun += changes
            self._tell_watchers(changes, [other for other in self._own_watchers() if other is not watcher])
            self._cache.note_changes()
            contents = wire_workers.kv_events(self._cache.contents(), self._cache.block_size, cleared=True)
            watcher.send(self._worker_id, contents)

    def take(self) -> wire_workers.ToWorker | None:
        """Send watchers the changes since the last call; return the worker's own message, if it gets one."""
        if not self._on:
            return None
        assert self._cache is not None
        changes = self._cache.take_changes()
        self._tell_watchers(changes, self._own_watchers())
        changes, self._begun = [*self._begun, *changes], []
        if not changes or self.source is None:
            return None
        return wire_workers.worker_kv_events(wire_workers.kv_events(changes, self._cache.block_size))

    def _tell_watchers(self, changes: list[BlockChange], watchers: Iterable[Watcher]) -> None:
        if changes:
            assert self._cache is not None
            events = wire_workers.kv_events(changes, self._cache.block_size)
            for watcher in watchers:
                watcher.send(self._worker_id, events)

    def lost(self) -> None:
        """Send watchers that the worker is gone, and its cache with it."""
        if self._cache is not None:
            for watcher in self._own_watchers():
                watcher.send(self._worker_id, wire_workers.kv_events([], cleared=True))


class KvEvents:
    """The events of all workers of a scheduler.

    Args:
        kind: of the workers' prefix caches.
        max_pending_bytes: bound on bytes that wait for one watcher.
    """

    def __init__(self, kind: str, max_pending_bytes: int) -> None:
        self._kind = kind
        self._max_pending_bytes = max_pending_bytes
        self._workers: dict[str, WorkerKvEvents] = {}
        self._watchers: set[Watcher] = set()

    def attach(
        self, worker_id: str, cache: PrefixCache | None, source: wire_workers.KvEventSource | None = None
    ) -> WorkerKvEvents:
        """Add a worker; `source`: see `WorkerKvEvents`."""
        events = self._workers[worker_id] = WorkerKvEvents(worker_id, cache, source, self._watchers)
        return events

    def detach(self, worker_id: str) -> None:
        """Remove a worker that is gone."""
        self._workers.pop(worker_id).lost()

    @contextmanager
    def watched(self, worker_id: str) -> Iterator[Watcher]:
        """Register a watcher of one worker, or of all, for the duration of the context.

        Raises:
            NoKvEvents: there will be none.
        """
        self.check("KV events are asked for")
        watcher = Watcher(worker_id, self._max_pending_bytes)
        self._watchers.add(watcher)
        try:
            if worker_id and worker_id not in self._workers:
                watcher.send(worker_id, wire_workers.kv_events([], cleared=True))
            for name, worker in self._workers.items():
                if watcher.wants(name):
                    worker.begin(watcher)
                    worker.switch()
            yield watcher
        finally:
            self._watchers.discard(watcher)
            for worker in self._workers.values():
                worker.switch()

    def check(self, what: str) -> None:
        """Check that there are events.

        Raises:
            NoKvEvents: there are none; `what` names the reader.
        """
        if self._kind not in ("blocks", "radix"):
            raise NoKvEvents(
                f"{what}; a prefix cache of kind {self._kind!r} has no blocks to tell of: {CURE}",
                field="scheduler.prefix_cache.kind",
                value=self._kind,
            )
