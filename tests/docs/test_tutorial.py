"""The tutorial shows the example plug-in as it is, and of simulations what they print."""

from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.test_commands import ROOT, Command, commands

DOCS = ROOT / "docs"
PAGE = DOCS / "tutorial.md"
SWEPT_RATE = "5"
"""Of the sweep, whose five rates take a quarter of a minute."""

SIMULATIONS = [command for command in commands(PAGE) if command.arguments[:1] == ["simulate"]]


def test_the_policy_in_the_tutorial_is_the_example() -> None:
    example = (DOCS / "examples" / "patient.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", SIMULATIONS, ids=["plain", "own queue", "sweep"])
def test_a_simulation_prints_what_the_tutorial_shows(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / command.variables.get("PYTHONPATH", ""))
    shown = {tuple(line.split()) for line in _output(command).splitlines() if line.strip()}
    arguments = command.arguments[1:]
    if "--sweep" in arguments:
        arguments = [f"rate={SWEPT_RATE}" if word.startswith("rate=") else word for word in arguments]
        shown = {row for row in shown if row[0] == SWEPT_RATE}
        assert len(shown) == 3
    result = CliRunner().invoke(import_module("lorrery.cli.simulate").app, arguments)
    assert result.exit_code == 0, result.output
    assert not shown - {tuple(line.split()) for line in result.output.splitlines()}, result.output


def _output(command: Command) -> str:
    """Return the first block of output behind a command."""
    line = int(command.where.rpartition(":")[2])
    _, _, behind = "\n".join(PAGE.read_text(encoding="utf-8").splitlines()[line - 1 :]).partition("\n```\n")
    return behind.partition("\n```\n")[2].partition("\n```")[0]
