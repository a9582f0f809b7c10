"""Forty simulations, whose requests.csv is the same byte for byte as when it was recorded.

A change that shall alter results records them again: `python -m tests.simulator.test_recorded_runs`.
"""

import hashlib
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.app import app

RUNS = Path(__file__).with_name("recorded_runs.txt")
"""A line for each run: SHA-256 of its requests.csv, and its arguments."""


def _runs() -> list[tuple[str, str]]:
    lines = RUNS.read_text(encoding="utf-8").splitlines()
    return [(checksum, arguments) for checksum, _, arguments in (line.partition(" ") for line in lines)]


def _checksum(arguments: str, folder: Path) -> str:
    command = ["simulate", *shlex.split(arguments), "--out", str(folder), "--no-report"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code in (0, 1), result.output  # 1: some requests failed
    return hashlib.sha256((folder / "requests.csv").read_bytes()).hexdigest()


@pytest.mark.parametrize(("checksum", "arguments"), _runs())
def test_a_run_repeats_its_record(checksum: str, arguments: str, tmp_path: Path) -> None:
    assert _checksum(arguments, tmp_path / "run") == checksum


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        recorded = [
            f"{_checksum(arguments, Path(scratch, str(number)))} {arguments}\n"
            for number, (_, arguments) in enumerate(_runs())
        ]
    RUNS.write_text("".join(recorded), encoding="utf-8")
