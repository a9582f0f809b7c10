"""Sweeps by the command line, and the tables that they leave."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.simulate import app
from lorrery.vocabulary.files import CPU_SECONDS

SHORT = {"duration": 2, "rate": 8, "workers": 1}
"""Options of every run, unless they are swept."""


def simulate(*arguments: object, exit_code: int = 0) -> str:
    swept = {str(argument).partition("=")[0] for argument in arguments}
    short = [f"--{name}={value}" for name, value in SHORT.items() if name not in swept]
    result = CliRunner().invoke(app, [*short, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


def sweep(
    folder: Path,
    *values: str,
    asked: Sequence[object] = (),
    exit_code: int = 0,
    jobs: int = 1,
    plots: bool = False,
    seeds: int = 1,
) -> str:
    """Sweep into a folder; without plots, which take longer than the points here."""
    options = [option for value in values for option in ("--sweep", value)] + ["--seeds", str(seeds)]
    with pytest.MonkeyPatch.context() as patch:
        if not plots:
            patch.setattr("lorrery.simulator.sweep.run.draw", lambda _folder, _axes, _rows: [])
        return simulate(*options, *asked, "--out", folder, "--jobs", jobs, exit_code=exit_code)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def without_cpu(folder: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != CPU_SECONDS} for row in table(folder)]
