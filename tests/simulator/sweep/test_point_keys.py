"""What a point is known by: when one that is there already counts, and when it runs again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lorrery
from lorrery.cli.simulate import app
from lorrery.simulator.sweep.backends import run_point
from lorrery.simulator.sweep.inputs import plugin_files
from lorrery.simulator.sweep.outcome import Outcome
from lorrery.simulator.sweep.points import ROOMS_OF_A_SIMULATION, Point
from tests.simulator.sweep.sweeping import sweep, table


def test_a_point_is_known_by_what_its_files_contain(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02}.0,100,10" for second in range(5)]
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
    asked = ("--rate", "2", "--workload", "azure", "--trace")
    assert "2 points to run" in sweep(out, "seed=1,2", asked=(*asked, trace))
    elsewhere = shutil.copy(trace, tmp_path / "copy.csv")
    assert "to run" not in sweep(out, "seed=1,2", asked=(*asked, elsewhere))
    trace.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    assert "2 points to run" in sweep(out, "seed=1,2", asked=(*asked, trace))


def test_a_point_is_known_by_the_code_of_its_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin, values = tmp_path / "own_queue.py", ("scheduler.policy=own_queue:Own", "rate=4,8")
    plugin.write_text("from lorrery.scheduler.core.queues.vtc_fair import VtcFair as Own\n", encoding="utf-8")
    assert "2 points to run" in sweep(tmp_path / "out", *values)
    assert "to run" not in sweep(tmp_path / "out", *values)
    with plugin.open("a", encoding="utf-8") as file:
        file.write("Own.changed = True\n")
    forget(monkeypatch, "own_queue")
    assert "2 points to run" in sweep(tmp_path / "out", *values)


def forget(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Be a process that has not imported them, as that of another command is."""
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)


OWN_QUEUE = """
from lorrery.scheduler.core.queues.vtc_fair import VtcFair
class Own(VtcFair):
    def __init__(self, weights=""):
        super().__init__()
"""


def test_a_point_is_known_by_the_files_that_options_of_plug_ins_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_reader.py").write_text(OWN_QUEUE, encoding="utf-8")
    weights = tmp_path / "weights.json"
    weights.write_text("1", encoding="utf-8")
    asked = ["--set", f"scheduler.policy_options.weights={weights}"]
    values = ("scheduler.policy=own_reader:Own", "rate=4,8")
    assert "2 points to run" in sweep(tmp_path / "out", *values, asked=asked)
    assert "to run" not in sweep(tmp_path / "out", *values, asked=asked)
    weights.write_text("2", encoding="utf-8")
    assert "2 points to run" in sweep(tmp_path / "out", *values, asked=asked)


def test_a_point_is_known_by_the_tokenizer_in_a_folder(tmp_path: Path) -> None:
    shipped = Path(lorrery.__path__[0]) / "tokenizer" / "shipped" / "tokenizer.json"
    (tmp_path / "model").mkdir()
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_bytes(shipped.read_bytes())
    talk = [{"from": "human", "value": "what is the time of day"}, {"from": "gpt", "value": "it is four in the day"}]
    (tmp_path / "talks.json").write_text(json.dumps([{"conversations": talk}] * 8), encoding="utf-8")
    asked = ["--workload", "sharegpt", "--trace", tmp_path / "talks.json", "--tokenizer", tmp_path / "model"]
    assert "2 points to run" in sweep(tmp_path / "out", "rate=4,8", asked=asked)
    assert "to run" not in sweep(tmp_path / "out", "rate=4,8", asked=asked)
    tokenizer.write_bytes(shipped.read_bytes() + b"\n")
    assert "2 points to run" in sweep(tmp_path / "out", "rate=4,8", asked=asked)


