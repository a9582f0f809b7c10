"""A scheduler's knowledge of run-time loads and unloads: the log, the clock that gives it versions, its file.

`vocabulary.adapters` says how changes are ordered. A scheduler decides the changes that its operators request, and
merges those that routers bring from other schedulers, or from before its own restart. With a file it has them before
any router connects. A thread writes the file. A call returns once the file has its change. A
failing disk costs the file, not the call.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lorrery.service.errors import Conflict, FormatError, LorreryError, Overloaded, Reason
from lorrery.service.files.writing import whole_file
from lorrery.service.names import quoted, why_no_name
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog, WhenKnown

FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
"""Version 1 is the first line alone."""
FEW = 1024
"""Changes that may always be appended before the file is rewritten."""

log = get_logger("scheduler.adapters")


class KeptAdapters(NamedTuple):
    """Contents of a file.

    Attributes:
        changes: of the log in its first line.
        forgotten: of that log.
        added: later changes, by line, in the order in which they were merged.
    """

    changes: list[AdapterChange]
    forgotten: int
    added: list[list[AdapterChange]]


class AdaptersFile:
    """The file that keeps a scheduler's log of loads and unloads: a past state of the log, and the changes since.

    Its first line is a JSON object with the whole log, each further line a JSON list of changes that were merged at
    once. So a change costs one line, however many adapters are known. If the lines would have more changes than the
    log, or than `FEW` if that is more, the file is rewritten instead, whole or not at all. Lines are durable once
    `append` has returned; a process that ends earlier leaves at most an incomplete last line, which readers ignore.

    Nothing is appended to a file that is not as this process left it: removed, replaced, truncated, or with half a line
    from a full disk. It is rewritten instead.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left: tuple[int, int, int] | None = None  # device, inode and size in bytes as last written
        self._num_added = 0

    def read(self) -> KeptAdapters | None:
        """Return the file's contents; None: there is no file.

        Raises:
            LorreryError: it cannot be read, or has other content.
        """
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):  # a device has no end
            raise FormatError(f"scheduler.adapters_file: {self.path}: is not a regular file; name one, or a new file")
        try:
            with self.path.open("rb") as file:
                content = file.read()
                status = os.fstat(file.fileno())
            text = content.decode()
            record, end = json.JSONDecoder().raw_decode(text)
            if record["kind"] != "adapters" or record["format_version"] not in READ_VERSIONS:
                raise FormatError(
                    f"scheduler.adapters_file: {self.path}: holds {record['kind']!r} of format_version"
                    f" {record['format_version']!r}; this version reads 'adapters' of 1 and {FORMAT_VERSION}"
                )
            lines = text[end:].split("\n")
            if lines[0].strip():
                raise ValueError(f"unexpected text after the log on its line, at character {end}")
            cut = lines.pop()
            added = [_changes(json.loads(line)) for line in lines[1:] if line.strip()]
            kept = KeptAdapters(_changes(record["changes"]), int(record["forgotten"]), added)
        except FileNotFoundError:
            folder = self.path.parent
            if not folder.is_dir():
                raise LorreryError(
                    f"scheduler.adapters_file: {self.path}: there is no folder {folder}; create it, or name another"
                ) from None
            return None
        except OSError as error:
            raise LorreryError(f"scheduler.adapters_file: {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"scheduler.adapters_file: {self.path}: is not such a file: {error}") from None
        if cut:
            log.warning("adapters_file_cut", path=str(self.path), dropped_bytes=len(cut))
        elif record["format_version"] == FORMAT_VERSION and text.endswith("\n"):
            self._left = status.st_dev, status.st_ino, len(content)
            self._num_added = sum(map(len, added))
        return kept

    def append(self, added: Sequence[Sequence[AdapterChange]], num_known: int) -> bool:
        """Append changes to the file; return whether that was possible: if not, it has to be rewritten.

        Args:
            added: changes that the file lacks, by line.
            num_known: changes in the whole log.

        Raises:
            OSError: the disk failed. The file has to be rewritten.
        """
        left, self._left = self._left, None
        num_added = self._num_added + sum(map(len, added))
        if left is None or num_added > max(FEW, num_known):
            return False
        device, inode, size = left
        lines = "".join(json.dumps(changes, separators=(",", ":")) + "\n" for changes in added).encode()
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            return False
        with file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino, status.st_size) != left:
                return False
            file.seek(size)
            if file.write(lines) != len(lines):
                return False
            os.fsync(file.fileno())
        self._left = device, inode, size + len(lines)
        self._num_added = num_added
        return True

    def replace(self, changes: Sequence[AdapterChange], forgotten: int) -> None:
        """Rewrite the file, whole or not at all.

        Args:
            changes: all changes of the log.
            forgotten: of the log.

        Raises:
            OSError: it cannot be written.
        """
        self._left = None
        record = {"format_version": FORMAT_VERSION, "kind": "adapters", "forgotten": forgotten, "changes": changes}
        content = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with whole_file(self.path) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        self._left = status.st_dev, status.st_ino, len(content)
        self._num_added = 0


def _changes(rows: list[list[Any]]) -> list[AdapterChange]:
    changes = [AdapterChange(*row) for row in rows]
    for version, adapter_id, rank in changes:
        if not (isinstance(version, int) and isinstance(adapter_id, str) and isinstance(rank, int)):
            raise TypeError(f"a change is [version, adapter, rank], not {[version, adapter_id, rank]!r}")
    return changes


