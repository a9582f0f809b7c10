"""`lorrery validate kernels`: the kernels that make up steps, one by one, against measured ones.

Rows are grouped by some of their columns. All-reduces are grouped by kernel as well, since NCCL's, those in a CUDA
graph and those launched one by one differ by a factor of several. Rows without a prediction are counted by reason.

The figure has one panel per op: a mark per row, one colour and marker per GPU, and lines at equality and 20 % off.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.files.reading import DAMAGED, GZIP, damage, open_text
from lorrery.validation.figures import (
    MEASURED_KERNELS,
    MEASURED_LORA,
    MEASURED_SEGMENTED_LORA,
    Errors,
    NotPredicted,
    percent,
    reasons,
    reasons_json,
    sum_up,
)
from lorrery.view import plots
from lorrery.view.terminal import FigureTable
from lorrery.worker.device.calibration.kernel_prediction import KernelPredictions, Prediction
from lorrery.worker.device.calibration.kernel_rows import (
    COUNTS,
    KernelRow,
    KernelRowError,
    is_kernel_header,
    read_kernel_rows,
)
from lorrery.worker.device.catalogue.tables import Catalogue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPED_BY = ("gpu", "op", "dtype", "kv_dtype")
_COUNTS = frozenset(name for names in COUNTS.values() for name in names)


@dataclass(frozen=True, slots=True)
class KernelFile:
    """Rows, and the columns of their cells."""

    columns: Sequence[str]
    rows: Sequence[KernelRow]


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Rows that share the values of some columns.

    Attributes:
        key: column -> value.
        errors: of all rows.
        fitted: of rows whose shapes the constants were fitted on.
        judged: of the others.
        basis: of the constants.
    """

    key: Mapping[str, str]
    errors: Errors
    fitted: Errors
    judged: Errors
    basis: str


@dataclass(slots=True)
class KernelComparison:
    """Result for a file."""

    file: KernelFile
    predictions: Sequence[Prediction]
    groups: Sequence[KernelGroup] = ()
    not_predicted: Sequence[NotPredicted] = field(default_factory=list)


def read_file(path: Path) -> KernelFile:
    """Read a CSV file of kernels, gzip-compressed or not.

    Raises:
        FormatError: an unreadable file, or an invalid row; the message names file and line.
    """
    try:
        with open_text(path, "utf-8-sig") as file:
            columns, rows = read_kernel_rows(file)
            found = list(rows)
    except KernelRowError as error:
        raise FormatError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: no UTF-8 text ({error.reason}); a CSV file is needed, or one in gzip") from None
    except DAMAGED as error:
        raise FormatError(damage(path, error)) from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if not found:
        raise FormatError(f"{path}: a header and no rows")
    return KernelFile(columns, found)


def read_published() -> KernelFile:
    """Read the shipped kernels; the columns are those of all files."""
    files = [read_file(path) for path in (MEASURED_KERNELS, MEASURED_LORA, MEASURED_SEGMENTED_LORA)]
    columns = list(dict.fromkeys(name for file in files for name in file.columns))
    rows = []
    for file in files:
        for row in file.rows:
            cells = dict(zip(file.columns, row.cells, strict=True))
            rows.append(replace(row, cells=[cells.get(name, "") for name in columns]))
    return KernelFile(columns, rows)


def holds_kernels(path: Path) -> bool:
    """Return whether a file has the header of kernels, or is in gzip, which only kernel files may be."""
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 16)
    except OSError:
        return False
    return first.startswith(GZIP) or is_kernel_header(first.decode("utf-8", errors="replace"))


