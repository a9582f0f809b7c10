"""The plot of `lorrery plan`: latency against throughput, one line per deployment, one mark per concurrency.

matplotlib is an extra: the terminal shows the same figures without it.
"""

from collections.abc import Sequence
from pathlib import Path

from lorrery.chassis.errors import LorreryError, SettingsError
from lorrery.simulator.plan import Level, Plan
from lorrery.worker.device.capacity import Workload

SUFFIXES = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":", "-.")
_MOST_LABELS = 4
"""Deployments in one plot up to which every mark is labelled."""


def draw(path: Path, plans: Sequence[Plan], work: Workload, level: Level) -> None:
    """Write the plot in the format that the file's name says.

    With several deployments throughput is per GPU, so that replicas of different sizes compare, and both axes are
    logarithmic, so that a small and a large model do.

    Raises:
        SettingsError: a name with another ending.
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, StrMethodFormatter
    except ImportError:
        raise LorreryError("--plot needs matplotlib: make setup, or pip install 'lorrery[plot]'") from None
    per_gpu = len(plans) > 1
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, plan in enumerate(plans):
        gpus = plan.num_gpus if per_gpu else 1
        x = [point.total_tokens / gpus for point in plan.points]
        y = [point.tpot * 1e3 for point in plan.points]
        colour, line = _COLOURS[index % len(_COLOURS)], _LINES[index // len(_COLOURS) % len(_LINES)]
        axes.plot(x, y, line, color=colour, marker="o", markersize=4, linewidth=1.5, label=plan.name)
        labelled = plan.points if len(plans) <= _MOST_LABELS else plan.points[-1:]
        for point in labelled:
            at = point.total_tokens / gpus, point.tpot * 1e3
            axes.annotate(
                str(point.concurrency), at, textcoords="offset points", xytext=(-4, 5), ha="right", fontsize=8,
                color=colour,
            )  # fmt: skip
    if level.tpot is not None:
        axes.axhline(level.tpot * 1e3, color="grey", linewidth=1, linestyle="--")
        axes.annotate(
            f"service level: {level.tpot * 1e3:g} ms", (0.995, level.tpot * 1e3),
            xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
            ha="right", fontsize=8, color="grey",
        )  # fmt: skip
    axes.set_xlabel("tokens/s per GPU, all streams together" if per_gpu else "tokens/s, all streams together")
    axes.set_ylabel("TPOT in ms, prefill stalls included")
    axes.set_title(
        f"{work.prompt_tokens} tokens in, {work.output_tokens} out; numbers are streams at once", fontsize=10
    )
    if per_gpu:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
