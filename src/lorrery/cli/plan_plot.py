"""The plot of `lorrery plan`: latency against throughput, one line per deployment, one mark per concurrency.

matplotlib is optional: the terminal shows the same figures without it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.plan import Plan
from lorrery.view import plots
from lorrery.worker.device.capacity import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LABELS = 4
"""Most deployments in one plot for which every mark is labelled."""


def draw(path: Path, plans: Sequence[Plan], options: PlanOptions) -> None:
    """Write the plot in the format given by the file name's extension.

    With several deployments, throughput is per GPU, to compare replicas of different sizes, and both axes are
    logarithmic, to compare small and large models.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    with plots.drawing("--plot"):
        figure, (axes,) = plots.canvas(1, 1, 4.8 + 0.1 * len(plans))
        for index, plan in enumerate(plans):
            _draw_line(axes, plan, index, num_plans=len(plans))
        _draw_axes(axes, per_gpu=len(plans) > 1)
        if options.tpot is not None:
            tpot_ms = options.tpot * 1e3
            label = f"service level: {tpot_ms:g} ms"
            axes.axhline(tpot_ms, color=plots.GREY, linewidth=1.2, linestyle="--", label=label)
        plots.legend_above(figure, axes, columns=2)
        plots.save(figure, path, _caption(plans, options.work))


def _draw_line(axes: "Axes", plan: Plan, index: int, num_plans: int) -> None:
    gpus = plan.num_gpus if num_plans > 1 else 1
    x = [point.total_tokens / gpus for point in plan.points]
    y = [point.tpot * 1e3 for point in plan.points]
    look = plots.series(index)
    axes.plot(x, y, color=look.colour, marker=look.marker, label=plan.name)
    if num_plans > _MOST_LABELS:
        places = [(len(x) - 1, (0, 6), "center", "bottom")]
    elif index % 2 == 0:  # the lines rise to the right: labels left above one line, right below the next
        places = [(number, (-4, 5), "right", "bottom") for number in range(len(x))]
    else:
        places = [(number, (5, -5), "left", "top") for number in range(len(x))]
    for number, offset, across, along in places:
        axes.annotate(
            str(plan.points[number].concurrency), (x[number], y[number]), textcoords="offset points", xytext=offset,
            ha=across, va=along, fontsize=8, color=look.colour,
        )  # fmt: skip


def _draw_axes(axes: "Axes", *, per_gpu: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_title("TPOT over throughput; the numbers are concurrent streams")
    axes.set_xlabel(f"throughput of all streams (tokens/s{' per GPU' if per_gpu else ''})")
    axes.set_ylabel("TPOT, prefill stalls included (ms)")
    axes.margins(0.08)
    if per_gpu:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _caption(plans: Sequence[Plan], work: Workload) -> str:
    """Return the names of the deployments, the load, and how the figures were computed."""
    names = "; ".join(plan.name for plan in plans) if len(plans) <= _MOST_LABELS else f"{len(plans)} deployments"
    adapters = f", each stream with one of {work.num_adapters} resident adapters" if work.num_adapters else ""
    return (
        f"{names}. Every stream: {work.prompt_tokens:,} tokens in,"
        f" {work.output_tokens:,} out{adapters}. Closed loop; step times by the model of docs/step-time.md."
    )
