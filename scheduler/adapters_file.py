"""The file that keeps a scheduler's log of loads and unloads: a past state of the log, and the changes since.

Its first line is a JSON object with the whole log, each further line a JSON list of changes that were merged at once.
So a change costs one line, however many adapters are known. If the lines would have more changes than the log, or than
`FEW` if that is more, the file is rewritten instead, whole or not at all. Lines are durable once `append` has returned;
a process that ends earlier leaves at most an incomplete last line, which readers ignore.

Nothing is appended to a file that is not as this process left it: removed, replaced, truncated, or with half a line
from a full disk. It is rewritten instead.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lorrery.service.errors import FormatError, LorreryError
from lorrery.service.files.writing import whole_file
from lorrery.service.telemetry.log import get_logger
from lorrery.vocabulary.adapters import AdapterChange

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
    """See the module. One process writes it, one thread at a time.

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
