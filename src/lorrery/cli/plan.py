"""`lorrery plan`: predicts what a deployment can serve and how many GPUs a rate needs, before anything runs.

The capacity of one replica is arithmetic on step times (formulas in `worker.device.capacity`), for streams in a closed
loop, without bursts. The number of replicas that a rate needs comes from the simulator. Values not given on the
command line are read from the settings, so that the plan is of the cluster to be deployed.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import check_writable, write_output
from lorrery.service.options import given_to
from lorrery.service.settings.cluster import Settings, load
from lorrery.service.settings.reading import key_of, override_of
from lorrery.simulator.plan.limits import all_alike, by_name, each_alike
from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.plan import Plan, Sizing, make_plan, registry_override
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
    """Estimate what a deployment can serve: what fits, how fast, what limits it, how many GPUs a rate needs.

    For one deployment, prints TTFT, ITL, TPOT, E2E and tokens/s by concurrency; for several (any of --model, --gpu,
    --tp repeated) one line each. These figures are computed, not simulated, for streams in a closed loop as with
    `lorrery simulate -c`: no bursts. Model, GPU, weight and KV types, engine, policy, batching, limits and the
    step-time model come from the settings (--set worker.weight_dtype=fp8); options take precedence.

    With --rate, runs `lorrery simulate` under Poisson arrivals, including queueing, to find the fewest replicas that
    meet the service level at p99 without a failed request. Prints the figures of each run, and the command that repeats
    the decisive one.

    With more adapters than adapters.max_loras allows on the GPU, only as many streams are shown as always find their
    adapter there.

    Exit code 1 if nothing fits or, with --rate, if no number of replicas was found that meets the service level.

    Examples:
      lorrery plan
      lorrery plan --model Llama-3-70B --gpu H100 --tp 4 --tp 8
      lorrery plan --engine vllm --model Llama-3.1-70B --gpu H200-SXM --tp 4 --prompt 8192 --output 1024
      lorrery plan --rate 20 --prompt 1000 --output 200 --ttft 0.5
    """
    del version
    if plot is not None:
        plots.check("--plot", plot)
    if json_file is not None:
        check_writable("--json", json_file)
    options = PlanOptions(config, **given_to(PlanOptions, given))
    cluster = Cluster(config, (*with_deployment(given, overrides), registry_override(options.work)))
    cluster = cluster.changed(options.limits)
    if (ranks := given["ranks"]) is not None and not options.adapters:
        raise SettingsError(f"--rank {ranks}: goes with --adapters only")
    if options.num_requests is not None and options.rate is None:
        raise SettingsError(f"--requests {options.num_requests}: goes with --rate only")
    plans = [_plan(one, options) for one in _clusters(cluster, models, gpus, degrees)]
    console = table_console()
    if len(plans) == 1:
        plan_text.show_one(console, plans[0], options)
    else:
        plan_text.show_many(console, plans, options)
    if json_file is not None:
        rows = [_to_json(p) for p in plans]
        write_output(json_file, json.dumps({"workload": asdict(options.work), "plans": rows}, indent=1) + "\n")
    drawn = [p for p in plans if p.points]
    if plot is not None and drawn:
        _draw(plot, drawn, options)
        typer.echo(f"plot: {plot}")
    answered = [p for p in plans if p.refused is None]
    if options.rate is not None:
        answered = [p for p in answered if p.sizing is not None and p.sizing.num_replicas]
    if not answered:
        raise typer.Exit(1)


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


def _plan(cluster: Cluster, options: PlanOptions) -> Plan:
    """Make the plan, show on a terminal which run is in progress, and add the command that repeats the decisive run."""
    console = Console(stderr=True)
    with console.status("planning") as status:
        status.stop()

        def watch(name: str) -> Callable[[int], None]:
            if sys.stderr.isatty():
                status.start()
            return lambda num_replicas: status.update(
                f"simulating {options.rate:g} requests/s on {num_replicas} replicas of {name}"
            )

        result = make_plan(cluster.settings(), options, watch)
    if result.sizing is not None and options.rate is not None:
        result.sizing = replace(result.sizing, command=command_of(cluster, options.work, options.rate, result.sizing))
    return result


def _to_json(one: Plan) -> dict[str, object]:
    capacity = one.capacity
    return {
        "deployment": one.name,
        "gpus_per_replica": one.num_gpus,
        "refused": one.refused,
        "basis": [asdict(ground) for ground in capacity.grounds] if capacity else None,
        "kv_pool_tokens": capacity.kv_pool_tokens if capacity else None,
        "fitting_streams": capacity.fitting_streams if capacity else None,
        "max_concurrency": capacity.max_concurrency if capacity else None,
        "notes": one.notes,
        "points": [asdict(point) for point in one.points],
        "peak": asdict(one.peak) if one.peak else None,
        "within_service_level": asdict(one.best) if one.best else None,
        "replicas": one.num_replicas,
        "gpus": None if one.num_replicas is None else one.num_replicas * one.num_gpus,
        "simulated": asdict(one.sizing) if one.sizing else None,
        "claim": asdict(one.claim) if one.claim else None,
    }


def command_of(cluster: Cluster, work: Workload, rate: float, sizing: Sizing) -> str:
    """Return the `lorrery simulate` command that repeats the decisive trial; the cluster has the plan's adapters."""
    arguments = [
        *cluster.unscaled().arguments(), "--rate", _number(rate), "--input-range", str(work.prompt_tokens),
        "--output-range", str(work.output_tokens), "-n", str(sizing.num_requests),
    ]  # fmt: skip
    if work.num_adapters:
        arguments += ["--num-adapters", str(work.num_adapters), "--adapter-exponent", "0"]
    arguments += ["--workers", str(sizing.num_replicas or sizing.trials[-1].num_replicas)]
    return f"lorrery simulate {shlex.join(arguments)}"


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
