"""A sweep's results from its folder: `sweep.csv`, or if that is missing its finished points."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lorrery.service.errors import FormatError
from lorrery.vocabulary.files import CPU_SECONDS, POINTS_FOLDER, SWEEP_FILE
from lorrery.vocabulary.intervals import is_clear, mean_and_margin

__all__ = ["Axis", "Point", "Sweep", "read_sweep", "unmoved", "warned"]

STATUS, ERROR, DONE = "status", "error", "ok"
SEED, NUM_SEEDS, CI95, POINTS = "seed", "num_seeds", "_ci95", "points"
"""Of rows that are means over seeds: how many, what ends the names of their margins, and the files of their runs."""
_MOST_POINT_FILES = 20_000
_MOST_WARNINGS = 8
_MOST_CLOSE = 3
_CHOICES = {"workers", "shards", "routers", "config", "fault"}
"""Swept options that are choices, as all settings are; the others are the load."""
_BEST = {
    "output_tokens_per_second": ("output tokens/s", False),
    "ttft_ms_p99": ("TTFT p99", True),
    "tpot_ms_p99": ("TPOT p99", True),
    "gpu_hours": ("GPU hours", True),
    "good_ratio": ("requests within the service level", False),
}
"""Figures by which points are ranked -> their names, and whether less is better."""
_REPLACEMENT = "the same `lorrery simulate --sweep ... --out` writes it again, and runs only what is missing"


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept key, with its distinct values in order of appearance."""

    key: str
    values: tuple[float | str, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether its values are numbers."""
        return bool(self.values) and not isinstance(self.values[0], str)

    @property
    def short(self) -> str:
        """The last part of its key."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Point:
    """One combination: values by key, and its figures by name, NaN if missing.

    Attributes:
        margins: half of the 95 % interval of a figure that is a mean over seeds.
        files: names of its runs' files, without suffix.
    """

    values: dict[str, float | str]
    status: str
    error: str
    figures: dict[str, float]
    margins: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def figure(self, name: str) -> float:
        """Return a figure; NaN if it is missing."""
        return self.figures.get(name, math.nan)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep.

    Attributes:
        context: inputs of one point: its `settings`, `options`, `simulation` and `command_line`; empty without points.
    """

    name: str
    folder: Path
    axes: list[Axis]
    points: list[Point]
    context: Mapping[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_sweep(folder: Path, name: str) -> Sweep:
    """Read a sweep's folder.

    Raises:
        FormatError: it has no point; says what to do.
    """
    warnings: list[str] = []
    point_files = islice(sorted((folder / POINTS_FOLDER).glob("*.json")), _MOST_POINT_FILES)
    table = folder / SWEEP_FILE
    if table.exists():
        keys, points = _read_table(table)
        context, told, rounds = _of_files(points, point_files)
    else:
        read = [content for path in point_files if (content := _read_point(path)) is not None]
        if not read:
            raise FormatError(f"{folder}: no {SWEEP_FILE}, and no finished point in {POINTS_FOLDER}/; {_REPLACEMENT}")
        keys = list(read[0]["point"])
        own = [content for content in read if list(content["point"]) == keys]
        points = [_point_of(content) for content in own]
        context, told = read[0].get("determined_by"), [one for content in own for one in _told(content)]
        rounds = [[point.figures] for point in points]
        warnings.append(f"{SWEEP_FILE} is missing, so only finished points are shown; {_REPLACEMENT}")
        if len(own) < len(read):
            warnings.append(f"{len(read) - len(own)} points of another sweep are in {POINTS_FOLDER}/ and left out")
    if not points:
        raise FormatError(f"{table}: no point in it; {_REPLACEMENT}")
    axes = [Axis(key, tuple(dict.fromkeys(point.values[key] for point in points))) for key in keys]
    axes = [_typed(axis, points) for axis in axes]
    for text, status in (("failed", "failed"), ("did not run", "not run")):
        if count := sum(point.status == status for point in points):
            example = next((point.error for point in points if point.status == status and point.error), "")
            warnings.append(f"{count:,} of {len(points):,} points {text}{f', such as: {example}' if example else ''}")
    warnings += unmoved(keys, [(point.values, point.figures) for point in points if point.status == DONE])
    warnings += close_calls([point.values for point in points], rounds)
    warnings += warned(max(len(points), sum(len(point.files) for point in points)), told)
    return Sweep(name, folder, axes, points, context if isinstance(context, Mapping) else {}, warnings)


def unmoved(keys: Sequence[str], done: Sequence[tuple[Mapping[str, object], Mapping[str, object]]]) -> list[str]:
    """Return a message for each swept key that changed no figure at any point, mostly settings without effect.

    Args:
        keys: swept.
        done: values by key and figures by name of the points that ran.
    """
    found = []
    for key in keys:
        groups: dict[str, list[str]] = {}
        for values, figures in done:
            others = repr([values[other] for other in keys if other != key])
            shown = repr([(name, value) for name, value in figures.items() if name != CPU_SECONDS])
            groups.setdefault(others, []).append(shown)
        several = [group for group in groups.values() if len(group) > 1]
        if several and all(len(set(group)) == 1 for group in several):
            found.append(
                f"{key} made no difference: all figures are the same at each of its values; does it play a part"
                " under these settings (docs/settings.md), and this load?"
            )
    return found


def warned(num_points: int, told: Iterable[tuple[str, str]]) -> list[str]:
    """Say what readers of the points' figures must know, once of warnings that differ in numbers only.

    Args:
        num_points: of the sweep.
        told: warnings, each with the title of its point.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for title, text in told:
        alike.setdefault(re.sub(r"[\d.,]+", "#", text), []).append((title, text))
    return [
        f"{len(found):,} of {num_points:,} points, such as {found[0][0]}: {found[0][1]}"
        for found in list(alike.values())[:_MOST_WARNINGS]
    ]


def close_calls(values: Sequence[Mapping[str, object]], rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say where the best of what was swept is not told apart from the next by more than chance.

    What is chosen are settings, and numbers of processes; under the same load (the other keys) their points had the
    same requests, so figures are subtracted seed by seed.

    Args:
        values: of the points by key.
        rounds: figures by name of each point, one for each seed.
    """
    loads: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for own, figures in zip(values, rounds, strict=True):
        chosen = {key: value for key, value in own.items() if "." in key or key in _CHOICES}
        load = _title({key: value for key, value in own.items() if key not in chosen and key != SEED})
        loads.setdefault(load, {}).setdefault(_title(chosen), []).extend(figures)
    found = []
    for figure, (name, less_is_better) in _BEST.items():
        close, num_compared = [], 0
        for load, candidates in loads.items():
            columns = {title: [_or_nan(one.get(figure)) for one in own] for title, own in candidates.items()}
            num_seeds = max(map(len, columns.values()))
            means = {title: mean_and_margin(own)[0] for title, own in columns.items() if len(own) == num_seeds}
            known = [title for title, mean in means.items() if math.isfinite(mean)]
            if num_seeds < 2 or len(known) < 2:
                continue
            num_compared += 1
            best, *others = sorted(known, key=lambda title: means[title] * (1 if less_is_better else -1))
            second = next((title for title in others if columns[title] != columns[best]), best)
            differences = [b - a for a, b in zip(columns[best], columns[second], strict=True)]
            if second != best and not is_clear(differences):
                close.append(f"{best} and {second}{f' at {load}' if load else ''}")
        if close:
            where = f" at {len(close):,} of {num_compared:,} loads" if num_compared > 1 else ""
            more = f"; and {len(close) - _MOST_CLOSE:,} more" if len(close) > _MOST_CLOSE else ""
            found.append(
                f"{name}: the best two are not separable{where}, the difference is within chance:"
                f" {'; '.join(close[:_MOST_CLOSE])}{more}; more seeds (--seeds) or longer runs tell more"
            )
    return found


def _title(values: Mapping[str, object]) -> str:
    shown = {key: value if isinstance(value, str) else f"{value:g}" for key, value in values.items()}
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in shown.items())


def _or_nan(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _of_files(
    points: Sequence[Point], files: Iterable[Path]
) -> tuple[object, list[tuple[str, str]], list[list[dict[str, Any]]]]:
    """Return what the files of a table's rows add: inputs of the first row, all warnings, and each row's runs by seed.

    Files of other sweeps may be in the folder too; a table of an earlier version does not say which are its own.
    """
    rows = {name: number for number, point in enumerate(points) for name in point.files}
    found: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for path in files:
        number = rows.get(path.stem) if rows else len(points)
        if number is not None and (content := _read_point(path)) is not None:
            found.setdefault(number, []).append((path.stem, content))
    told: list[tuple[str, str]] = []
    rounds: list[list[dict[str, Any]]] = [[] for _ in points]
    for number, contents in sorted(found.items()):
        order = points[number].files if number < len(points) else ()
        for _, content in sorted(contents, key=lambda one: order.index(one[0]) if order else 0):
            told += _told(content)
            if order:
                rounds[number].append(content["figures"])
    first = found[min(found)][0][1] if found else {}
    return first.get("determined_by"), told, rounds


def _told(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the warnings of a point's file, each with the point's title."""
    title = " ".join(f"{key}={value}" for key, value in content["point"].items())
    texts = content.get("warnings")
    return [(title, str(text)) for text in texts] if isinstance(texts, list) else []


def _read_table(path: Path) -> tuple[list[str], list[Point]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            if STATUS not in header or ERROR not in header:
                raise FormatError(f"{path}: no columns {STATUS} and {ERROR}: not the table of a sweep; {_REPLACEMENT}")
            keys = header[: header.index(STATUS)]
            figures = [name for name in header[len(keys) :] if name not in (STATUS, ERROR, POINTS)]
            points = []
            for number, cells in enumerate(rows, 2):
                if len(cells) != len(header):
                    raise FormatError(
                        f"{path}: line {number} has {len(cells)} fields, the header {len(header)}; {_REPLACEMENT}"
                    )
                row = dict(zip(header, cells, strict=True))
                values: dict[str, float | str] = {key: row[key] for key in keys}
                numbers = {name: _number(row[name]) for name in figures}
                margins = {
                    name.removesuffix(CI95): margin
                    for name in figures
                    if name.endswith(CI95) and math.isfinite(margin := numbers.pop(name))
                }
                files = tuple(row.get(POINTS, "").split())
                points.append(Point(values, row[STATUS], row[ERROR], numbers, margins, files))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{path}: {error}; {_REPLACEMENT}") from None
    return keys, points


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _read_point(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("point"), dict):
        return None
    return content if isinstance(content.get("figures"), dict) else None


def _point_of(content: Mapping[str, Any]) -> Point:
    figures = {name: float(value) for name, value in content["figures"].items() if isinstance(value, int | float)}
    return Point({key: str(value) for key, value in content["point"].items()}, DONE, "", figures)


def _typed(axis: Axis, points: Sequence[Point]) -> Axis:
    """Convert an axis' values to ascending numbers if all are numeric, in its points too."""
    numbers = {value: _number(str(value)) for value in axis.values}
    if not all(map(math.isfinite, numbers.values())):
        return axis
    for point in points:
        point.values[axis.key] = numbers[point.values[axis.key]]
    return Axis(axis.key, tuple(sorted(set(numbers.values()))))
