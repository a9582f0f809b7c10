"""`lorrery compare`: what it prints, writes and refuses."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.compare import app
from lorrery.service.errors import SettingsError
from lorrery.view.reports.report import report

SHORT = ("--rate", "4", "--duration", "4", "--workers", "1", "--seeds", "2", "--set", "scheduler.batching=continuous")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def compare(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments), *SHORT])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


def test_figures_ranking_and_reasons_are_printed_and_written(tmp_path: Path) -> None:
    said = compare("fcfs", "req_queue", "vtc_fair", "--adapters", "all", "--out", tmp_path)
    assert "- goodput: all are equal" in said
    assert "= fcfs and req_queue" in said or "= fcfs, req_queue and vtc_fair" in said
    content = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in content["contestants"]] == ["fcfs", "req_queue", "vtc_fair"]
    with (tmp_path / "compare.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["candidate"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("fcfs", "req_queue", "vtc_fair") for seed in ("42", "43")
    ]
    assert float(rows[0]["ttft_ms_p99"]) == content["contestants"][0]["rounds"]["42"]["ttft_ms_p99"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Comparison" in page
    for text in (*content["verdicts"], *content["equal"], *content["notes"]):
        assert text.replace("'", "&#39;") in page
    report(tmp_path, file=tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_a_policy_that_fails_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    said = compare("fcfs", "req_queue", "tests.simulator.faulty_queues:Exits", "--out", tmp_path, exit_code=1)
    assert "left out  tests.simulator.faulty_queues:Exits: seed 42: " in said
    assert "is left out" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_makes_no_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'fifo' is no candidate"):
        compare("fifo", "fcfs")
    with pytest.raises(SettingsError, match="--no-report goes with --out DIR only"):
        compare("fcfs", "vtc_fair", "--no-report")
    with pytest.raises(SettingsError, match=r"tests\.simulator\.faulty_queues:Exits: seed 42"):
        compare("tests.simulator.faulty_queues:Exits", "policy=tests.simulator.faulty_queues:Interrupts")
