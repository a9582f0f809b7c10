"""The figure of `lorrery validate kernels`: predicted against measured times, one panel per op.

Each panel has a mark per row, one colour and marker per GPU, and lines at equality and 20 % off.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lorrery.validation.kernels import KernelComparison
from lorrery.view import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTION = "--plot"
_COLUMNS = 3
_MOST_MARKS = 600
"""Per GPU in one panel; evenly chosen if there are more."""
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
    with plots.drawing(OPTION):
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
    for index, gpu in enumerate(gpus):
        if gpu in by_gpu:
            pairs = by_gpu[gpu]
            shown = np.array(pairs[:: -(-len(pairs) // _MOST_MARKS)])
            look = plots.series(index)
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
