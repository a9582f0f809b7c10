"""`lorrery calibrate` of benchmark results: fits a few factors to whole runs; `validation/run_calibration.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

from lorrery.service.errors import FormatError
from lorrery.service.files.writing import write_output
from lorrery.validation.benchmark_output import Asked, read_benchmarks
from lorrery.validation.posted import QUANTITIES, PostedRow
from lorrery.validation.run_calibration import RunFit, fit_runs
from lorrery.validation.serving import default_jobs
from lorrery.validation.serving_run import Options
from lorrery.view.terminal import FigureTable, table_console
from lorrery.worker.device.catalogue.hardware import Gpu
from lorrery.worker.device.catalogue.tables import Catalogue

FEWEST = 3
"""Runs; from fewer, no factor would be told from another."""


def calibrate_runs(file: Path, asked: Asked, known: Catalogue, gpu: Gpu, options: Options, out: Path | None) -> None:
    """Fit constants to the runs of a file, print them with their errors, and write them if asked.

    Args:
        file: benchmark results.
        asked: what they do not say.
        known: catalogue with the engine.
        gpu: the GPU to fit.
        options: of the simulations.
        out: the TOML file to write.

    Raises:
        FormatError: too few runs, or one that cannot be read.
        LorreryError: a run that cannot be simulated.
    """
    flags = {**asked.flags, "worker.gpu": gpu.name}
    rows = read_benchmarks(file, replace(asked, flags=flags))
    if len(rows) < FEWEST:
        raise FormatError(f"{file}: {len(rows)} runs; at least {FEWEST} are needed, with different loads")
    if unnamed := [row.line for row in rows if "model" not in row.flags]:
        raise FormatError(f"{file}: result {unnamed[0]} names no model: say which with --model")
    source = f"lorrery calibrate {file.name} --gpu {gpu.name}: {len(rows)} runs"
    with Console(stderr=True).status(f"fitting {len(rows)} runs of {gpu.name}"):
        fitted = fit_runs(rows, gpu, known, options, source, default_jobs())
    typer.echo(f"{len(rows)} runs of {gpu.name}, {rows[0].engine}")
    console = table_console()
    console.print(_factors(fitted))
    console.print(_runs(rows, fitted))
    for one in fitted.factors:
        if one.kept:
            typer.echo(f"not determined: {one.name}, kept; told by {one.told_by}")
    if out is not None:
        write_output(out, fitted.catalogue)
        typer.echo(f'wrote {out}; name it in the settings: catalogue = ["{out}"]')


def _factors(fitted: RunFit) -> FigureTable:
    table = FigureTable()
    table.add_column("constants", justify="left")
    for name in ("before", "fitted", "+- %"):
        table.add_column(name)
    table.add_column("basis", justify="left")
    for one in fitted.factors:
        unit = "" if one.name.endswith("_ms") else " x"
        error = "" if one.kept else f"{one.error * 100:.0f}"
        basis = "assumed, as before" if one.kept else "fitted to these runs"
        table.add_row(one.name, f"{one.start:.4g}{unit}", f"{one.value:.4g}{unit}", error, basis)
    return table


def _runs(rows: Sequence[PostedRow], fitted: RunFit) -> FigureTable:
    """Return each run's figures, and the mean errors: before, after, and as if the run had not been in the fit."""
    table = FigureTable()
    table.add_column("run", justify="left")
    table.add_column("figure", justify="left")
    for name in ("measured", "simulated", "error % before", "error % fitted", "error % unseen"):
        table.add_column(name)
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for row, before, after, unseen in zip(rows, fitted.before, fitted.after, fitted.unseen, strict=True):
        for name, value in row.measured.items():
            found = (before.figures[name] / value - 1, after.figures[name] / value - 1, unseen[name])
            errors.setdefault(name, []).append(found)
            cells = (f"{error * 100:+.1f}" for error in found)
            table.add_row(_load(row), QUANTITIES[name], f"{value:,.1f}", f"{after.figures[name]:,.1f}", *cells)
    for name, of in errors.items():
        table.add_row("mean", QUANTITIES[name], "", "", *_means(of))
    return table


def _load(row: PostedRow) -> str:
    load = f"{row.clients} clients" if row.clients else f"{row.rate:g}/s" if row.rate else "at once"
    return f"{row.line}: {row.num_requests} of {row.lengths[0][1]:.0f} + {row.lengths[1][1]:.0f}, {load}"


def _means(errors: Iterable[tuple[float, float, float]]) -> list[str]:
    return [f"{np.mean(np.abs(column)) * 100:.1f}" for column in zip(*errors, strict=True)]
