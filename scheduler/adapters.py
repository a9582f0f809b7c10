"""What a scheduler knows of loads and unloads at run time: the log, the clock that gives it versions, its file.

`vocabulary.adapter_log` says how changes are ordered. A scheduler decides the changes that its operators' calls ask
for, and takes over those that routers bring from other schedulers, or from before its own restart. With a file it
knows them before any router has connected: the file holds the whole log, written anew after each change, by a thread,
whole or not at all. A call is answered once the file has its change. A disk that fails costs the file, not the call.
"""

import asyncio
import json
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from lorrery.chassis.errors import Conflict, FormatError, LorreryError, Overloaded, Reason
from lorrery.chassis.log import get_logger
from lorrery.chassis.names import quoted, why_no_name
from lorrery.chassis.whole_file import whole_file
from lorrery.settings import Settings
from lorrery.vocabulary.adapter_log import AdapterChange, AdapterLog

FORMAT_VERSION = 1
MAX_AHEAD_US = 24 * 3600 * 1_000_000
"""So far ahead of the time may the version of a change be that was decided elsewhere: with the highest that there is,
no change would be news any more."""

log = get_logger("scheduler.adapters")


def adapters_file(settings: Settings) -> Path | None:
    """Return where the log is kept: as set, or beside the journal; None: nowhere."""
    own = settings.scheduler
    if own.adapters_file is not None or own.journal is None:
        return own.adapters_file
    return own.journal.with_name(f"{own.journal.name}.adapters")


class LoadedAdapters:
    """Decides and takes over changes. What it returns as news is for the caller to carry out.

    Args:
        settings: of the cluster.

    Raises:
        LorreryError: the file cannot be read, or holds something else.
    """

    def __init__(self, settings: Settings) -> None:
        listed = dict(settings.adapters.expand())
        self.log = AdapterLog(listed)
        self._listed = listed
        self._model = settings.model
        self._max_lora_rank = settings.adapters.max_lora_rank
        self._max_loaded = settings.adapters.max_loaded_adapters
        self._path = adapters_file(settings)
        self._revision = self._written = 0
        self._writing = asyncio.Lock()
        if self._path is not None:
            self._read(self._path)

    # --- changes ----------------------------------------------------------------------------------------------------

    def rank(self, adapter_id: str) -> int:
        """Return the rank that an adapter has now; 0: it is not known."""
        latest = self.log.latest(adapter_id)
        return self._listed.get(adapter_id, 0) if latest is None else latest.rank

    def load(self, adapter_id: str, rank: int) -> list[AdapterChange]:
        """Decide to load an adapter; nothing changes if it is known with this rank.

        Raises:
            Conflict: it is known with another rank.
            Overloaded: `max_loaded_adapters` are loaded.
        """
        known = self.rank(adapter_id)
        if known == rank:
            return []
        if known:
            message = f"adapter {quoted(adapter_id)} is known with rank {known}; unload it first, or give another id"
            raise Conflict(message, field="rank", value=rank, known=known)
        if self.log.num_loaded >= self._max_loaded:
            raise Overloaded(
                f"{self._max_loaded} adapters are loaded; max_loaded_adapters is {self._max_loaded}; unload some first",
                Reason.TOO_MANY_ADAPTERS,
                field="max_loaded_adapters",
                value=self.log.num_loaded,
                limit=self._max_loaded,
            )
        return self._decide(adapter_id, rank)

    def unload(self, adapter_id: str) -> list[AdapterChange]:
        """Decide to unload an adapter; nothing changes if it is not known."""
        return self._decide(adapter_id, 0) if self.rank(adapter_id) else []

    def merge(self, changes: Iterable[AdapterChange], forgotten: int | None = None) -> list[AdapterChange]:
        """Take over what others decided; return what is news.

        Args:
            changes: of any versions.
            forgotten: of the log that these are the whole of; None: they are a part.
        """
        possible, others = list[AdapterChange](), list[AdapterChange]()
        latest = time.time_ns() // 1000 + MAX_AHEAD_US
        for change in changes:
            (possible if self._is_possible(change, latest) else others).append(change)
        if others:
            version, name, rank = others[0]
            log.warning("adapters_ignored", num=len(others), first=quoted(name), rank=rank, version=version)
        if forgotten is not None:
            forgotten = min(forgotten, latest)
        return self._noted(self.log.merge(possible) if forgotten is None else self.log.merge_all(possible, forgotten))

    def _decide(self, adapter_id: str, rank: int) -> list[AdapterChange]:
        version = self.log.next_version(time.time_ns() // 1000)
        return self._noted(self.log.merge([AdapterChange(version, adapter_id, rank)]))

    def _noted(self, news: list[AdapterChange]) -> list[AdapterChange]:
        self._revision += bool(news)
        return news

    def _is_possible(self, change: AdapterChange, latest: int) -> bool:
        name = change.adapter_id
        fits = change.version <= latest and change.rank <= self._max_lora_rank
        return fits and why_no_name(name) is None and name != self._model

    # --- the file ---------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Return once the file has all changes up to now; changes of several calls are written at once."""
        revision = self._revision
        if self._path is None:
            return
        async with self._writing:
            if self._written >= revision:
                return
            newest = self._revision
            content = json.dumps(self._record(), separators=(",", ":"))
            try:
                await asyncio.to_thread(_write, self._path, content)
            except OSError as error:
                log.error("adapters_file_failed", path=str(self._path), reason=error.strerror)
            self._written = newest

    def _record(self) -> dict[str, object]:
        changes: Collection[AdapterChange] = self.log.changes
        return {
            "format_version": FORMAT_VERSION,
            "kind": "adapters",
            "forgotten": self.log.forgotten,
            "changes": [[change.version, change.adapter_id, change.rank] for change in changes],
        }

    def _read(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if (record["kind"], record["format_version"]) != ("adapters", FORMAT_VERSION):
                raise FormatError(
                    f"scheduler.adapters_file: {path}: holds {record['kind']!r} of format_version"
                    f" {record['format_version']!r}; this version reads 'adapters' of {FORMAT_VERSION}"
                )
            self.merge([AdapterChange(*change) for change in record["changes"]], record["forgotten"])
        except FileNotFoundError:
            return
        except OSError as error:
            raise LorreryError(f"scheduler.adapters_file: {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"scheduler.adapters_file: {path}: is no such file: {error}") from None
        self._written = self._revision


def _write(path: Path, content: str) -> None:
    with whole_file(path) as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())
