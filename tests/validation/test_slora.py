"""`lorrery validate slora`: which rows are replayed, and how near they come."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation.figures import SLORA_RUNS
from lorrery.validation.slora import FIGURES, predict, read_rows
from lorrery.worker.build import read_catalogue

ROW = {
    "experiment": "synthetic_req_rate_a10g_S1_slora",
    "policy": "slora",
    "gpu": "a10g",
    "setting": "S1",
    "base_model": "huggyllama/llama-7b",
    "lora_ranks": "8",
    "num_adapters": "20",
    "alpha": "1",
    "req_rate": "2",
    "cv": "1",
    "duration": "60",
    "input_lo": "8",
    "input_hi": "512",
    "output_lo": "8",
    "output_hi": "512",
    "throughput": "1.6",
    "avg_latency": "15",
    "avg_first_token_latency": "2",
    "source_line": "3",
    "max_total_token_num": "14500",
    "flags": "",
}


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(ROW | change for change in changes)
    return path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["slora", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_only_modelled_rows_count_and_the_others_are_told(tmp_path: Path) -> None:
    others = [{"policy": "lifo"}, {"flags": "backup"}, {"max_total_token_num": ""}, {"num_adapters": ""}]
    rows, left = read_rows(write(tmp_path / "runs.csv", {}, *others))
    assert [row.policy for row in rows] == ["slora"]
    assert [other.why for other in left] == [
        "policy lifo",
        "flagged backup",
        "no pool size",
        "recorded traffic or unknown GPU",
    ]


def test_errors_are_signed_and_relative_and_go_into_the_json(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.csv", {}, {"throughput": "0.8"}, {"policy": "abort"}, {"policy": "vllm"})
    output = run(str(file), "--policy", "slora", "--json", str(tmp_path / "errors.json"))
    assert "not modelled: 1 rows: policy vllm" in output
    one, half = json.loads((tmp_path / "errors.json").read_text(encoding="utf-8"))["rows"]
    assert {"policy", "gpu", "setting", "num_adapters", "req_rate", "cv", "alpha"} <= one.keys()
    for figure in FIGURES:
        assert one[f"{figure}_error"] == pytest.approx(one[f"{figure}_predicted"] / one[f"{figure}_measured"] - 1)
    assert half["throughput_error"] == pytest.approx(2 * one["throughput_error"] + 1)
    assert half["latency_error"] == one["latency_error"]


def test_a_slower_gpu_more_adapters_and_a_smaller_pool_cost_throughput(tmp_path: Path) -> None:
    changes = [
        {"req_rate": "4"},
        {"req_rate": "4", "gpu": "a100-80"},
        {"req_rate": "4", "max_total_token_num": "7000"},
        {"req_rate": "4", "lora_ranks": "64|32|16|8", "num_adapters": "100"},
    ]
    rows, _ = read_rows(write(tmp_path / "runs.csv", *changes))
    catalogue = read_catalogue()
    base, faster, tight, many = (predict(row, catalogue).predicted["throughput"] for row in rows)
    assert faster > base > tight
    assert base > many


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.csv", {})
    with pytest.raises(SettingsError, match="--policy lifo: not modelled; there are slora, cluster, abort, peft"):
        run(str(file), "--policy", "lifo")
    run(str(write(tmp_path / "none.csv", {"flags": "unused"})), code=1)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(
        FormatError, match=r"other\.csv: line 1: no column experiment, policy, .*; validate slora reads"
    ):
        run(str(tmp_path / "other.csv"))
    with pytest.raises(
        FormatError, match="base_model of synthetic_req_rate_a10g_S1_slora, line 3: model 'gpt-7' is not"
    ):
        run(str(write(tmp_path / "model.csv", {"base_model": "gpt-7"})))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"binary\.csv: not a text file"):
        run(str(tmp_path / "binary.csv"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"req_rate": "fast"}, "line 3: req_rate is 'fast'; it must be a number, 0 or more"),
        ({"req_rate": "0"}, "line 3: req_rate is '0'; it must be above 0"),
        ({"input_lo": "1.5"}, "line 3: input_lo is '1.5'; it must be a whole number"),
        ({"output_hi": ""}, "line 3: output_hi is ''; it must be a number, 1 or more"),
        ({"lora_ranks": "8|x"}, "line 3: lora_ranks is '8|x'; expected ranks as in 64|32|16"),
        ({"lora_ranks": ""}, "line 3: lora_ranks is empty; 20 adapters have at least one rank"),
        ({"throughput": "nan"}, "line 3: throughput is 'nan'; it must be a number, 0 or more"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_by_line_and_column(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    with pytest.raises(FormatError, match=rf"runs\.csv: {re.escape(message)}"):
        read_rows(write(tmp_path / "runs.csv", {}, change))


def test_the_shipped_runs_are_the_published_ones() -> None:
    rows, others = read_rows(SLORA_RUNS)
    assert (len(rows), len(others)) == (62, 647)


def test_without_a_file_the_shipped_runs_are_replayed() -> None:
    output = run("--policy", "peft", code=1)  # none of the published runs of peft is modelled, so this is quick
    assert "not modelled: 318 rows: policy pets" in output