MAX_AHEAD_US = 24 * 3600 * 1_000_000
"""How far ahead of the present time the version of a change decided elsewhere may be: after the highest version there
is, no change could be newer."""


def adapters_file(settings: Settings) -> Path | None:
    """Return the path of the log's file: as set, or beside the journal; None: there is none."""
    own = settings.scheduler
    if own.adapters_file is not None or own.journal is None:
        return own.adapters_file
    return own.journal.with_name(f"{own.journal.name}.adapters")


class LoadedAdapters:
    """Decides and merges changes. The caller applies the changes that methods return as new.

    Args:
        settings: of the cluster.

    Raises:
        LorreryError: the file cannot be read, or has other content.
    """

    def __init__(self, settings: Settings) -> None:
        listed = dict(settings.adapters.expand())
        self.log = AdapterLog(listed)
        self._listed = listed
        self._model = settings.model
        self._max_lora_rank = settings.adapters.max_lora_rank
        self._max_loaded = settings.adapters.max_loaded_adapters
        path = adapters_file(settings)
        self._file = None if path is None else AdaptersFile(path)
        self._revision = self._written = 0
        self._unwritten: list[list[AdapterChange]] | None = []  # in order; None: the file has to be rewritten
        self._writing: asyncio.Task[None] | None = None
        if self._file is not None:
            self._read(self._file)

    # --- changes ----------------------------------------------------------------------------------------------------

    def rank(self, adapter_id: str) -> int:
        """Return an adapter's current rank; 0: it is not known."""
        latest = self.log.latest(adapter_id)
        return self._listed.get(adapter_id, 0) if latest is None else latest.rank

    def check(self, adapter_id: str, rank: int, when_known: WhenKnown = WhenKnown.KEEP) -> AdapterChange | None:
        """Return the change that loads an adapter, for `merge` once its weights are loaded.

        None: it is known with this rank, and `when_known` does not say otherwise.

        Raises:
            Conflict: it is known, with another rank or at all.
            Overloaded: `max_loaded_adapters` are loaded.
        """
        known = self.rank(adapter_id)
        if known and when_known is not WhenKnown.REPLACE:
            if known == rank and when_known is not WhenKnown.REFUSE:
                return None
            message = f"adapter {quoted(adapter_id)} is known with rank {known}; unload it first, or give another id"
            raise Conflict(message, field="rank", value=rank, known=known)
        latest = self.log.latest(adapter_id)
        is_loaded = latest is not None and latest.rank > 0
        if not is_loaded and self.log.num_loaded >= self._max_loaded:
            raise Overloaded(
                f"{self._max_loaded} adapters are loaded; max_loaded_adapters is {self._max_loaded}; unload some first",
                Reason.TOO_MANY_ADAPTERS,
                field="max_loaded_adapters",
                value=self.log.num_loaded,
                limit=self._max_loaded,
            )
        return self._change(adapter_id, rank)

    def unload(self, adapter_id: str) -> list[AdapterChange]:
        """Decide to unload an adapter; nothing changes if it is not known."""
        return self._noted(self.log.merge([self._change(adapter_id, 0)])) if self.rank(adapter_id) else []

    def merge(self, changes: Iterable[AdapterChange], forgotten: int | None = None) -> list[AdapterChange]:
        """Merge changes that others decided; return the new ones.

        Args:
            changes: of any versions.
            forgotten: of the log, if these are the whole of it; None: they are a part.
        """
        possible, others = list[AdapterChange](), list[AdapterChange]()
        latest = time.time_ns() // 1000 + MAX_AHEAD_US
        for change in changes:
            (possible if self._is_possible(change, latest) else others).append(change)
        if others:
            version, name, rank = others[0]
            log.warning("adapters_ignored", num=len(others), first=quoted(name), rank=rank, version=version)
        if forgotten is not None:
            self._unwritten = None  # the log may forget entries that no change mentions
            return self._noted(self.log.merge_all(possible, min(forgotten, latest)))
        return self._noted(self.log.merge(possible))

    def _change(self, adapter_id: str, rank: int) -> AdapterChange:
        return AdapterChange(self.log.next_version(time.time_ns() // 1000), adapter_id, rank)

    def _noted(self, news: list[AdapterChange]) -> list[AdapterChange]:
        if news and self._file is not None:
            self._revision += 1
            if self._unwritten is not None:
                self._unwritten.append(news)
        return news

    def _is_possible(self, change: AdapterChange, latest: int) -> bool:
        name = change.adapter_id
        fits = change.version <= latest and change.rank <= self._max_lora_rank
        return fits and why_no_name(name) is None and name != self._model

    # --- the file ---------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Return once the file has all changes made so far; changes of several calls are written at once."""
        revision = self._revision
        while self._file is not None and self._written < revision:
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write(self._file))
            await asyncio.shield(self._writing)  # a cancelled call leaves no thread to write beside the next one

    async def _write(self, file: AdaptersFile) -> None:
        revision = self._revision
        added, self._unwritten = self._unwritten, []
        try:
            if added is None or not await asyncio.to_thread(file.append, added, self.log.num_changes):
                revision, self._unwritten = self._revision, []
                await asyncio.to_thread(file.replace, self.log.changes, self.log.forgotten)
        except OSError as error:
            log.error("adapters_file_failed", path=str(file.path), reason=error.strerror)
            self._unwritten = None
        self._written = revision

    def _read(self, file: AdaptersFile) -> None:
        if (kept := file.read()) is None:
            return
        self.merge(kept.changes, kept.forgotten)
        for changes in kept.added:
            self.merge(changes)
        self._written = self._revision
        self._unwritten = []
