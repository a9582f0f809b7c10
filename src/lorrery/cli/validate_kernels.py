"""`lorrery validate kernels`: compares the kernels that make up steps with measured ones; `validation/kernels.py`."""

from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.output import write
from lorrery.cli.validate_rows import JsonFile, group_names, say_left_out
from lorrery.service.files.writing import check_writable
from lorrery.validation import kernels as measured
from lorrery.view import plots
from lorrery.view.terminal import table_console
from lorrery.worker.build import read_catalogue


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
    names = group_names(group, measured.GROUPED_BY)
    if plot is not None:
        plots.check(measured.PLOT_OPTION, plot)
    if json_file is not None:
        check_writable("--json", json_file)
    known = read_catalogue(catalogue or ())
    timed = measured.read_published() if file is None else measured.read_file(file)
    comparison = measured.compare(timed, known, names, gpu or "")
    table_console().print(measured.render(comparison))
    say_left_out(comparison.not_predicted)
    if json_file is not None:
        write(json_file, measured.to_json(comparison))
    if plot is not None and comparison.groups:
        measured.draw(plot, comparison)
    if not comparison.groups:
        raise typer.Exit(1)
