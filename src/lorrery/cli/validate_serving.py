"""`lorrery validate serving`: compares simulated with measured runs of served models; `validation/serving.py`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from lorrery.cli.output import write
from lorrery.cli.validate_rows import JsonFile, group_names, say_left_out
from lorrery.service.files.writing import check_writable
from lorrery.validation import serving as measured
from lorrery.validation import serving_ablation, serving_left_out, serving_plot
from lorrery.validation.figures import MEASURED_SERVING
from lorrery.validation.serving_ablation import ALL, CAUSES, named
from lorrery.validation.serving_rows import read_file
from lorrery.validation.serving_run import Options, Prediction
from lorrery.view import plots
from lorrery.view.terminal import table_console
from lorrery.worker.build import read_catalogue

# Parameters of `validate lora` too.
Runs = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        show_default=False,
        help="CSV of measured runs; default: the shipped published ones.",
    ),
]
MoreCatalogues = Annotated[
    list[Path] | None, typer.Option(help="TOML file with additional GPUs, models, engines; repeatable.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting for every row; repeatable; takes precedence over the row.",
    ),
]
Plot = Annotated[Path | None, typer.Option(dir_okay=False, help="Plot predicted against measured: .svg, .png or .pdf.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random draws.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Number of processes; default: as many as there are cores."),
]


def serving(
    file: Runs = MEASURED_SERVING,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS", help="Columns to group by, comma-separated; default: model,gpu,backend,weight_dtype."
        ),
    ] = None,
    json_file: JsonFile = None,
    catalogue: MoreCatalogues = None,
    overrides: Overrides = None,
    plot: Plot = None,
    causes: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="CAUSE",
            help="Also show the errors without one cause; repeatable; all: without each in turn. Causes:"
            f" {', '.join(CAUSES)}.",
        ),
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-out", help="Also show each group's errors with engine constants fitted without its rows."
        ),
    ] = False,
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Only every Nth row of each group.")] = 1,
    seed: Seed = 0,
    jobs: Jobs = None,
) -> None:
    """Simulate measured runs of served models, each as its source ran it.

    A row says engine, model, GPU, types, tensor parallelism, clients and lengths; it runs under the engine's preset,
    with the closed loop of its source. Prints by group the mean absolute percentage error (MAPE) of the time per output
    token (TPOT) and to the first token (TTFT), and its signed median (above 0 the simulator is too slow). Rows whose
    quality is not ok are shown apart; a row whose ttft_quality is not ok counts in TPOT only. docs/validation.md says
    what FILE holds. Exits with 1 if no row could be predicted.

    Examples:
      lorrery validate serving
      lorrery validate serving --group backend,tensor_parallel --json errors.json
      lorrery validate serving my-runs.csv --catalogue my-gpu.toml --jobs 8
      lorrery validate serving --every 10 --without host-time --without graph-all-reduce
      lorrery validate serving --every 4 --leave-one-out --plot serving.svg
    """
    names = group_names(group, measured.GROUPED_BY)
    left_out = named(causes or ())
    if plot is not None:
        plots.check(serving_plot.OPTION, plot)
    if json_file is not None:
        check_writable("--json", json_file)
    known = read_catalogue(catalogue or ())
    options = Options(tuple(path.absolute() for path in catalogue or ()), seed, tuple(overrides or ()))

    def watch(found: Iterable[Prediction], total: int) -> Iterable[Prediction]:
        return track(found, "simulating", total=total, console=Console(stderr=True), transient=True)

    jobs = jobs or measured.default_jobs()
    rows = measured.every(read_file(file), every, names)
    comparison = measured.compare(rows, names, options, jobs=jobs, watch=watch)
    console = table_console()
    console.print(measured.render(comparison, known))
    say_left_out(comparison.not_predicted)
    more: dict[str, object] = {}
    if left_out and comparison.groups:
        ablated = serving_ablation.ablate(comparison, left_out, names, options, jobs=jobs, watch=watch)
        console.print(serving_ablation.render(ablated, groups=ALL not in (causes or ())))
        for line in serving_ablation.legend(left_out):
            typer.echo(line)
        more["ablations"] = serving_ablation.to_json(ablated)
    if leave_out and comparison.groups:
        found = serving_left_out.leave_out(comparison, names, options, known, jobs=jobs, watch=watch)
        console.print(serving_left_out.render(found))
        more["left_out"] = serving_left_out.to_json(found)
    if json_file is not None:
        write(json_file, measured.to_json(comparison, more))
    if plot is not None and comparison.groups:
        serving_plot.draw(plot, comparison, names)
    if not comparison.groups:
        raise typer.Exit(1)
