"""`lorrery validate serving`: whole runs of served models against measured ones.

Rows are grouped by some of their columns. Rows that do not count (a quality other than ok) are shown separately and are
not in the overall figure; rows that cannot be simulated are counted by reason. Predictions do not depend on the number
of processes.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from os import sched_getaffinity
from typing import TypeVar

from lorrery.service.errors import SettingsError
from lorrery.validation.figures import Errors, NotPredicted, percent, reasons, reasons_json, sum_up
from lorrery.validation.serving_rows import OK, ServingFile, ServingRow, as_json
from lorrery.validation.serving_run import AS_IT_IS, Options, Prediction, predict
from lorrery.view.terminal import FigureTable
from lorrery.worker.device.basis import no_measurement
from lorrery.worker.device.catalogue.tables import Catalogue

Watch = Callable[[Iterable[Prediction], int], Iterable[Prediction]]
Row = TypeVar("Row")
Found = TypeVar("Found")
GROUPED_BY = ("model", "gpu", "backend", "weight_dtype")
_FEW_ROWS = 6
"""Up to this many rows are simulated in this process: another takes a second to start."""


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """Rows that share the values of some columns.

    Attributes:
        key: column -> value.
        quality: of its rows.
        tpot: of all rows.
        ttft: of rows whose TTFT counts.
    """

    key: Mapping[str, str]
    quality: str
    num_rows: int
    tpot: Errors
    ttft: Errors


@dataclass(frozen=True, slots=True)
class ServingComparison:
    """Result for a file.

    Attributes:
        groups: those of quality ok first.
        overall: of the rows of quality ok; None without any.
    """

    file: ServingFile
    predictions: Sequence[Prediction]
    groups: Sequence[ServingGroup]
    overall: ServingGroup | None
    not_predicted: Sequence[NotPredicted]


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(sched_getaffinity(0))


def every(file: ServingFile, number: int, group_by: Sequence[str] = GROUPED_BY) -> ServingFile:
    """Return a file with every `number`-th row of each group, always including the first."""
    check_group(file, group_by)
    seen: Counter[tuple[str, ...]] = Counter()
    kept: list[ServingRow] = []
    for row in file.rows:
        key = (row.quality, *(row.cells[name].strip() for name in group_by))
        if seen[key] % number == 0:
            kept.append(row)
        seen[key] += 1
    return ServingFile(file.columns, kept)


def check_group(file: ServingFile, group_by: Sequence[str]) -> None:
    """Check that a file has the columns to group by.

    Raises:
        SettingsError: names the unknown columns, and the existing ones.
    """
    if unknown := [name for name in group_by if name not in file.columns]:
        raise SettingsError(f"--group {', '.join(unknown)}: no such column; there are {', '.join(file.columns)}")


def compare(
    file: ServingFile,
    group_by: Sequence[str] = GROUPED_BY,
    options: Options = AS_IT_IS,
    *,
    jobs: int = 1,
    watch: Watch = lambda found, total: found,
) -> ServingComparison:
    """Compare the simulator with measured runs.

    Args:
        file: measured runs.
        group_by: columns.
        options: of every simulation.
        jobs: processes.
        watch: takes the predictions as they arrive, and their number, and passes them on; to show progress.

    Raises:
        SettingsError: grouping by a column that the file does not have.
    """
    check_group(file, group_by)
    rows = file.rows
    found = predict_all([(row, options) for row in rows], jobs=jobs, watch=watch)
    predicted = [index for index, one in enumerate(found) if not one.why]
    groups = [members.errors(found) for members in grouped(file, predicted, group_by)]
    overall = next((one.errors(found) for one in grouped(file, predicted, ()) if one.quality == OK), None)
    left_out = reasons((row.line, one.why) for row, one in zip(rows, found, strict=True))
    return ServingComparison(file, found, groups, overall, left_out)


def predict_all(
    runs: Sequence[tuple[ServingRow, Options]], *, jobs: int, watch: Watch = lambda found, total: found
) -> list[Prediction]:
    """Simulate rows, each under its own options; return the predictions in the rows' order.

    Args:
        runs: rows and options.
        jobs: processes.
        watch: as for `compare`.
    """
    return in_processes(predict, runs, [_effort(row) for row, _ in runs], jobs=jobs, watch=watch)


def in_processes(
    predict_row: Callable[[Row, Options], Found],
    runs: Sequence[tuple[Row, Options]],
    efforts: Sequence[int],
    *,
    jobs: int,
    watch: Callable[[Iterable[Found], int], Iterable[Found]] = lambda found, total: found,
) -> list[Found]:
    """Return what a function of a module says of rows, in their order; the costliest are asked first.

    Args:
        predict_row: the function.
        runs: rows and options.
        efforts: of the rows, numbers that grow with their cost.
        jobs: processes.
        watch: as for `compare`.
    """
    # The longest first, so that no process is left alone at the end.
    order = sorted(range(len(runs)), key=lambda index: (-efforts[index], index))
    found: dict[int, Found] = {}
    with _mapped(predict_row, [runs[index] for index in order], jobs) as predicted:
        found.update(zip(order, watch(predicted, len(runs)), strict=True))
    return [found[index] for index in range(len(runs))]


@contextmanager
def _mapped(
    predict_row: Callable[[Row, Options], Found], runs: Sequence[tuple[Row, Options]], jobs: int
) -> Iterator[Iterator[Found]]:
    rows, options = [row for row, _ in runs], [one for _, one in runs]
    if jobs == 1 or len(runs) <= _FEW_ROWS:
        yield map(predict_row, rows, options)
        return
    with ProcessPoolExecutor(min(jobs, len(runs)), get_context("spawn")) as pool:
        try:
            yield pool.map(predict_row, rows, options)
        finally:
            pool.shutdown(cancel_futures=True)


def _effort(row: ServingRow) -> int:
    """Return a number that grows with a simulation's cost: about two decisions per request, over running requests."""
    return row.concurrency * row.concurrency


