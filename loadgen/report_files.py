"""The files of a run: a JSON summary, a CSV with one line per request, and one with a line per adapter.

Both carry units in their names. The summary includes `format_version`, the formulas, the run's options and the trace's
attribution, so that it can be read without this program. Times are device seconds unless a name says wall.
"""

import csv
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import Any, TextIO

from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.requests_csv import write_requests
from lorrery.loadgen.scaling_report import scaling_csv
from lorrery.loadgen.workload.summary import FORMULAS
from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.service.files.writing import whole_file
from lorrery.service.installed import VERSION
from lorrery.vocabulary.adapters import FIGURES, FiguresByAdapter
from lorrery.vocabulary.files import (
    ADAPTERS_FILE,
    FORMAT_VERSION,
    KINDS,
    LIVE_KIND,
    REQUESTS_FILE,
    SCALING_FILE,
    SIMULATED_KIND,
    SUMMARY_FILE,
)


def check_folder(folder: Path) -> None:
    """Check before a run that a report can be written after it; creates nothing.

    Raises:
        SettingsError: the folder is a file, or can be neither made nor written to.
    """
    nearest = folder.absolute()
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
    except OSError as error:  # a name that no file can have
        raise SettingsError(f"--out {folder}: {error.strerror}") from None
    if not nearest.is_dir():
        raise SettingsError(f"--out {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingsError(f"--out {folder}: {nearest} cannot be written to")


def write_report(report: LoadReport, folder: Path) -> tuple[Path, ...]:
    """Write `summary.json` and `requests.csv` into a folder, which is created if needed; return their paths.

    `scaling.csv` follows if workers were scaled, and `adapters.csv` if loads of adapters were counted.

    Raises:
        LorreryError: they cannot be written.
    """
    paths = [folder / SUMMARY_FILE, folder / REQUESTS_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(paths[1], lambda file: write_requests(report.outcomes, file))
        if report.scaling is not None:
            paths.append(folder / SCALING_FILE)
            rows = scaling_csv(report.scaling)
            _replace(paths[-1], lambda file: file.write(rows))
        if (adapters := report.adapters) is not None:
            paths.append(folder / ADAPTERS_FILE)
            _replace(paths[-1], lambda file: _write_adapters(adapters, file))
        summary = json.dumps(in_json(to_json(report)), indent=2, allow_nan=False) + "\n"
        _replace(paths[0], lambda file: file.write(summary))
    except OSError as error:
        raise LorreryError(f"report: {error.filename}: {error.strerror}") from None
    return tuple(paths)


def read_report(path: Path) -> dict[str, Any]:
    """Read a JSON summary.

    Args:
        path: the file, or the folder that `write_report` wrote.

    Raises:
        FormatError: not such a file, or an unknown format version.
    """
    if path.is_dir():
        path /= SUMMARY_FILE
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: not a JSON file") from None
    if not isinstance(content, dict) or content.get("kind") not in KINDS:
        raise FormatError(f"{path}: not a summary of `lorrery load` or `lorrery simulate`")
    if content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version")
        raise FormatError(f"{path}: format_version {found!r} is not known; this version reads {FORMAT_VERSION}")
    return content


def to_json(report: LoadReport) -> dict[str, Any]:
    """Return the summary in its file format."""
    options = asdict(report.options)
    options |= {"input_range": report.options.prompt_lengths, "output_range": report.options.output_lengths}
    options["trace"] = str(report.options.trace) if report.options.trace else None
    return {
        "kind": LIVE_KIND if report.simulation is None else SIMULATED_KIND,
        "format_version": FORMAT_VERSION,
        "lorrery_version": VERSION,
        "started_at": report.started_at.astimezone(UTC).isoformat(timespec="seconds"),
        "interrupted": report.interrupted,
        "warnings": list(report.warnings),
        "options": options,
        "workload": {
            "num_requests": len(report.workload.requests),
            "num_skipped": report.num_skipped,
            "attribution": report.workload.attribution,
            "notes": list(report.workload.notes),
        },
        "cluster": asdict(report.cluster),
        "formulas": FORMULAS,
        "summary": asdict(report.summary),
        "slora_summary": asdict(report.slora),
        **_how_it_ran(report),
    }


def in_json(value: object) -> object:
    """Return a value without the numbers that JSON lacks: infinite ones, such as a limit's, become text, NaN null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: in_json(one) for key, one in value.items()}
    return [in_json(one) for one in value] if isinstance(value, list | tuple) else value


def _write_adapters(adapters: FiguresByAdapter, file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("adapter_id", *FIGURES))
    for adapter_id, figures in adapters.items():
        cells = figures.shown().values()
        writer.writerow((adapter_id, *(f"{cell:.6f}" if isinstance(cell, float) else cell for cell in cells)))


def _how_it_ran(report: LoadReport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if report.own_load is not None:
        found["load_generator"] = {"wall_seconds_of_run": report.wall_seconds, **asdict(report.own_load)}
    if report.simulation is not None:
        found["simulation"] = asdict(report.simulation)
    if report.adapters is not None:
        found["adapter_loads"] = {
            "total": report.adapter_total.shown(),
            "adapters": [{"adapter_id": name, **figures.shown()} for name, figures in report.adapters.items()],
        }
    if report.scaling is not None:
        found["scaling"] = asdict(report.scaling.summary)
    if report.settings is not None:
        found["settings"] = dict(report.settings)
    return found


def _replace(path: Path, write: Callable[[TextIO], object]) -> None:
    with whole_file(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        write(text)
