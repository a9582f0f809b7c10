"""`lorrery compare`: policies on the same requests, what can be said of their order, and why some are equal."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lorrery.cli.flags import ConfigOption, SetOption, VersionOption, takes_deployment, with_deployment
from lorrery.loadgen.flags import Report, check_report, takes_load_options
from lorrery.loadgen.options import load_options
from lorrery.loadgen.report import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK
from lorrery.loadgen.report_files import check_folder
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.options import given_to
from lorrery.simulator.arena.arena import ArenaOptions, Watcher, compare_all
from lorrery.simulator.arena.comparison import Comparison, Contestant, Measure, write
from lorrery.simulator.options import SimulationOptions
from lorrery.view.terminal import FigureTable, table_console
from lorrery.vocabulary.files import COMPARE_FILE
from lorrery.vocabulary.intervals import is_clear

_SIMULATION, _OUTPUT = "Simulation", "Output"
_FIRST_TO_GO = (
    "E2E mean ms",
    "TPOT mean ms",
    "TTFT mean ms",
    "E2E p99 ms",
    "adapter loads",
    "worst tenant's goodput %",
    "service gap tokens",
    "placement regret loads",
    "eviction regret loads",
    "failed",
)
_LEAST_NAME = 14

app = command_app()


@app.command(cls=Command)
@takes(command_options(ArenaOptions, ("slo", "seeds", "jobs")), before="config")
@takes_deployment(before="overrides")
@takes(command_options(SimulationOptions), before="out")
@takes_load_options(before="out", live=False)
def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            show_default=False,
            help="Policy, way to batch, placement, memory rule or prefix cache; module:Class of a policy of your own;"
            " or KEY=VALUE[,KEY=VALUE]. One alone: against all shipped ones of its kind. None: all queue policies.",
        ),
    ] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Write {COMPARE_FILE}, compare.csv and report.html to this folder.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Report = True,
    version: VersionOption = False,
    **given: Any,  # noqa: ANN401  the tables' options
) -> None:
    """Compare policies on the same requests, with several seeds.

    Every candidate gets the same requests: the same arrivals, lengths and adapters, drawn anew with each seed. Figures
    are means over the seeds with half of their 95 % intervals; differences are taken seed by seed, and where the
    interval of their mean has 0 in it, the order of two candidates is not known, and the command says so. Candidates
    that made the same decisions are named with the reason.

    Examples:
      lorrery compare fcfs vtc_fair --rate 30 --adapters all --workers 1
      lorrery compare my_module:MyQueue --rate 30 --adapters all --set scheduler.batching=continuous
      lorrery compare least_loaded adapter_hash --workers 4 --rate 60 --adapters all --set adapters.max_loras=8
      lorrery compare vtc_fair vtc_fair,fair_max_running=16 --slo ttft_p99=0.5 --rate 30 --adapters all
      lorrery compare adapters.max_loras=4 adapters.max_loras=8 --adapters all --out out/places

    Exit code: 0 all ran, 1 a candidate failed, 2 wrong usage, 130 interrupted.
    """
    del version
    check_report(out, report=report)
    if out is not None:
        check_folder(out)
    asked = ArenaOptions(
        config,
        load_options(given, live=False),
        overrides=with_deployment(given, overrides),
        candidates=names or (),
        **given_to(ArenaOptions, given),
    )
    try:
        with _progress() as watch:
            found = compare_all(asked, watch)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    console = table_console()
    _show(found, console)
    if out is not None:
        written = write(found, out)
        if report:
            from lorrery.view.reports.report import report as make_page  # slow to import

            written.append(make_page(out))
        for path in written:
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    if not found.ran:
        raise SettingsError(next((f"{one.name}: {one.error}" for one in found.contestants), "no candidate can run"))
    failed = any(one.error and one.candidate.is_asked for one in found.contestants)
    raise typer.Exit(EXIT_FAILURES if failed else EXIT_OK)


@contextmanager
def _progress() -> Iterator[Watcher]:
    with Progress(
        TextColumn("[bold]compare"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        bar = progress.add_task("", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _show(found: Comparison, console: Console) -> None:
    """Print the figures, what they rank, and what is equal."""
    for label, text in found.about.items():
        console.print(f"{label:<9} {text}", highlight=False, markup=False, soft_wrap=True, style="dim")
    table = FigureTable(
        box=box.SIMPLE_HEAD,
        first_to_go=_FIRST_TO_GO,
        caption="mean ± half of the 95 % interval; * differs from the first by more than chance"
        if len(found.seeds) > 1
        else None,
    )
    table.add_column("candidate", justify="left", wraps_at=_LEAST_NAME)
    measures = found.measures
    for measure in measures:
        table.add_column(f"{measure.title} {measure.unit}".strip())
    for one in found.ran:
        table.add_row(one.name, *(_cell(found, one, measure) for measure in measures))
    if found.ran:
        console.print(table)
    for one in found.contestants:
        if one.error:
            console.print(Text.assemble(("left out  ", "yellow"), f"{one.name}: {one.error}"), soft_wrap=True)
    for text in found.verdicts:
        console.print(f"- {text}", highlight=False, markup=False, soft_wrap=True)
    for text in found.equal:
        console.print(f"= {text}", highlight=False, markup=False, soft_wrap=True)
    for text in found.notes:
        console.print(f"! {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _cell(found: Comparison, one: Contestant, measure: Measure) -> Text:
    mean, margin = one.mean(measure.name)
    if math.isnan(mean):
        return Text("-")
    text = Text(_number(measure, mean))
    if math.isfinite(margin):
        text.append(f" ±{_number(measure, margin)}", "dim")
    first = found.ran[0]
    if one is not first:
        differences = found.differences(first, one, measure.name)
        if is_clear(differences):
            better = measure.better(sum(differences))
            text.append("*", "green" if better else "red")
    return text


def _number(measure: Measure, value: float) -> str:
    if measure.unit == "%":
        return f"{100 * value:.1f}"
    if measure.name == "jain_index":
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}"
