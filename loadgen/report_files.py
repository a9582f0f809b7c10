"""The files of a run: a JSON summary, a CSV with one line per request, and one with a line per adapter.

Both carry units in their names. The summary includes `format_version`, the formulas, the run's options and the trace's
attribution, so that it can be read without this program. Times are device seconds unless a name says wall.
"""

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.report import LoadReport, scaling_csv
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.loadgen.workload.summary import FORMULAS
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import whole_file
from lorrery.service.installed import VERSION
from lorrery.vocabulary.adapters import FIGURES, FiguresByAdapter
from lorrery.vocabulary.files import (
    ADAPTERS_FILE,
    FORMAT_VERSION,
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


CSV_COLUMNS = (
    "index",
    "status",
    "adapter_id",
    "tenant_id",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "intended_seconds",
    "sent_seconds",
    "first_token_seconds",
    "last_token_seconds",
    "end_seconds",
    "ttft_from_intended_ms",
    "ttft_from_sent_ms",
    "e2e_from_intended_ms",
    "e2e_from_sent_ms",
    "tpot_ms",
    "norm_tpot_from_sent_ms",
    "queue_seconds",
    "adapter_load_seconds",
    "prefill_seconds",
    "decode_seconds",
    "num_messages",
    "num_requeues",
    "worker_id",
    "finish_reason",
    "token_ids_crc32",
    "detail",
)
PRIORITY = "priority"
"""A further column, if a request has a priority other than 0."""

_ROWS_AT_ONCE = 10_000

Cells = Callable[[slice], Iterator[Any]]
"""Return the cells of one column for some rows."""


def write_requests(table: OutcomeTable, file: TextIO) -> None:
    """Write the header and all rows, in the table's order."""
    columns = _columns(table)
    assert len(columns) == len(CSV_COLUMNS)
    writer = csv.writer(file, lineterminator="\n")
    if table.priority.any():
        columns = (*columns, _whole(table.priority))
        writer.writerow((*CSV_COLUMNS, PRIORITY))
    else:
        writer.writerow(CSV_COLUMNS)
    for begin in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, len(table)))
        writer.writerows(zip(*(cells(rows) for cells in columns), strict=True))


def _columns(table: OutcomeTable) -> tuple[Cells, ...]:
    intended, sent, first, last = (
        table.intended_seconds,
        table.sent_seconds,
        table.first_token_seconds,
        table.last_token_seconds,
    )
    tokens, detail = table.output_tokens, table.detail

    return (
        _whole(table.index),
        lambda rows: iter(table.status[rows]),
        lambda rows: (adapter_id or "" for adapter_id in table.adapter_id[rows]),
        lambda rows: iter(table.tenant_id[rows]),
        _whole(table.prompt_tokens),
        _whole(tokens),
        _whole(table.cached_tokens),
        *(_seconds(column) for column in (intended, sent, first, last, table.end_seconds)),
        *(_from(origin, to) for to in (first, last) for origin in (intended, sent)),
        lambda rows: _per_token_ms(last[rows] - first[rows], tokens[rows] - 1),
        lambda rows: _per_token_ms(last[rows] - sent[rows], tokens[rows]),
        *map(_seconds, (table.queue_seconds, table.adapter_load_seconds, table.prefill_seconds, table.decode_seconds)),
        _whole(table.num_messages),
        _whole(table.num_requeues),
        lambda rows: iter(table.worker_id[rows]),
        lambda rows: iter(table.finish_reason[rows]),
        lambda rows: ("" if crc is None else f"{crc:08x}" for crc in table.token_ids_crc32[rows]),
        lambda rows: (detail.get(row, "") for row in range(rows.start, rows.stop)),
    )


def _whole(column: npt.NDArray[np.int64]) -> Cells:
    return lambda rows: iter(column[rows].tolist())


def _seconds(column: npt.NDArray[np.float64]) -> Cells:
    return lambda rows: _numbers(column[rows], 6)


def _from(origin: npt.NDArray[np.float64], to: npt.NDArray[np.float64]) -> Cells:
    return lambda rows: _numbers((to[rows] - origin[rows]) * 1e3, 3)


def _numbers(values: npt.NDArray[np.float64], digits: int) -> Iterator[str]:
    return ("" if math.isnan(value) else f"{value:.{digits}f}" for value in values.tolist())


def _per_token_ms(seconds: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> Iterator[str]:
    return _numbers(np.divide(seconds, tokens, out=np.full(len(seconds), np.nan), where=tokens > 0) * 1e3, 3)
