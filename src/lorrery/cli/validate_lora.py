"""`lorrery validate lora`: compares simulated with published runs with adapters; `validation/serving_lora.py`."""

from collections.abc import Iterable

import typer
from rich.console import Console
from rich.progress import track

from lorrery.cli.output import write
from lorrery.cli.validate_rows import JsonFile, say_left_out
from lorrery.cli.validate_serving import Jobs, MoreCatalogues, Overrides, Plot, Runs, Seed
from lorrery.service.files.writing import check_writable
from lorrery.validation import serving_lora, serving_plot
from lorrery.validation.figures import SERVED_LORA
from lorrery.validation.serving import default_jobs
from lorrery.validation.serving_run import Options
from lorrery.view import plots
from lorrery.view.terminal import table_console


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

    def watch(found: Iterable[serving_lora.LoraPrediction], total: int) -> Iterable[serving_lora.LoraPrediction]:
        return track(found, "simulating", total=total, console=Console(stderr=True), transient=True)

    columns, rows = serving_lora.read_file(file)
    comparison = serving_lora.compare(columns, rows, options, jobs=jobs or default_jobs(), watch=watch)
    table_console().print(serving_lora.render(comparison))
    say_left_out(comparison.not_predicted)
    if json_file is not None:
        write(json_file, serving_lora.to_json(comparison))
    if plot is not None and comparison.errors:
        serving_lora.draw(plot, comparison)
    if not comparison.errors:
        raise typer.Exit(1)
