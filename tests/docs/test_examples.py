"""What pages show as code, settings and output is what runs and comes out. docs/plug-ins.md: test_plug_ins.py."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import load
from tests.docs.test_commands import ROOT, Command, commands

DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"
SWEPT_RATE = "5"
"""Of the tutorial's sweep, whose five rates take a quarter of a minute."""

SIMULATIONS = [command for command in commands(TUTORIAL) if command.arguments[:1] == ["simulate"]]
PYTHON = re.findall(r"```python\n(.*?)```", (DOCS / "simulator.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_policy_in_the_tutorial_is_the_example() -> None:
    example = (DOCS / "examples" / "patient.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in TUTORIAL.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", SIMULATIONS, ids=["plain", "own queue", "sweep"])
def test_a_simulation_prints_what_the_tutorial_shows(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
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
    _, _, behind = "\n".join(TUTORIAL.read_text(encoding="utf-8").splitlines()[line - 1 :]).partition("\n```\n")
    return behind.partition("\n```\n")[2].partition("\n```")[0]


@pytest.mark.parametrize("example", PYTHON)
def test_an_example_of_the_python_interface_runs(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "simulator.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_python_interface_has_examples() -> None:
    assert len(PYTHON) == 4


def test_the_lines_behind_the_shipped_settings_are_the_fleet_of_mixed_toml(tmp_path: Path) -> None:
    """Whoever has a wheel and no checkout gets that fleet by the lines that docs/fleets.md shows."""
    page = (DOCS / "fleets.md").read_text(encoding="utf-8")
    found = re.search(r"append these lines.*?```toml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    own = tmp_path / "cluster.toml"
    own.write_text(DEFAULT_SETTINGS.read_text(encoding="utf-8") + found[1], encoding="utf-8")
    assert load(own).num_worker_processes(None, 1) == 3
    mixed = tomllib.loads((ROOT / "deploy" / "mixed.toml").read_text(encoding="utf-8"))
    assert tomllib.loads(own.read_text(encoding="utf-8"))["workers"] == mixed["workers"]