def compare(
    file: KernelFile, catalogue: Catalogue, group_by: Sequence[str] = GROUPED_BY, gpu: str = ""
) -> KernelComparison:
    """Compare the model's kernels with measured ones.

    Args:
        file: measured kernels.
        catalogue: with their GPUs.
        group_by: columns.
        gpu: for rows that name none.

    Raises:
        SettingsError: grouping by a column that the file does not have.
    """
    if unknown := [name for name in group_by if name not in file.columns and name not in GROUPED_BY]:
        raise SettingsError(f"--group {', '.join(unknown)}: no such column; there are {', '.join(file.columns)}")
    model = KernelPredictions(catalogue, gpu)
    predictions = [model.predict(row) for row in file.rows]
    left_out = reasons(
        (row.line, one.why if one.us is None else "") for row, one in zip(file.rows, predictions, strict=True)
    )
    return KernelComparison(file, predictions, _groups(file, predictions, group_by, gpu), left_out)


def render(comparison: KernelComparison) -> FigureTable:
    """Return the errors as a table."""
    keys = list(dict.fromkeys(name for group in comparison.groups for name in group.key))
    table = FigureTable(first_to_go=("median % fitted", "median % judged"))
    for name in keys:
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "MAPE %", "median %", "MAPE % fitted", "MAPE % judged"):
        table.add_column(name)
    table.add_column("basis", justify="left", wraps_at=8)
    for group in comparison.groups:
        table.add_row(
            *(group.key.get(name, "") for name in keys),
            f"{group.errors.num_rows:,}",
            percent(group.errors.mape),
            percent(group.errors.median, "+"),
            percent(group.fitted.mape),
            percent(group.judged.mape),
            group.basis,
        )
    return table


def to_json(comparison: KernelComparison) -> str:
    """Return `{"rows": [the row's columns + predicted_us], "groups": [...], "not_predicted": [...]}`."""
    columns = comparison.file.columns
    rows = [
        {**_values(columns, row.cells), "predicted_us": None if one.us is None else round(one.us, 4)}
        for row, one in zip(comparison.file.rows, comparison.predictions, strict=True)
    ]
    groups = [
        {
            "group": dict(group.key),
            "rows": group.errors.num_rows,
            "mape": group.errors.mape,
            "signed_median": group.errors.median,
            "fitted": _errors_json(group.fitted),
            "judged": _errors_json(group.judged),
            "basis": group.basis,
        }
        for group in comparison.groups
    ]
    left_out = reasons_json(comparison.not_predicted)
    return json.dumps({"rows": rows, "groups": groups, "not_predicted": left_out}, allow_nan=False) + "\n"


def _groups(
    file: KernelFile, predictions: Sequence[Prediction], group_by: Sequence[str], gpu: str
) -> list[KernelGroup]:
    usual = {"gpu": gpu}
    at = {name: index for index, name in enumerate(file.columns)}
    members: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, (row, one) in enumerate(zip(file.rows, predictions, strict=True)):
        if one.us is None:
            continue
        cells = row.cells
        key = [(name, (cells[at[name]].strip() if name in at else "") or usual.get(name, "")) for name in group_by]
        if row.op == "all_reduce" and "kernel" not in group_by:
            key.append(("kernel", row.kernel))
        members.setdefault(tuple(key), []).append(index)
    errors = np.array(
        [
            0.0 if one.us is None else (one.us / row.latency_us - 1) * 100
            for row, one in zip(file.rows, predictions, strict=True)
        ]
    )
    fitted = np.array([row.is_fitted for row in file.rows])
    groups: list[KernelGroup] = []
    for pairs, indices in sorted(members.items()):
        chosen, seen = errors[indices], fitted[indices]
        basis = " + ".join(dict.fromkeys(predictions[index].basis for index in indices))
        groups.append(KernelGroup(dict(pairs), sum_up(chosen), sum_up(chosen[seen]), sum_up(chosen[~seen]), basis))
    return groups


def _values(columns: Sequence[str], cells: Sequence[str]) -> dict[str, str | int | float | None]:
    """Return a row's cells for JSON: counts and the time as numbers, an empty cell as null."""
    values: dict[str, str | int | float | None] = {}
    for name, cell in zip(columns, cells, strict=True):
        if not cell:
            values[name] = None
        elif name == "latency_us":
            values[name] = float(cell)
        elif name in _COUNTS:
            values[name] = int(float(cell)) if _is_number(cell) else cell
        else:
            values[name] = cell
    return values


