"""What stays of a run: a JSON summary and a CSV with one line per request.

Both carry units in their names. The summary carries `format_version`, the formulas, the run's options and the trace's
attribution, so that it can be read without this program. Times are device seconds unless a name says wall.
"""

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lorrery.chassis.errors import FormatError, LorreryError, SettingsError
from lorrery.chassis.version import VERSION
from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.scaling_report import scaling_csv
from lorrery.loadgen.workload.outcome_table import OutcomeTable
from lorrery.loadgen.workload.summary import FORMULAS
from lorrery.vocabulary.run_files import (
    FORMAT_VERSION,
    KINDS,
    LIVE_KIND,
    REQUESTS_FILE,
    SCALING_FILE,
    SIMULATED_KIND,
    SUMMARY_FILE,
)

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


def check_folder(folder: Path) -> None:
    """Find out before a run whether a report can be written after it; makes nothing.

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
    """Write `summary.json` and `requests.csv` into a folder, which is made; give their paths.

    Where workers came and went, `scaling.csv` is the third.

    Raises:
        LorreryError: they cannot be written.
    """
    paths = [folder / SUMMARY_FILE, folder / REQUESTS_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(paths[1], _csv(report.outcomes))
        if report.scaling is not None:
            paths.append(folder / SCALING_FILE)
            _replace(paths[-1], scaling_csv(report.scaling))
        _replace(paths[0], json.dumps(to_json(report), indent=2) + "\n")
    except OSError as error:
        raise LorreryError(f"report: {error.filename}: {error.strerror}") from None
    return tuple(paths)


def read_report(path: Path) -> dict[str, Any]:
    """Read a JSON summary.

    Args:
        path: the file, or the folder that `write_report` wrote.

    Raises:
        FormatError: not such a file, or a format version that is not known.
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
    """Give the summary as it is written."""
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


def _how_it_ran(report: LoadReport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if report.own_load is not None:
        found["load_generator"] = {"wall_seconds_of_run": report.wall_seconds, **asdict(report.own_load)}
    if report.simulation is not None:
        found["simulation"] = asdict(report.simulation)
    if report.scaling is not None:
        found["scaling"] = asdict(report.scaling.summary)
    if report.settings is not None:
        found["settings"] = dict(report.settings)
    return found


def _csv(table: OutcomeTable) -> str:
    intended, sent, first, last = (
        table.intended_seconds,
        table.sent_seconds,
        table.first_token_seconds,
        table.last_token_seconds,
    )
    tokens = table.output_tokens
    tpot = np.divide(last - first, tokens - 1, out=np.full(len(table), np.nan), where=tokens > 1)
    per_token = np.divide(last - sent, tokens, out=np.full(len(table), np.nan), where=tokens > 0)
    columns = (
        table.index.tolist(),
        table.status,
        (adapter_id or "" for adapter_id in table.adapter_id),
        table.tenant_id,
        table.prompt_tokens.tolist(),
        tokens.tolist(),
        table.cached_tokens.tolist(),
        *(_numbers(seconds, 6) for seconds in (intended, sent, first, last, table.end_seconds)),
        *(_numbers(seconds * 1e3, 3) for seconds in (first - intended, first - sent, last - intended, last - sent)),
        *(_numbers(seconds * 1e3, 3) for seconds in (tpot, per_token)),
        *(
            _numbers(seconds, 6)
            for seconds in (
                table.queue_seconds,
                table.adapter_load_seconds,
                table.prefill_seconds,
                table.decode_seconds,
            )
        ),
        table.num_messages.tolist(),
        table.num_requeues.tolist(),
        table.worker_id,
        table.finish_reason,
        ("" if crc is None else f"{crc:08x}" for crc in table.token_ids_crc32),
        (table.detail.get(row, "") for row in range(len(table))),
    )
    assert len(columns) == len(CSV_COLUMNS)
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _numbers(values: npt.NDArray[np.float64], digits: int) -> Iterator[str]:
    return ("" if math.isnan(value) else f"{value:.{digits}f}" for value in values.tolist())


def _replace(path: Path, content: str) -> None:
    # A reader sees the old file or the new one, never half of it.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(content, encoding="utf-8", newline="")
    partial.replace(path)
