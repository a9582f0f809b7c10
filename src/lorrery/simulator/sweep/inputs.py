"""Inputs of a point besides settings and options: the content of files, and the code of plug-ins.

A sweep identifies its points by the content of these files at its start. They are read again when a point runs, hours
later or on another machine, so each run checks that they are still the same.

The code of a plug-in is its module, and the user's own modules that it imports, recursively. They are read, not run, so
an import with a computed name (`importlib.import_module(name)`) is not seen. Installed packages, the standard library
and lorrery itself are left out: they have versions. A plug-in's own package counts, installed or not.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from stat import S_ISREG
from types import ModuleType
from typing import Any

import lorrery

__all__ = ["Inputs", "digest", "named_files", "plugin_files"]


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


def plugin_files(module: str) -> dict[str, Path | None]:
    """Return the files of a plug-in by dotted name, its own first; None: not found.

    Args:
        module: the plug-in's, as named in the settings.
    """
    found: dict[str, Path | None] = {module: _origin(module)}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = found[name]
        if path is None:
            continue
        for other in _imports_of(name, path):
            if other in found or (origin := _origin(other)) is None:
                continue
            if not _is_installed(origin) or (_top(other) == _top(module) and not _is_ours(origin)):
                found[other] = origin
                waiting.append(other)
    return found


def _origin(module: str) -> Path | None:
    """Return the source file of a module without importing anything; None: it has none, or is not found.

    For a module in an archive that is the archive.
    """
    spec: ModuleSpec | None = None
    places: list[str] | None = None
    parts = module.split(".")
    for number, part in enumerate(parts, start=1):
        spec = _find_spec(".".join(parts[:number]), places)
        if spec is not None:
            places = list(spec.submodule_search_locations or ())
            continue
        places = [str(inner) for place in places or () if (inner := Path(place) / part).is_dir()]
        if not places:
            return None
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    origin = Path(spec.origin)
    return next((path for path in (origin, *origin.parents) if path.is_file()), origin)


def _find_spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    """Query the finders that an import would use, including those of editable installs; None: not found.

    Args:
        name: of a module.
        places: search locations of its package; None: it is in no package.
    """
    for finder in sys.meta_path:
        # A KeyError: a folder without __init__.py in another, whose finder looks up what has been imported.
        with suppress(ImportError, ValueError, KeyError):
            spec = finder.find_spec(name, places)
            if spec is not None:
                return spec
    return None


def _imports_of(module: str, path: Path) -> Iterator[str]:
    """Yield the modules that a file may import, with their packages; nothing for an unreadable file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    yield from _with_packages(package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, (_above(package, node.level), node.module)))
            yield from _with_packages(base)
            for alias in node.names:
                yield f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and (name := _named_by_call(node)):
            level = len(name) - len(name.lstrip("."))
            yield from _with_packages(".".join(filter(None, (_above(package, level), name[level:]))))


def _above(package: str, level: int) -> str:
    """Return the package that `level` leading dots name; "": none."""
    parts = package.split(".")
    return ".".join(parts[: len(parts) - level + 1]) if level else ""


def _named_by_call(call: ast.Call) -> str | None:
    """Return the name in `importlib.import_module("name")` or `__import__("name")`; None: another call, or computed."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if function not in {"import_module", "__import__"} or not call.args:
        return None
    name = call.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _with_packages(module: str) -> Iterator[str]:
    parts = module.split(".") if module else []
    for number in range(1, len(parts) + 1):
        yield ".".join(parts[:number])


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_ours(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in lorrery.__path__)


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = (paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    return *map(Path, folders), *map(Path, lorrery.__path__)
