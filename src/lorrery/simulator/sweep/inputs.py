"""Inputs of a point besides settings and options: the content of files, and the code of plug-ins.

A sweep identifies its points by the content of these files at its start. They are read again when a point runs, hours
later or on another machine, so each run checks that they are still the same.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from types import ModuleType
from typing import Any

__all__ = ["Inputs", "digest", "named_files"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input files of one run, in their current state.

    Attributes:
        files: digests by path; None: unreadable.
        modules: digests and paths of its plug-ins' modules, by name.
    """

    files: Mapping[str, str | None]
    modules: Mapping[str, tuple[str | None, str]]

    @classmethod
    def of(cls, files: Iterator[Path], modules: Mapping[str, Path | None]) -> "Inputs":
        """Read files and modules; this process may have imported some of the modules."""
        found = {name: (digest(path), str(path)) for name, path in modules.items() if path is not None}
        for name, (code, _) in found.items():
            _note_imported(name, code)
        return cls({str(path): digest(path) for path in files}, found)

    def check_unchanged(self) -> str | None:
        """Return what this process has read or imported in a changed version; None: nothing."""
        for name, known in self.files.items():
            if digest(Path(name)) != known:
                return f"{name} is not the file that it was when the sweep began; the same command runs it as it is now"
        for name, (known, path) in self.modules.items():
            if name in sys.modules and _note_imported(name, digest(Path(path))) != known:
                return (
                    f"{path} is not what it was when the sweep began, or this process had imported {name} before; "
                    "the same command runs it as it is now (on a cluster, once its workers have started anew)"
                )
        return None


_imported: dict[str, tuple[ModuleType, str | None]] = {}
"""Plug-in modules in this process, with the digest of their file when first seen here."""


def _note_imported(name: str, code: str | None) -> str | None:
    """Return the digest of the imported version of a module; as given, if it was not seen before."""
    module = sys.modules.get(name)
    if module is None:
        return code
    known = _imported.get(name)
    if known is None or known[0] is not module:
        known = _imported[name] = module, code
    return known[1]


def named_files(options: object) -> Iterator[Path]:
    """Yield the files that a plug-in's options name: texts that are paths of existing files."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        for part in options:
            yield from named_files(part)
    elif isinstance(options, str | Path):
        try:
            if Path(options).is_file():
                yield Path(options)
        except (OSError, ValueError):  # too long, or with a NUL
            return


def digest(path: Path) -> str | None:
    """Return a hash of a file's content, or of the JSON files in a folder; None: unreadable."""
    try:
        if path.is_dir():
            names = sorted(inner.name for inner in path.glob("*.json"))
            contents: Any = [(name, digest(path / name)) for name in names]
            return hashlib.sha256(repr(contents).encode()).hexdigest()
        state = path.stat()
        if not S_ISREG(state.st_mode):
            return None  # reading a pipe would consume it
        return _content_digest(path, state.st_size, state.st_mtime_ns, state.st_ino)
    except OSError:
        return None


@cache
def _content_digest(path: Path, _size: int, _mtime_ns: int, _inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