def render(comparison: ServingComparison, catalogue: Catalogue) -> FigureTable:
    """Return the errors as a table; the last line is overall."""
    keys = list(dict.fromkeys(name for group in comparison.groups for name in group.key))
    table = FigureTable(first_to_go=("median % TTFT", "median % TPOT"))
    for name in keys:
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "TPOT MAPE %", "median % TPOT", "TTFT rows", "TTFT MAPE %", "median % TTFT"):
        table.add_column(name)
    table.add_column("basis", justify="left", wraps_at=8)
    table.add_column("", justify="left", wraps_at=8)
    for group in comparison.groups:
        cells = [group.key.get(name, "") for name in keys]
        table.add_row(*cells, *_figures(group), _basis(group, catalogue), "" if group.quality == OK else group.quality)
    if comparison.overall is not None:
        cells = ["all"] + [""] * (len(keys) - 1) if keys else []
        table.add_row(*cells, *_figures(comparison.overall), "", "")
    return table


def _figures(group: ServingGroup) -> list[str]:
    tpot, ttft = group.tpot, group.ttft
    return [
        f"{group.num_rows:,}", percent(tpot.mape), percent(tpot.median, "+"), f"{ttft.num_rows:,}",
        percent(ttft.mape), percent(ttft.median, "+"),
    ]  # fmt: skip


def _basis(group: ServingGroup, catalogue: Catalogue) -> str:
    """Return the basis of a group's kernels; empty if its rows do not share a GPU."""
    name = group.key.get("gpu")
    if not name:
        return ""
    gpu = catalogue.gpu(name)
    return gpu.modern_fit.basis if no_measurement(gpu) is None else "no measurement"


def to_json(comparison: ServingComparison, more: Mapping[str, object] | None = None) -> str:
    """Return `{"rows": [the row's columns + predicted_tpot_ms, predicted_ttft_ms], "groups": [...], ...}`.

    Args:
        comparison: result for the file.
        more: further parts.
    """
    file = comparison.file
    rows = [
        {
            **as_json(file.columns, row.cells),
            "predicted_tpot_ms": _rounded(one.tpot_ms),
            "predicted_ttft_ms": _rounded(one.ttft_ms),
        }
        for row, one in zip(file.rows, comparison.predictions, strict=True)
    ]
    content = {
        "rows": rows,
        "groups": [_group_json(group) for group in comparison.groups],
        "overall": None if comparison.overall is None else _group_json(comparison.overall),
        "not_predicted": reasons_json(comparison.not_predicted),
        **(more or {}),
    }
    return json.dumps(content, allow_nan=False, indent=1) + "\n"


def _group_json(group: ServingGroup) -> dict[str, object]:
    return {
        "group": dict(group.key),
        "quality": group.quality,
        "rows": group.num_rows,
        "tpot_mape": group.tpot.mape,
        "tpot_signed_median": group.tpot.median,
        "ttft_rows": group.ttft.num_rows,
        "ttft_mape": group.ttft.mape,
        "ttft_signed_median": group.ttft.median,
    }


@dataclass(frozen=True, slots=True)
class Members:
    """The rows of a group, by their index in the file."""

    file: ServingFile
    key: Mapping[str, str]
    quality: str
    indices: Sequence[int]

    def errors(self, found: Mapping[int, Prediction] | Sequence[Prediction]) -> ServingGroup:
        """Return the group's errors under these predictions."""
        rows = self.file.rows
        with_ttft = [index for index in self.indices if rows[index].ttft_counts]
        tpot = [_error(found[index].tpot_ms, rows[index].measured["tpot_ms"]) for index in self.indices]
        ttft = [_error(found[index].ttft_ms, rows[index].measured["ttft_ms"]) for index in with_ttft]
        return ServingGroup(self.key, self.quality, len(self.indices), sum_up(tpot), sum_up(ttft))


def grouped(file: ServingFile, indices: Iterable[int], group_by: Sequence[str]) -> list[Members]:
    """Return groups of rows that share columns and quality, those of quality ok first."""
    members: dict[tuple[bool, tuple[str, ...], str], list[int]] = {}
    for index in indices:
        row = file.rows[index]
        values = tuple(row.cells[name].strip() for name in group_by)
        members.setdefault((not row.counts, values, row.quality), []).append(index)
    return [
        Members(file, dict(zip(group_by, values, strict=True)), quality, found)
        for (_, values, quality), found in sorted(members.items())
    ]


def _error(predicted: float | None, measured: float) -> float:
    assert predicted is not None
    return (predicted / measured - 1) * 100


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
