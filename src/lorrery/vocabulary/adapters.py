"""Changes of adapters at run time, which routers and schedulers exchange, and figures of their loads. Pure."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple

from lorrery.vocabulary.units import PS_PER_SECOND

MAX_UNLOADS = 1024
"""Number of unloads that a log keeps, not counting adapters that the settings list."""
MAX_VERSION = 2**63 - 1


class WhenKnown(Enum):
    """What a load of a known adapter does."""

    KEEP = "keep"
    """With the same rank nothing; with another it is refused."""
    REFUSE = "refuse"
    """It is refused."""
    REPLACE = "replace"
    """It takes the known one's place, in one change."""


class AdapterChange(NamedTuple):
    """The latest change of an adapter.

    Attributes:
        version: orders all changes.
        adapter_id: of the adapter.
        rank: its rank from now on; 0: it is unloaded.
    """

    version: int
    adapter_id: str
    rank: int


def adapter_key(adapter_id: str, version: int) -> str:
    """Return an adapter's name and version in one; version 0, as listed in the settings, gives the name alone."""
    return f"{adapter_id}@{version}" if version else adapter_id


class AdapterLog:
    """The latest change of each adapter, by version.

    Every scheduler and every router keeps such a log, and they exchange changes. A change's version is above all
    versions that its author knows and not below the time (microseconds since 1970), so versions also grow across
    restarts, even of a scheduler that returns with an empty log. Of two changes of one adapter the one with the higher
    version wins. So two logs that received the same changes, in any order and any number of times, are equal.

    Unloads must be kept too, or a log that missed one would bring the adapter back. Only the latest `MAX_UNLOADS` are
    kept: `forgotten` is the highest version of a dropped unload. Changes up to it that are missing here have been
    undone.

    Args:
        listed: adapters that the settings list; their unloads are never dropped.
        max_unloads: number of other unloads kept.

    Attributes:
        forgotten: the highest version of a dropped unload; 0: none was dropped.
        num_loaded: adapters that were loaded at run time and are still known.
    """

    def __init__(self, listed: Collection[str] = (), max_unloads: int = MAX_UNLOADS) -> None:
        self.forgotten = self.num_loaded = 0
        self._listed = frozenset(listed)
        self._max_unloads = max_unloads
        self._latest: dict[str, AdapterChange] = {}
        self._newest = 0
        self._num_unloads = 0  # those that may be dropped
        self._oldest_unloads: list[AdapterChange] = []  # a heap of these; may hold outdated entries

    @property
    def num_changes(self) -> int:
        """Return the number of adapters with a change in the log."""
        return len(self._latest)

    @property
    def changes(self) -> list[AdapterChange]:
        """The latest change of each adapter, in order of versions."""
        return sorted(self._latest.values())

    def latest(self, adapter_id: str) -> AdapterChange | None:
        """Return the latest change of an adapter; None if there is none, or it was dropped."""
        return self._latest.get(adapter_id)

    def next_version(self, now_us: int) -> int:
        """Return the version for a change made now: above all known ones, and not below the time."""
        return max(self._newest + 1, now_us)

    def merge(self, changes: Iterable[AdapterChange]) -> list[AdapterChange]:
        """Merge changes from anywhere; return the new ones, in order of versions.

        Cost per change: the logarithm of the number of kept unloads.
        """
        news = [change for change in sorted(changes) if self._is_news(change)]
        for change in news:
            self._set(change)
            self._newest = max(self._newest, change.version)
        self._forget()
        return [change for change in news if self._latest.get(change.adapter_id, change) is change]

    def merge_all(self, changes: Iterable[AdapterChange], forgotten: int) -> list[AdapterChange]:
        """Merge the whole of another log; return what is new, with an unload for each change that the other dropped."""
        theirs = list(changes)
        kept = {change.adapter_id for change in theirs} | self._listed
        gone = [change for name, change in self._latest.items() if name not in kept and change.version <= forgotten]
        news = self.merge(theirs)
        for change in gone:
            if change.adapter_id in self._latest:  # its unload may have been dropped already
                self._drop(change.adapter_id)
        self.forgotten = max(self.forgotten, forgotten)
        self._newest = max(self._newest, forgotten)
        return [AdapterChange(change.version, change.adapter_id, 0) for change in gone if change.rank] + news

    def _is_news(self, change: AdapterChange) -> bool:
        if not 0 < change.version <= MAX_VERSION:
            return False
        latest = self._latest.get(change.adapter_id)
        if latest is None:
            return change.version > self.forgotten or change.adapter_id in self._listed
        # Equal versions come from schedulers that could not communicate; the tie-break makes both sides choose alike.
        return (change.version, change.rank) > (latest.version, latest.rank)

    def _set(self, change: AdapterChange) -> None:
        if change.adapter_id in self._latest:
            self._drop(change.adapter_id)
        self._latest[change.adapter_id] = change
        if change.rank:
            self.num_loaded += 1
        elif change.adapter_id not in self._listed:
            self._num_unloads += 1
            heapq.heappush(self._oldest_unloads, change)
            if len(self._oldest_unloads) > 2 * self._max_unloads + self._num_unloads:
                self._oldest_unloads = [one for one in self._oldest_unloads if self._is_latest(one)]
                heapq.heapify(self._oldest_unloads)

    def _drop(self, adapter_id: str) -> None:
        change = self._latest.pop(adapter_id)
        if change.rank:
            self.num_loaded -= 1
        elif adapter_id not in self._listed:
            self._num_unloads -= 1

    def _is_latest(self, change: AdapterChange) -> bool:
        return self._latest.get(change.adapter_id) is change

    def _forget(self) -> None:
        """Drop the oldest unloads beyond the limit."""
        while self._num_unloads > self._max_unloads:
            oldest = heapq.heappop(self._oldest_unloads)
            if self._is_latest(oldest):
                self._drop(oldest.adapter_id)
                self.forgotten = max(self.forgotten, oldest.version)


