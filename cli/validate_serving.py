"""`lorrery validate serving`: whole runs of served models, against measured ones; `validation/serving.py`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from lorrery.chassis.terminal import table_console
from lorrery.cli.output import write
from lorrery.cli.validate_rows import JsonFile, group_names, say_left_out
from lorrery.validation import serving as measured
from lorrery.validation.published import MEASURED_SERVING
from lorrery.validation.serving_rows import read_file
from lorrery.validation.serving_run import Options, Prediction
from lorrery.worker.build import read_catalogue


def serving(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV of measured runs; default: the published ones that are shipped.",
        ),
    ] = MEASURED_SERVING,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS", help="Columns to group by, with commas; default: model,gpu,backend,weight_dtype."
        ),
    ] = None,
    json_file: JsonFile = None,
    catalogue: Annotated[
        list[Path] | None, typer.Option(help="TOML with further GPUs, models, engines; repeatable.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting of every row; repeatable; wins over the row."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of every draw.")] = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default: as many as there are cores.")
    ] = None,
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
    """
    names = group_names(group, measured.GROUPED_BY)
    known = read_catalogue(catalogue or ())
    options = Options(tuple(path.absolute() for path in catalogue or ()), seed, tuple(overrides or ()))

    def watch(found: Iterable[Prediction], total: int) -> Iterable[Prediction]:
        return track(found, "simulating", total=total, console=Console(stderr=True), transient=True)

    comparison = measured.compare(read_file(file), names, options, jobs=jobs or measured.default_jobs(), watch=watch)
    table_console().print(measured.render(comparison, known))
    say_left_out(comparison.not_predicted)
    if json_file is not None:
        write(json_file, measured.to_json(comparison))
    if not comparison.groups:
        raise typer.Exit(1)