def test_a_file_that_changes_while_a_sweep_runs_fails_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    before = head + "2023-11-16 18:00:00,10,5\n"
    trace.write_text(before, encoding="utf-8")
    asked = ["--workload", "azure", "--trace", trace]
    run = run_point

    def edited(point: Point) -> Outcome:
        outcome = run(point)
        trace.write_text(before + "2023-11-16 18:00:01,10,50\n", encoding="utf-8")
        return outcome

    arguments = [*asked, "--sweep", "workers=1,2", "--out", tmp_path / "out", "--jobs", 1, "--no-report"]
    with monkeypatch.context() as patch:
        patch.setattr("lorrery.simulator.sweep.backends.run_point", edited)
        said = CliRunner().invoke(app, [*map(str, arguments)]).output
    assert "trace.csv is not the file that it was when the sweep began" in said
    assert [row["status"] for row in table(tmp_path / "out")] == ["ok", "failed"]
    trace.write_text(before, encoding="utf-8")
    assert CliRunner().invoke(app, [*map(str, arguments)]).exit_code == 0
    assert [row["num_requests"] for row in table(tmp_path / "out")] == ["1", "1"]


def test_code_that_another_process_imported_before_it_changed_fails_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of a Dask cluster does that outlives a sweep."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin, values = tmp_path / "own_stale.py", ("scheduler.policy=own_stale:Own", "rate=4,8")
    plugin.write_text(OWN_QUEUE, encoding="utf-8")
    assert "2 points to run" in sweep(tmp_path / "out", *values)
    plugin.write_text(OWN_QUEUE + "Own.changed = True\n", encoding="utf-8")
    assert "this process had imported own_stale before" in sweep(tmp_path / "out", *values, exit_code=1)
    forget(monkeypatch, "own_stale")
    assert "2 points to run" in sweep(tmp_path / "out", *values)


def test_a_point_is_known_by_what_its_plug_ins_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = tmp_path / "own_rules"
    rules.mkdir()
    (rules / "__init__.py").write_text("", encoding="utf-8")
    (rules / "fair.py").write_text("from .base import Base\nclass Own(Base): ...\n", encoding="utf-8")
    base = rules / "base.py"
    base.write_text(
        "from lorrery.scheduler.core.queues.vtc_fair import VtcFair as Base\nimport numpy\n", encoding="utf-8"
    )
    (tmp_path / "own_plugin.py").write_text("from own_rules import fair\nOwn = fair.Own\n", encoding="utf-8")
    assert plugin_files("own_plugin") == {
        "own_plugin": tmp_path / "own_plugin.py",
        "own_rules": rules / "__init__.py",
        "own_rules.fair": rules / "fair.py",
        "own_rules.base": base,
    }
    assert plugin_files("no_such_plugin") == {"no_such_plugin": None}
    values = ("scheduler.policy=own_plugin:Own", "rate=4,8")
    assert "2 points to run" in sweep(tmp_path / "out", *values)
    assert "to run" not in sweep(tmp_path / "out", *values)
    base.write_text(base.read_text(encoding="utf-8") + "Base.changed = True\n", encoding="utf-8")
    forget(monkeypatch, "own_plugin", "own_rules", "own_rules.fair", "own_rules.base")
    assert "2 points to run" in sweep(tmp_path / "out", *values)


def test_a_point_is_known_by_the_code_that_simulated_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 points to run" in sweep(tmp_path, "rate=4,8")
    monkeypatch.setattr("lorrery.simulator.sweep.points.code_digest", lambda: "of an edited file")
    assert "2 points to run" in sweep(tmp_path, "rate=4,8")
    assert "to run" not in sweep(tmp_path, "rate=4,8")


def test_that_code_is_all_that_a_simulation_imports() -> None:
    program = "import sys, lorrery.simulator.run; print(*(name for name in sys.modules if name.startswith('lorrery.')))"
    imported = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    rooms = {name.split(".")[1] for name in imported.split() if "__mypyc" not in name}
    assert rooms == set(ROOMS_OF_A_SIMULATION)
