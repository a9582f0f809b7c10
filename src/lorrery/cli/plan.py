"""`lorrery plan`: what a deployment can serve, and the cheapest cluster for a rate, before anything runs.

Values not given on the command line are read from the settings, so that the plan is of the cluster to be deployed.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lorrery.cli import plan_text
from lorrery.cli.flags import ConfigOption, VersionOption, takes_deployment, with_deployment
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import read_toml
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import check_writable, write_output
from lorrery.service.options import given_to
from lorrery.service.settings.cluster import Settings, load
from lorrery.service.settings.reading import key_of, leaves, override_of
from lorrery.simulator.arguments import read_table
from lorrery.simulator.plan.limits import all_alike, by_name, each_alike
from lorrery.simulator.plan.options import Axis, PlanOptions
from lorrery.simulator.plan.plan import Plan, Search, make_plan, registry_override, search_for
from lorrery.simulator.plan.search import Proof, Rejected
from lorrery.simulator.sweep.backends import num_cores
from lorrery.view import plots
from lorrery.view.terminal import table_console
from lorrery.worker.device.capacity import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LABELS = 4
"""Most deployments in one plot for which every mark is labelled."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings as given on the command line.

    Attributes:
        config: settings file.
        overrides: `KEY=VALUE`; later ones win.
    """

    config: Path
    overrides: tuple[str, ...] = ()

    def but(self, **values: str | int | None) -> "Cluster":
        """Return a copy with settings changed; `__` in a name stands for a dot, None leaves a setting unchanged."""
        changes = (override_of(name.replace("__", "."), value) for name, value in values.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *changes))

    def alone(self) -> "Cluster":
        """Return a copy with one worker per process, so that the number of processes is the number of workers."""
        return self if self.settings().worker.gpus == 1 else self.but(worker__gpus=1)

    def unscaled(self) -> "Cluster":
        """Return a copy without an autoscaler; settings of its rule would be refused as without effect."""
        others = (override for override in self.overrides if not f"{key_of(override)}.".startswith("autoscaler."))
        found = replace(self, overrides=tuple(others))
        return found.but(autoscaler__enabled=False) if found.settings().is_autoscaled else found

    def changed(self, changes: Mapping[str, object]) -> "Cluster":
        """Return a copy with settings changed."""
        texts = (f"{key}={json.dumps(value)}" for key, value in changes.items())
        return replace(self, overrides=(*self.overrides, *texts))

    def settings(self) -> Settings:
        """Read the settings.

        Raises:
            SettingsError: as `service.settings.reading.load`.
        """
        return load(self.config, self.overrides)

    def arguments(self) -> list[str]:
        """Return the options that give these settings."""
        config = [] if self.config == DEFAULT_SETTINGS else ["--config", str(self.config)]
        return [*config, *(part for override in self.overrides for part in ("--set", override))]


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
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to this file.")
    ] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one setting; repeatable; takes precedence over the file."
        ),
    ] = None,
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
    if json_file is not None:
        check_writable("--json", json_file)
    options = read_table(PlanOptions(config, **given_to(PlanOptions, given)))
    cluster = Cluster(config, (*with_deployment(given, overrides), registry_override(options.work)))
    cluster = cluster.changed(options.limits)
    if (ranks := given["ranks"]) is not None and not options.adapters:
        raise SettingsError(f"--rank {ranks}: goes with --adapters only")
    for name, value in (("--requests", options.num_requests), ("--search", options.search or None)):
        if value is not None and options.rate is None:
            raise SettingsError(f"{name} goes with --rate only")
    console = table_console()
    interrupted, search = False, None
    if options.rate is None:
        plans = [make_plan(one.settings(), options) for one in _clusters(cluster, models, gpus, degrees)]
    else:
        found = _search(console, cluster, options, models, gpus, degrees)
        plans, search, interrupted = [] if found.plan is None else [found.plan], found.search, found.interrupted
    if search is not None:
        plan_text.show_search(console, search, options, interrupted=interrupted)
    elif len(plans) == 1:
        plan_text.show_one(console, plans[0], options)
    else:
        plan_text.show_many(console, plans, options)
    if json_file is not None:
        content = {"workload": asdict(options.work), "plans": [_to_json(p) for p in plans]}
        if search is not None:
            content["search"] = _search_json(search)
        write_output(json_file, json.dumps(content, indent=1) + "\n")
    drawn = [p for p in plans if p.points]
    if plot is not None and drawn:
        _draw(plot, drawn, options)
        typer.echo(f"plot: {plot}")
    if interrupted:
        raise typer.Exit(130)
    if not any(p.refused is None for p in plans):
        raise typer.Exit(1)


@dataclass(slots=True)
class _Found:
    search: Search
    plan: Plan | None = None
    interrupted: bool = False


def _search(
    console: Console,
    cluster: Cluster,
    options: PlanOptions,
    models: list[str] | None,
    gpus: list[str] | None,
    degrees: list[int] | None,
) -> _Found:
    """Search, showing the bound at once and on a terminal what is simulated; then plan what was found."""
    if len(models or ()) > 1:
        raise SettingsError(f"--rate searches for one model; {len(models or ())} are named with --model")
    named: list[Axis] = [
        (key, tuple(map(str, values)))
        for key, values in (("worker.gpu", gpus), ("worker.tensor_parallel", degrees))
        if values
    ]
    assert isinstance(options.search, tuple)
    if both := {key for key, _ in named} & {key for key, _ in options.search}:
        raise SettingsError(f"--search {both.pop()}: there is an option for it too; give one of them")
    options = replace(options, search=(*named, *options.search), jobs=options.jobs or num_cores())
    base = cluster.but(model=models[0] if models else None)
    given = [key_of(override) for override in base.overrides]
    if cluster.config != DEFAULT_SETTINGS:
        given += [".".join(key) for key, _ in leaves(read_toml(cluster.config))]
    first = base.settings()
    kinds = [all_alike(first)] if gpus and first.workers else each_alike(first)
    if len(kinds) > 1:
        raise SettingsError(f"[[workers]] has {len(kinds)} groups; name one with --set worker.group=0, or --gpu")
    base = base.changed(kinds[0])
    found = _Found(Search())
    progress = Console(stderr=True)
    with progress.status("planning") as status:
        if not sys.stderr.isatty():
            status.stop()

        def bounded(search: Search) -> None:
            plan_text.show_bound(console, search, options)

        def watch(what: str, met: bool) -> None:
            best = found.search.answer
            so_far = "" if best.shape is None else f"; best so far {best.num_replicas} x {best.shape.name}"
            status.update(f"{best.num_trials} runs; {what}: {'met' if met else 'missed'}{so_far}")

        try:
            search_for(
                base.settings(), options, found.search, given,
                watch=watch, bounded=bounded,
            )  # fmt: skip
        except KeyboardInterrupt:
            found.interrupted = True
        shape = found.search.answer.shape
        if shape is not None:
            chosen = replace(base, overrides=(*base.overrides, *shape.changes)).alone()
            found.search.command = command_of(chosen, options, found.search)
            found.plan = make_plan(shape.settings, options)
    return found


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


def _search_json(search: Search) -> dict[str, object]:
    answer = search.answer
    return {
        "replicas": answer.num_replicas or None,
        "gpus": answer.num_gpus or None,
        "usd_per_hour": answer.usd_per_hour,
        "changes": None if answer.shape is None else answer.shape.changes,
        "finished": answer.finished,
        "num_trials": answer.num_trials,
        "num_requests": search.num_requests,
        "span_seconds": search.span_seconds,
        "bound": None if search.least is None else [search.least.name, search.least.least],
        "proofs": [_proof_json(proof) for proof in answer.proofs],
        "rejected": [_rejected_json(one) for one in answer.rejected],
        "not_shapes": search.not_shapes,
        "command": search.command,
    }


def _proof_json(proof: Proof) -> dict[str, object]:
    names = ("num_replicas", "means", "margins", "met", "is_clear")
    seeds = [{"seed": trial.seed, **trial.figures} for trial in proof.trials]
    return {**{name: getattr(proof, name) for name in names}, "seeds": seeds}


def _rejected_json(one: Rejected) -> dict[str, object]:
    figures = None if one.trial is None else one.trial.figures
    return {"changes": one.shape.changes, "num_replicas": one.num_replicas, "figures": figures}


def command_of(cluster: Cluster, options: PlanOptions, search: Search) -> str:
    """Return the `lorrery simulate` command that repeats the first run of the answer."""
    work = options.work
    assert options.rate is not None
    arguments = [
        *cluster.unscaled().arguments(), "--rate", _number(options.rate), "--input-range", _span(work.prompt),
        "--output-range", _span(work.output), "-n", str(search.num_requests),
    ]  # fmt: skip
    if work.num_adapters:
        arguments += ["--num-adapters", str(work.num_adapters), "--adapter-exponent", _number(work.exponent)]
    arguments += ["--workers", str(search.answer.num_replicas)]
    return f"lorrery simulate {shlex.join(arguments)}"


def _span(lengths: tuple[int, int]) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low}:{high}"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


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
        f"{names}. Every request: {_span(work.prompt)} tokens in, {_span(work.output)} out{adapters}. Closed loop,"
        " simulated; step times by the model of docs/step-time.md."
    )
