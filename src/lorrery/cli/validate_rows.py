"""`lorrery validate serving`, `lora` and `kernels`: compare the rows of a file of measurements with predictions.

`validation/serving.py`, `posted.py` and `kernels.py` read the rows and predict them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from lorrery.service.errors import SettingsError
from lorrery.service.files.writing import check_writable, write_output
from lorrery.validation import kernels as kernels_measured
from lorrery.validation import posted, serving_ablation, serving_left_out, serving_plot
from lorrery.validation import serving as measured
from lorrery.validation.figures import MEASURED_SERVING, POSTED_SERVING, SERVED_LORA, NotPredicted
from lorrery.validation.serving import default_jobs
from lorrery.validation.serving_ablation import ALL, CAUSES, named
from lorrery.validation.serving_rows import read_file
from lorrery.validation.serving_run import Options, Prediction
from lorrery.view import plots
from lorrery.view.terminal import table_console
from lorrery.worker.build import read_catalogue

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, help="Write each row's prediction, and the groups, to this file."
    ),
]


def group_names(group: Iterable[str] | None, usual: Sequence[str]) -> list[str]:
    """Return the columns that `--group` names, without duplicates.

    Args:
        group: as given, names with commas; None: not given.
        usual: the default.

    Raises:
        SettingsError: a name is empty.
    """
    names = [name.strip() for text in group or () for name in text.split(",")] or list(usual)
    if "" in names:
        raise SettingsError(f"--group {','.join(names)}: an empty name; write column names with commas between")
    return list(dict.fromkeys(names))


def say_left_out(left_out: Iterable[NotPredicted]) -> None:
    """Print how many rows have no prediction, and why."""
    for one in left_out:
        typer.echo(f"not predicted: {one.num_rows:,} rows, the first in line {one.line}: {one.why}")


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
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV of measured or of posted runs; default: the shipped ones of both kinds.",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Columns to group by, comma-separated; default: model,gpu,backend,weight_dtype, of posted runs"
            " engine,gpu,weight.",
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
    """Simulate runs of served models: those of laboratories, each as its source ran it, and those that people posted.

    A measured row says engine, model, GPU, types, tensor parallelism, clients and lengths; it runs under the engine's
    preset, with the closed loop of its source. Prints by group the mean absolute percentage error (MAPE) of the time
    per output token (TPOT) and to the first token (TTFT), and its signed median (above 0 the simulator is too slow).
    Rows whose quality is not ok are shown apart; a row whose ttft_quality is not ok counts in TPOT only.

    A posted row says its command, its load, and what was measured: output tokens per second, and means and percentiles
    of TTFT, TPOT and E2E. Prints by group and figure the mean absolute error in percent, its signed median (above 0 the
    simulator's figure is the larger), and the error apart for the rows on which constants were chosen and for the
    others. docs/validation.md says what FILE holds. Exits with 1 if no row could be predicted.

    Examples:
      lorrery validate serving
      lorrery validate serving --group backend,tensor_parallel --json errors.json
      lorrery validate serving my-runs.csv --catalogue my-gpu.toml --jobs 8
      lorrery validate serving --every 10 --without host-time --without graph-all-reduce
      lorrery validate serving --every 4 --leave-one-out --plot serving.svg
    """
    if plot is not None:
        plots.check(serving_plot.OPTION, plot)
    if json_file is not None:
        check_writable("--json", json_file)
    options = Options(tuple(path.absolute() for path in catalogue or ()), seed, tuple(overrides or ()))
    if file is not None and posted.is_posted(file):
        if causes or leave_out or every > 1:
            raise SettingsError(f"{file}: posted runs; --without, --leave-one-out and --every are for measured ones")
        _compare_posted(file, group_names(group, posted.GROUPED_BY), options, jobs, json_file, plot)
        return
    names = group_names(group, measured.GROUPED_BY)
    left_out = named(causes or ())
    known = read_catalogue(catalogue or ())

    def watch(found: Iterable[Prediction], total: int) -> Iterable[Prediction]:
        return track(found, "simulating", total=total, console=Console(stderr=True), transient=True)

    jobs = jobs or measured.default_jobs()
    rows = measured.every(read_file(file or MEASURED_SERVING), every, names)
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
    if file is None and not (left_out or leave_out or group or every > 1):
        more["posted"] = posted.to_json(_posted(POSTED_SERVING, posted.GROUPED_BY, options, jobs))
    if json_file is not None:
        write_output(json_file, measured.to_json(comparison, more))
    if plot is not None and comparison.groups:
        serving_plot.draw(plot, comparison, names)
    if not comparison.groups:
        raise typer.Exit(1)


def _posted(file: Path, names: Sequence[str], options: Options, jobs: int | None) -> posted.PostedComparison:
    """Compare posted runs, and print their errors."""

    def watch(found: Iterable[posted.PostedPrediction], total: int) -> Iterable[posted.PostedPrediction]:
        return track(found, "simulating", total=total, console=Console(stderr=True), transient=True)

    comparison = posted.compare(*posted.read_file(file), names, options, jobs=jobs or default_jobs(), watch=watch)
    table_console().print(posted.render(comparison, names))
    say_left_out(comparison.not_predicted)
    return comparison


def _compare_posted(
    file: Path, names: Sequence[str], options: Options, jobs: int | None, json_file: Path | None, plot: Path | None
) -> None:
    """Compare posted runs, print their errors, and write what is asked for."""
    comparison = _posted(file, names, options, jobs)
    if json_file is not None:
        write_output(json_file, json.dumps(posted.to_json(comparison), allow_nan=False, indent=1) + "\n")
    if plot is not None and comparison.groups:
        posted.draw(plot, comparison, names)
    if not comparison.groups:
        raise typer.Exit(1)


def lora(
    file: Runs = SERVED_LORA,
    json_file: JsonFile = None,
    catalogue: MoreCatalogues = None,
    overrides: Overrides = None,
    plot: Plot = None,
    seed: Seed = 0,
    jobs: Jobs = None,
) -> None:
    """Simulate published runs with adapters, each with its command.

    A row says engine and version, GPU, model, flags, the load, and what was measured: output tokens per second, and
    means and percentiles of TTFT, TPOT and E2E. Prints by engine, GPU, kind and figure the mean absolute error in
    percent, and its signed median (above 0 the simulator's figure is the larger). Kind ratio: a run's figure over that
    of the run of its pair with the fewest adapters. docs/validation.md says what FILE holds. Exits with 1 if no row
    could be predicted.

    Examples:
      lorrery validate lora
      lorrery validate lora --json errors.json --plot lora.png
      lorrery validate lora my-runs.csv --set worker.lora.projections=adapted
    """
    if plot is not None:
        plots.check(serving_plot.OPTION, plot)
    if json_file is not None:
        check_writable("--json", json_file)
    options = Options(tuple(path.absolute() for path in catalogue or ()), seed, tuple(overrides or ()))
    _compare_posted(file, posted.ADAPTERS_GROUPED_BY, options, jobs, json_file, plot)


def kernels(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV of measured kernels, may be gzipped; default: the shipped published ones.",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMNS", help="Columns to group by, comma-separated; default: gpu,op,dtype,kv_dtype."),
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Plot predicted against measured: .svg, .png or .pdf.")
    ] = None,
    catalogue: Annotated[
        list[Path] | None, typer.Option(help="TOML file with additional GPUs, fits; repeatable.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="GPU for rows that name none.")] = None,
) -> None:
    """Hold the model's kernels against measured ones, one by one.

    Prints by group how many rows there are, the mean absolute percentage error (MAPE), its signed median (above 0 the
    model is too slow), and the MAPE apart for the shapes on which the shipped constants were found and for the others.
    NCCL's all-reduces are predicted by NCCL's link, those of CUDA graphs by the graph's; those launched one by one are
    predicted by the graph's too, and so lack the launch. docs/validation.md says what FILE holds. Exits with 1 if no
    row could be predicted.

    Examples:
      lorrery validate kernels
      lorrery validate kernels --group gpu,op --json errors.json --plot kernels.svg
      lorrery validate kernels my-kernels.csv --catalogue my-gpu.toml
    """
    names = group_names(group, kernels_measured.GROUPED_BY)
    if plot is not None:
        plots.check(kernels_measured.PLOT_OPTION, plot)
    if json_file is not None:
        check_writable("--json", json_file)
    known = read_catalogue(catalogue or ())
    timed = kernels_measured.read_published() if file is None else kernels_measured.read_file(file)
    comparison = kernels_measured.compare(timed, known, names, gpu or "")
    table_console().print(kernels_measured.render(comparison))
    say_left_out(comparison.not_predicted)
    if json_file is not None:
        write_output(json_file, kernels_measured.to_json(comparison))
    if plot is not None and comparison.groups:
        kernels_measured.draw(plot, comparison)
    if not comparison.groups:
        raise typer.Exit(1)