def _is_number(cell: str) -> bool:
    try:
        return isfinite(float(cell))
    except ValueError:
        return False


def _errors_json(errors: Errors) -> dict[str, float | int | None]:
    return {"rows": errors.num_rows, "mape": errors.mape, "signed_median": errors.median}


PLOT_OPTION = "--plot"
_COLUMNS = 3
_MOST_MARKS = 600
"""Per GPU in one panel; evenly chosen if there are more."""
_LAYERS = 20
"""Into which each GPU's marks are divided."""
_OFF = 1.2


def draw(path: Path, comparison: KernelComparison) -> None:
    """Write the figure in the format given by the file's name.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    panels = _points(comparison)
    rows = -(-len(panels) // _COLUMNS)
    columns = min(len(panels), _COLUMNS)
    gpus = sorted({gpu for by_gpu in panels.values() for gpu in by_gpu})
    with plots.drawing(PLOT_OPTION):
        figure, axes = plots.canvas(rows, columns, 0.9 + 2.7 * rows)
        for one, (title, by_gpu) in zip(axes, panels.items(), strict=False):
            _draw_panel(one, title, by_gpu, gpus)
        for spare in axes[len(panels) :]:
            spare.remove()
        for left in axes[: len(panels) : columns]:
            left.set_ylabel("predicted (us)")
        for low in axes[max(len(panels) - columns, 0) : len(panels)]:
            low.set_xlabel("measured (us)")
        for index, gpu in enumerate(gpus):
            look = plots.series(index)
            axes[0].plot([], [], linestyle="", marker=look.marker, color=look.colour, label=gpu)
        plots.legend_above(figure, axes[0], columns=len(gpus))
        plots.save(figure, path, _caption(comparison))


def _points(comparison: KernelComparison) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return (measured, predicted) by panel and GPU."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row, one in zip(comparison.file.rows, comparison.predictions, strict=True):
        if one.us is None:
            continue
        kind = row.kv_dtype if row.op.startswith("attention") else row.dtype
        title = f"{row.op} {row.kernel if row.op == 'all_reduce' else kind}".strip()
        gpu = row.gpu or "GPU"
        panels.setdefault(title, {}).setdefault(gpu, []).append((row.latency_us, one.us))
    return dict(sorted(panels.items()))


def _draw_panel(axes: "Axes", title: str, by_gpu: dict[str, list[tuple[float, float]]], gpus: list[str]) -> None:
    points = [pair for pairs in by_gpu.values() for pair in pairs]
    ends = np.array([min(map(min, points)) / 1.3, max(map(max, points)) * 1.3])
    axes.plot(ends, ends, color=plots.BLACK, linewidth=0.9)
    for factor in (_OFF, 1 / _OFF):
        axes.plot(ends, ends * factor, color=plots.GREY, linewidth=0.7, linestyle="--")
    marks = {gpu: np.array(pairs[:: -(-len(pairs) // _MOST_MARKS)]) for gpu, pairs in by_gpu.items()}
    for layer in range(_LAYERS):  # in turn, so that no GPU covers the others
        for index, gpu in enumerate(gpus):
            if gpu in marks:
                shown, look = marks[gpu][layer::_LAYERS], plots.series(index)
                axes.plot(
                    shown[:, 0], shown[:, 1], linestyle="", marker=look.marker, markersize=2.4, markeredgewidth=0,
                    alpha=0.6, color=look.colour,
                )  # fmt: skip
    errors = np.array([predicted / measured - 1 for measured, predicted in points])
    axes.set_title(f"{title}\nMAPE {np.mean(np.abs(errors)):.0%} of {len(points):,}", fontsize=8.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)


def _caption(comparison: KernelComparison) -> str:
    """Describe the marks, and what is missing."""
    missing = sum(one.num_rows for one in comparison.not_predicted)
    left_out = f" {missing:,} rows that the model says nothing of are left out." if missing else ""
    return (
        "Each mark is one kernel on one GPU, predicted by the functions that steps are summed up from. Solid: equal;"
        f" dashed: 20 % off.{left_out}"
    )
