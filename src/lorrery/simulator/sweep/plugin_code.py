"""The source files of a plug-in: its module, and the user's own modules that it imports, recursively.

They are read, not run, so an import with a computed name (`importlib.import_module(name)`) is not seen. Installed
packages, the standard library and lorrery itself are left out: they have versions. A plug-in's own package counts,
installed or not.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import lorrery

__all__ = ["plugin_files"]


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
        for other in _imported(name, path):
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


def _imported(module: str, path: Path) -> Iterator[str]:
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
