"""`lorrery plan`: what a deployment can serve, and the cheapest cluster for a rate, before anything runs.

Values not given on the command line are read from the settings, so that the plan is of the cluster to be deployed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lorrery.cli import plan_text
from lorrery.cli.flags import ConfigOption, SetOption, VersionOption, takes_deployment, with_deployment
from lorrery.cli.plan_export import search_json
from lorrery.cli.plan_search import Cluster, Question, span
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import check_writable, write_output
from lorrery.service.options import given_to
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.arguments import read_table
from lorrery.simulator.plan.limits import all_alike, by_name, each_alike
from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.plan import Plan, make_plan
from lorrery.simulator.plan.trials import registry_override
from lorrery.view import plots
from lorrery.view.reports.plan import plan_page
from lorrery.view.terminal import table_console
from lorrery.worker.device.capacity import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LABELS = 4
"""Most deployments in one plot for which every mark is labelled."""


app = command_app()


@app.command(cls=Command)
@takes_deployment("engine", "weight_dtype", "kv_dtype", before="models")
@takes(command_options(PlanOptions), before="plot")
def plan(
    version: VersionOption = False,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="Base model; repeatable; default: from the settings.")
    ] = None,
    gpus: Annotated[
        list[str] | None, typer.Option("--gpu", help="GPU; repeatable; default: from the settings.")
    ] = None,
    degrees: Annotated[
        list[int] | None, typer.Option("--tp", "--tensor-parallel", min=1, help="GPUs per replica; repeatable.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Plot latency against throughput; .svg, .png or .pdf.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="With --rate: write the answer as an HTML page, with its flags and Helm values and what surrounds it.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to this file.")
    ] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: SetOption = None,
    **given: Any,  # noqa: ANN401  the table's options
) -> None:
    """Say what a deployment can serve, or which cluster serves a rate at the least cost, by simulation.

    For one deployment, prints TTFT, ITL, TPOT, E2E and tokens/s by concurrency; for several (any of --model, --gpu,
    --tp repeated) one line each: streams in a closed loop, as with `lorrery simulate -c`. Model, GPU, weight and KV
    types, engine, policy, batching, limits and the step-time model come from the settings
    (--set worker.weight_dtype=fp8); options take precedence.

    With --rate, searches over GPUs, tensor parallelism and, with adapters, slots and placement, and over what --search
    names, for the cluster that costs least within the level under Poisson arrivals. A bound comes at once; the answer
    is proven: N replicas keep the level and N - 1 do not, in the mean of several runs. Ctrl-C ends the search with the
    best so far.

    Exit code 1 if nothing fits or, with --rate, if no cluster keeps the service level; 130 after Ctrl-C.

    Examples:
      lorrery plan
      lorrery plan --model Llama-3-70B --gpu H100 --tp 4 --tp 8
      lorrery plan --engine vllm --model Llama-3.1-70B --gpu H200-SXM --tp 4 --prompt 8192 --output 1024
      lorrery plan --rate 20 --prompt 1000 --output 200 --slo ttft_p99=0.5
      lorrery plan --engine vllm --model Llama-3.1-70B --gpu H100 --gpu H200 --adapters 60 --rate 40 --prompt 1500:2000
    """
    del version
    if plot is not None:
        plots.check("--plot", plot)
    for name, file in (("--json", json_file), ("--page", page)):
        if file is not None:
            check_writable(name, file)
    options = read_table(PlanOptions(config, **given_to(PlanOptions, given)))
    cluster = Cluster(config, (*with_deployment(given, overrides), registry_override(options.work)))
    cluster = cluster.changed(options.limits)
    if (ranks := given["ranks"]) is not None and not options.adapters:
        raise SettingsError(f"--rank {ranks}: goes with --adapters only")
    for name, value in (
        ("--requests", options.num_requests),
        ("--search", options.search),
        ("--curve", options.curve),
        ("--drift", options.drift),
        ("--page", page),
    ):
        if value and options.rate is None:
            raise SettingsError(f"{name} goes with --rate only")
    if plot is not None and options.rate is not None:
        raise SettingsError("--plot draws one replica's figures, which --rate does not print; --page FILE has a plot")
    if page is not None and options.curve:
        raise SettingsError("--page is of one answer: leave out --curve")
    named = {"worker.gpu": gpus or (), "worker.tensor_parallel": degrees or ()}
    console = table_console()
    content: dict[str, object] = {"workload": asdict(options.work)}
    if options.rate is None:
        plans = [make_plan(one.settings(), options) for one in _clusters(cluster, models, gpus, degrees)]
        if len(plans) == 1:
            plan_text.show_one(console, plans[0], options)
        else:
            plan_text.show_many(console, plans, options)
        content["plans"] = [_to_json(p) for p in plans]
        drawn = [p for p in plans if p.points]
        if plot is not None and drawn:
            _draw(plot, drawn, options)
            typer.echo(f"plot: {plot}")
        code = 0 if any(p.refused is None for p in plans) else 1
    else:
        code = _for_rate(Question.of(cluster, options, models or (), named), console, content, page)
    if json_file is not None:
        write_output(json_file, json.dumps(content, indent=1) + "\n")
    raise typer.Exit(code)


def _for_rate(question: Question, console: Console, content: dict[str, object], page: Path | None) -> int:
    """Search, print, and write the page; add the figures to `content`, and return the exit code."""
    if question.options.curve:
        curve, interrupted = question.curve(console)
        content["curve"] = {value: search_json(one, question.options) for value, one in curve.items()}
        found = list(curve.values())
    else:
        search, interrupted = question.answer(console, surrounded=page is not None)
        told = content["search"] = search_json(search, question.options)
        found = [search]
        if page is not None:
            write_output(page, plan_page(told))
            typer.echo(f"page: {page}")
    if interrupted:
        return 130
    return 0 if any(one.answer.shape is not None for one in found) else 1


def _clusters(
    cluster: Cluster, models: list[str] | None, gpus: list[str] | None, degrees: list[int] | None
) -> Iterator[Cluster]:
    """Yield the clusters to plan, each once: one for each GPU named, or else for each GPU in the settings."""
    # Read with a model that is named, since other settings may not suit the one that it replaces.
    first = cluster.but(model=models[0] if models else None).settings()
    kinds = [all_alike(first)] if (gpus or degrees) and first.workers else each_alike(first)
    planned: list[Settings] = []
    for kind, model, gpu, degree in product(kinds, models or (None,), gpus or (None,), degrees or (None,)):
        found = cluster.changed(kind).but(model=model, worker__gpu=gpu, worker__tensor_parallel=degree).alone()
        settings = by_name(found.settings())
        if settings not in planned:
            planned.append(settings)
            yield found


def _to_json(one: Plan) -> dict[str, object]:
    capacity = one.capacity
    return {
        "deployment": one.name,
        "gpus_per_replica": one.num_gpus,
        "refused": one.refused,
        "basis": [asdict(ground) for ground in capacity.grounds] if capacity else None,
        "kv_pool_tokens": capacity.kv_pool_tokens if capacity else None,
        "fitting_streams": capacity.fitting_streams if capacity else None,
        "running_streams": capacity.running_streams if capacity else None,
        "notes": one.notes,
        "points": [asdict(point) for point in one.points],
        "peak": asdict(one.peak) if one.peak else None,
        "within_service_level": asdict(one.best) if one.best else None,
        "claim": asdict(one.claim) if one.claim else None,
    }


def _draw(path: Path, plans: Sequence[Plan], options: PlanOptions) -> None:
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
        if (tpot := options.level.limit("tpot")) is not None:
            tpot_ms = tpot * 1e3
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
    """Return the names of the deployments, the load, and how the figures were made."""
    names = "; ".join(plan.name for plan in plans) if len(plans) <= _MOST_LABELS else f"{len(plans)} deployments"
    adapters = f", one of {work.num_adapters} adapters" if work.num_adapters else ""
    return (
        f"{names}. Every request: {span(work.prompt)} tokens in, {span(work.output)} out{adapters}. Closed loop,"
        " simulated; step times by the model of docs/step-time.md."
    )
