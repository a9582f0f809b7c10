"""What stays of a run: a JSON summary and a CSV with one line per request.

Both carry units in their names. The summary carries `format_version`, the formulas, the run's options and the trace's
attribution, so that it can be read without this program. Times are device seconds unless a name says wall.
"""

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from chassis.errors import FormatError, LorreryError, SettingsError
from chassis.version import VERSION
from loadgen.options import LoadOptions
from loadgen.own_load import OwnLoad
from loadgen.source import BuiltWorkload
from loadgen.wire import ClusterView
from loadgen.workload.outcome import OK, RequestOutcome
from loadgen.workload.slora_summary import SloraSummary, slora_summary
from loadgen.workload.summary import FORMULAS, Summary, summarise

__all__ = ["CSV_COLUMNS", "FORMAT_VERSION", "LoadReport", "check_folder", "make_report", "read_report", "write_report"]

FORMAT_VERSION = 1
"""Of the JSON summary. Another number: another meaning of some field."""
KIND = "lorrery load report"
SUMMARY_FILE = "summary.json"
REQUESTS_FILE = "requests.csv"

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
    "num_messages",
    "num_requeues",
    "worker_id",
    "finish_reason",
    "token_ids_crc32",
    "detail",
)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A finished run.

    Attributes:
        started_at: UTC.
        wall_seconds: from the first send to the last end, wall time.
        num_skipped: requests left out because the cluster's limits would refuse them.
        num_warmup_failed: warm-up requests that failed; they are in no figure.
    """

    options: LoadOptions
    workload: BuiltWorkload
    cluster: ClusterView
    outcomes: Sequence[RequestOutcome]
    summary: Summary
    slora: SloraSummary
    own_load: OwnLoad
    started_at: datetime
    wall_seconds: float
    interrupted: bool
    num_skipped: int
    num_warmup_failed: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the figures must know."""
        found = list(self.own_load.warnings)
        if self.interrupted:
            found.append(f"interrupted: {self.summary.num_interrupted} open requests were cut off")
        if self.num_skipped:
            found.append(f"{self.num_skipped} requests are longer than the cluster's limits and were left out")
        if self.num_warmup_failed:
            found.append(f"{self.num_warmup_failed} warm-up requests failed")
        return tuple(found)


def make_report(
    options: LoadOptions,
    workload: BuiltWorkload,
    cluster: ClusterView,
    outcomes: Sequence[RequestOutcome],
    own_load: OwnLoad,
    *,
    started_at: datetime,
    interrupted: bool,
    num_skipped: int,
    num_warmup_failed: int,
) -> LoadReport:
    """Compute the figures of a run."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    summary = summarise(ordered)
    return LoadReport(
        options=options,
        workload=workload,
        cluster=cluster,
        outcomes=ordered,
        summary=summary,
        slora=_slora_figures(ordered, summary.duration_seconds),
        own_load=own_load,
        started_at=started_at,
        wall_seconds=summary.duration_seconds * cluster.time_scale,
        interrupted=interrupted,
        num_skipped=num_skipped,
        num_warmup_failed=num_warmup_failed,
    )


def check_folder(folder: Path) -> None:
    """Find out before a run whether a report can be written after it; makes nothing.

    Raises:
        SettingsError: the folder is a file, or can be neither made nor written to.
    """
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise SettingsError(f"--out {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingsError(f"--out {folder}: {nearest} cannot be written to")


def write_report(report: LoadReport, folder: Path) -> tuple[Path, Path]:
    """Write `summary.json` and `requests.csv` into a folder, which is made; give their paths.

    Raises:
        LorreryError: they cannot be written.
    """
    summary, requests = folder / SUMMARY_FILE, folder / REQUESTS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(requests, "".join(_csv(report.outcomes)))
        _replace(summary, json.dumps(to_json(report), indent=2) + "\n")
    except OSError as error:
        raise LorreryError(f"report: {error.filename}: {error.strerror}") from None
    return summary, requests


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
    except ValueError:
        raise FormatError(f"{path}: not a JSON file") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise FormatError(f"{path}: not a report of `lorrery load`")
    if content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version")
        raise FormatError(f"{path}: format_version {found!r} is not known; this version reads {FORMAT_VERSION}")
    return content


def to_json(report: LoadReport) -> dict[str, Any]:
    """Give the summary as it is written."""
    options = asdict(report.options)
    options["trace"] = str(report.options.trace) if report.options.trace else None
    return {
        "kind": KIND,
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
        "load_generator": {"wall_seconds_of_run": report.wall_seconds, **asdict(report.own_load)},
    }


def _slora_figures(outcomes: Sequence[RequestOutcome], duration_seconds: float) -> SloraSummary:
    # S-LoRA's clock starts at the real send, and its rate is the offered one.
    rows = [
        (
            outcome.prompt_tokens,
            outcome.output_tokens,
            outcome.end_seconds - outcome.sent_seconds,
            _since(outcome.first_token_seconds, outcome.sent_seconds) if outcome.status == OK else None,
        )
        for outcome in outcomes
    ]
    span = max((outcome.intended_seconds for outcome in outcomes), default=0.0)
    return slora_summary(rows, duration_seconds, req_rate=len(outcomes) / span if span > 0 else 0.0)


def _csv(outcomes: Iterable[RequestOutcome]) -> Iterable[str]:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(_csv_row(outcome) for outcome in outcomes)
    yield text.getvalue()


def _csv_row(outcome: RequestOutcome) -> tuple[str | int, ...]:
    first, last, output_tokens = outcome.first_token_seconds, outcome.last_token_seconds, outcome.output_tokens
    e2e = _since(last, outcome.sent_seconds)
    span = _since(last, first) if first is not None else None
    row = (
        outcome.index,
        outcome.status,
        outcome.adapter_id or "",
        outcome.tenant_id,
        outcome.prompt_tokens,
        output_tokens,
        outcome.cached_tokens,
        _number(outcome.intended_seconds, 6),
        _number(outcome.sent_seconds, 6),
        _number(first, 6),
        _number(last, 6),
        _number(outcome.end_seconds, 6),
        _number(_since(first, outcome.intended_seconds), 3, 1e3),
        _number(_since(first, outcome.sent_seconds), 3, 1e3),
        _number(_since(last, outcome.intended_seconds), 3, 1e3),
        _number(e2e, 3, 1e3),
        _number(span / (output_tokens - 1) if span is not None and output_tokens > 1 else None, 3, 1e3),
        _number(e2e / output_tokens if e2e is not None else None, 3, 1e3),
        _number(outcome.queue_seconds, 6),
        len(outcome.message_tokens),
        outcome.num_requeues,
        outcome.worker_id,
        outcome.finish_reason,
        "" if outcome.token_ids_crc32 is None else f"{outcome.token_ids_crc32:08x}",
        outcome.detail,
    )
    assert len(row) == len(CSV_COLUMNS)
    return row


def _since(at: float | None, origin: float) -> float | None:
    return None if at is None else at - origin


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"


def _replace(path: Path, content: str) -> None:
    # A reader sees the old file or the new one, never half of it.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(content, encoding="utf-8", newline="")
    partial.replace(path)