FIGURES = (
    "num_loads",
    "num_failed_loads",
    "num_thrashes",
    "num_evictions",
    "host_load_seconds",
    "disk_load_seconds",
    "resident_seconds",
)
"""Names of the figures in files; times are device seconds."""


@dataclass(slots=True)
class AdapterFigures:
    """Figures of one adapter on all workers, or of several adapters together.

    Attributes:
        num_loads: loads onto a GPU that have ended, failed ones included.
        num_failed_loads: those that failed.
        num_thrashes: loads that began within a minute after the same GPU had evicted the adapter.
        num_evictions: from a GPU; those of a lost worker's adapters are none.
        host_load_ps: duration of the loads from host memory, without time queued for other loads.
        disk_load_ps: likewise from disk.
        resident_ps: time on a GPU, usable; the times on several GPUs add up.
    """

    num_loads: int = 0
    num_failed_loads: int = 0
    num_thrashes: int = 0
    num_evictions: int = 0
    host_load_ps: int = 0
    disk_load_ps: int = 0
    resident_ps: int = 0

    def add(self, other: "AdapterFigures", factor: int = 1) -> None:
        """Add the figures of another adapter or scheduler, or subtract them with a factor of -1."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + factor * getattr(other, name))

    @classmethod
    def total(cls, parts: Iterable["AdapterFigures"]) -> "AdapterFigures":
        """Add up the figures of several adapters."""
        total = cls()
        for one in parts:
            total.add(one)
        return total

    def __str__(self) -> str:
        failed = f" ({self.num_failed_loads:,} failed)" if self.num_failed_loads else ""
        host, disk, resident = (one / PS_PER_SECOND for one in (self.host_load_ps, self.disk_load_ps, self.resident_ps))
        return (
            f"{self.num_loads:,} loads{failed}, {host:,.2f} s from host and {disk:,.2f} s from disk;"
            f" {self.num_evictions:,} evictions, {self.num_thrashes:,} loads within a minute after one;"
            f" {resident:,.1f} adapter-seconds on GPUs"
        )

    def shown(self) -> dict[str, float]:
        """Return the figures by their names in files."""
        return {
            name: getattr(self, name)
            if name.startswith("num_")
            else getattr(self, name.replace("_seconds", "_ps")) / PS_PER_SECOND
            for name in FIGURES
        }

    @classmethod
    def read(cls, shown: Iterable[float]) -> "AdapterFigures":
        """Return figures given as in files, in order of `FIGURES`."""
        return cls(
            *(
                int(value) if name.startswith("num_") else round(value * PS_PER_SECOND)
                for name, value in zip(FIGURES, shown, strict=True)
            )
        )


_NAMES = tuple(field.name for field in fields(AdapterFigures))

FiguresByAdapter = Mapping[str, AdapterFigures]


def summed(parts: Iterable[FiguresByAdapter], before: Iterable[FiguresByAdapter] = ()) -> dict[str, AdapterFigures]:
    """Add up schedulers' figures by adapter, less those of an earlier time; adapters without any are left out.

    Raises:
        ValueError: there were more before.
    """
    found: dict[str, AdapterFigures] = {}
    for some, factor in ((parts, 1), (before, -1)):
        for part in some:
            for adapter_id, figures in part.items():
                found.setdefault(adapter_id, AdapterFigures()).add(figures, factor)
    if any(figures.num_loads < 0 or figures.resident_ps < 0 for figures in found.values()):
        raise ValueError("figures of adapters have become less")
    nothing = AdapterFigures()
    return {adapter_id: figures for adapter_id, figures in sorted(found.items()) if figures != nothing}
