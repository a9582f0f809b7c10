"""Detects whether a folder holds a run, a sweep or a comparison, and reads it.

Missing files give a warning on the page, or an error that says what to do.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorrery.service.errors import FormatError, SettingsError
from lorrery.view.reports.requests import Requests, read_requests
from lorrery.view.reports.sweep import Sweep, read_sweep
from lorrery.vocabulary.files import (
    COMPARE_FILE,
    COMPARE_KIND,
    FORMAT_VERSION,
    KINDS,
    POINTS_FOLDER,
    REQUESTS_FILE,
    SIMULATED_KIND,
    STEPS_FILE,
    SUMMARY_FILE,
    SWEEP_FILE,
)

__all__ = ["Run", "read_folders"]

MOST_RUNS = 8
"""In one page: colours and dashes distinguish no more lines."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run, as its files describe it.

    Attributes:
        name: of its folder; unique within a page.
        summary: content of `summary.json`; empty without one.
        steps: the file of steps, if there is one.
        warnings: the run's own, and those from reading it.
    """

    name: str
    folder: Path
    summary: Mapping[str, Any]
    requests: Requests
    steps: Path | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def is_simulated(self) -> bool:
        """Whether a simulation made it. Files of the first version show it only by their figures."""
        return self.summary.get("kind") == SIMULATED_KIND or "simulation" in self.summary

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a section of the summary; empty if it has none."""
        found = self.summary.get(name)
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Arena:
    """A comparison: its folder's name, and the content of its file."""

    name: str
    content: Mapping[str, Any]


def read_folders(paths: list[Path]) -> tuple[list[Run], list[Sweep], list[Arena]]:
    """Read runs, sweeps and comparisons.

    Args:
        paths: folders, or files in them.

    Raises:
        SettingsError: too many, or a duplicate.
        FormatError: a folder with neither, or unreadable files.
    """
    folders = [path.parent if path.name in _FILES and not path.is_dir() else path for path in paths]
    for index, folder in enumerate(folders):
        if folder.resolve() in (other.resolve() for other in folders[:index]):
            raise SettingsError(f"{folder} is given twice")
    runs: list[Run] = []
    sweeps: list[Sweep] = []
    arenas: list[Arena] = []
    names = _names(folders)
    for folder, name in zip(folders, names, strict=True):
        if (folder / COMPARE_FILE).exists():
            arenas.append(_read_arena(folder, name))
        elif (folder / SWEEP_FILE).exists() or (folder / POINTS_FOLDER).is_dir():
            sweeps.append(read_sweep(folder, name))
        else:
            runs.append(_read_run(folder, name))
    if len(runs) > MOST_RUNS:
        raise SettingsError(f"{len(runs)} runs; {MOST_RUNS} are the most that one page can tell apart: give fewer")
    return runs, sweeps, arenas


_FILES = (SUMMARY_FILE, REQUESTS_FILE, STEPS_FILE, SWEEP_FILE, COMPARE_FILE)


def _read_run(folder: Path, name: str) -> Run:
    summary_file, requests_file, steps = folder / SUMMARY_FILE, folder / REQUESTS_FILE, folder / STEPS_FILE
    if not folder.exists():
        raise FormatError(f"{folder}: no such folder")
    if not summary_file.exists() and not requests_file.exists():
        raise FormatError(f"{folder}: neither {SUMMARY_FILE} nor {SWEEP_FILE}{_hint(folder)}")
    warnings: list[str] = []
    summary: Mapping[str, Any] = {}
    if summary_file.exists():
        summary = _read_json(summary_file, KINDS, "a summary of `lorrery load` or `lorrery simulate`")
    else:
        warnings.append(
            f"{SUMMARY_FILE} is missing, so it is not known what ran, nor how: the run may have been killed while it"
            " wrote its files, or one was not copied"
        )
    requests = read_requests(requests_file, warnings)
    expected = summary.get("summary", {}).get("num_requests") if isinstance(summary.get("summary"), Mapping) else None
    if isinstance(expected, int) and expected != len(requests):
        warnings.append(
            f"{REQUESTS_FILE} has {len(requests):,} requests, {SUMMARY_FILE} speaks of {expected:,}: they are of"
            " different runs, or one is not whole; what follows is of the requests that are there"
        )
    own = summary.get("warnings")
    told = [str(one) for one in own] if isinstance(own, list) else []
    return Run(name, folder, summary, requests, steps if steps.exists() else None, [*told, *warnings])


def _hint(folder: Path) -> str:
    inside = sorted(path.parent for path in folder.glob(f"*/{SUMMARY_FILE}")) if folder.is_dir() else []
    if inside:
        return f"; its folders are runs: lorrery report {' '.join(str(one) for one in inside[:MOST_RUNS])}"
    return "; give a folder that `lorrery load --out` or `lorrery simulate --out` has written"


def _read_arena(folder: Path, name: str) -> Arena:
    return Arena(name, _read_json(folder / COMPARE_FILE, (COMPARE_KIND,), "the file of `lorrery compare`"))


def _read_json(path: Path, kinds: Collection[str], what: str) -> Mapping[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a JSON file, or half of one ({error}); run again, or copy it whole") from None
    if not isinstance(content, Mapping) or content.get("kind") not in kinds:
        raise FormatError(f"{path}: not {what}")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise FormatError(f"{path}: format_version {version!r} is not known; this version reads {FORMAT_VERSION}")
    return content


def _names(folders: list[Path]) -> list[str]:
    """Name each folder by the shortest end of its path that is unique."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
