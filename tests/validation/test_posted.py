"""`lorrery validate lora`: each row runs under its command, and the shipped runs are within the aims."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError
from lorrery.validation import posted
from lorrery.validation.figures import SERVED_LORA
from lorrery.validation.nearest import measured_groups
from lorrery.validation.posted import PostedRow, read_file, requests_of, settings_of

COLUMNS, ROWS = read_file(SERVED_LORA)

A10: dict[str, object] = {
    "cmd": "vllm serve Qwen2.5-7B-Instruct --enable-lora --enforce-eager (0.30.0)", "pair": "p", "engine": "vllm-0.30",
    "gpu": "A10", "tp": 1, "model": "Qwen2.5-7B", "weight": "bfloat16", "n": 16, "c": 8, "in_dist": "fixed",
    "in_mean": 64, "out_mean": 16, "adapters": 4, "rank": 16, "max_loras": 8, "max_cpu": 8, "m_out_tps": 100.0,
}  # fmt: skip


def written(path: Path, *rows: dict[str, object], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns or list(COLUMNS), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def only(path: Path, **cells: object) -> PostedRow:
    (row,) = read_file(written(path / "rows.csv", A10 | cells))[1]
    return row


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lora", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("lora") / "lora.json"
    assert run("--json", out, "--jobs", "1")[0] == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(("source", "figures", "most"), [("campi-a10", {"out_tps"}, 8), ("sglang#17913", None, 20)])
def test_the_shipped_runs_are_within_the_aims(shipped, source, figures, most):
    off = {
        (one["id"], figure): 100 * (value / float(one[f"m_{figure}"]) - 1)
        for one in shipped["rows"]
        for figure, value in one["predicted"].items()
        if one["source"] == source and (figures is None or figure in figures)
    }
    assert off
    assert {key: error for key, error in off.items() if abs(error) > most} == {}


def test_every_shipped_run_is_predicted_and_has_a_source(shipped):
    assert shipped["not_predicted"] == []
    assert all(one["predicted"] and one["source"] and one["url"] for one in shipped["rows"])


def test_the_errors_that_plans_tell_are_those_of_the_shipped_runs(shipped):
    found = {(g["engine"].partition("-")[0], g["gpu"]): g for g in shipped["groups"] if g.get("kind") == "lora"}
    told = {(one.engine, one.gpu): one for one in measured_groups() if one.adapters == "yes" and one.engine == "vllm"}
    assert found.keys() == told.keys()
    for (key, figure), error in {
        ((g["engine"].partition("-")[0], g["gpu"]), g["figure"]): g["mape"]
        for g in shipped["groups"]
        if g.get("kind") == "lora"
    }.items():
        column = {"out_tps": "tokens_per_second", "ttft": "ttft"}[figure]
        assert float(getattr(told[key], column)) == pytest.approx(error, abs=0.06)


def test_a_row_runs_with_its_command(tmp_path):
    settings = settings_of(only(tmp_path, sets="{'worker.gpu_memory_utilization': 0.92}"))
    worker, adapters = settings.worker, settings.adapters
    assert (settings.engine, worker.enforce_eager, worker.gpu_memory_utilization) == ("vllm-0.24", True, 0.92)
    assert (adapters.max_loras, adapters.max_lora_rank, adapters.num_adapters) == (8, 16, 4)
    assert settings_of(only(tmp_path, max_rank=64)).adapters.max_lora_rank == 64
    assert not settings_of(only(tmp_path, cmd="vllm serve")).worker.enforce_eager
    assert settings_of(only(tmp_path, adapters=0)).adapters.registry == ()


def test_requests_have_the_rows_lengths_and_are_spread_evenly_over_its_adapters(tmp_path):
    fixed = requests_of(only(tmp_path), 0).rows()
    assert {(one.prompt_tokens, one.output_tokens, one.at_seconds) for one in fixed} == {(64, 16, 0.0)}
    assert sorted(one.adapter_id or "" for one in fixed) == sorted([f"adapter-{n}" for n in range(4)] * 4)
    drawn = only(tmp_path, in_dist="uniform", in_mean=256, in_max=512, out_mean=384, out_max=512, n=4000, c="", rate=4)
    rows = requests_of(drawn, 1).rows()
    prompts, outputs = ([getattr(one, name) for one in rows] for name in ("prompt_tokens", "output_tokens"))
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (1, 512, 256, 512)
    assert rows[-1].at_seconds == pytest.approx(1000, rel=0.1)
    sharegpt = requests_of(only(tmp_path, in_dist="sharegpt_in", in_mean=246, out_mean=235.2, n=4000), 1)
    assert np.mean(sharegpt.prompt_tokens) == pytest.approx(246, rel=0.01)
    assert np.max(sharegpt.prompt_tokens) == 1024


def test_a_pairs_ratio_is_to_the_run_with_the_fewest_adapters(tmp_path):
    one, eight = A10 | {"adapters": 1}, A10 | {"adapters": 8, "m_out_tps": 80.0}
    columns, rows = read_file(written(tmp_path / "r.csv", one, eight, one | {"m_out_tps": 60.0}, A10 | {"pair": ""}))
    comparison = posted.compare(columns, rows, posted.ADAPTERS_GROUPED_BY)
    found = list(posted.ratios(rows, comparison.predictions))
    ((row, figure, measured, predicted),) = found
    assert (row.adapters, figure, measured) == (8, "out_tps", 1.0)
    rates = [one.figures["out_tps"] for one in comparison.predictions]
    assert predicted == pytest.approx(rates[1] / rates[0])
    (group,) = (group for group in comparison.groups if group.key.get("kind") == "ratio")
    assert (group.figure, group.errors.median) == ("out_tps", pytest.approx((predicted - 1) * 100))


def test_a_figure_is_drawn_and_what_cannot_be_simulated_is_counted(tmp_path):
    file = written(tmp_path / "r.csv", A10 | {"m_ttft_p95": 50.0}, A10 | {"engine": "tgi-1"})
    code, output = run(file, "--plot", tmp_path / "r.png", "--seed", "3")
    assert code == 0
    assert "not predicted: 1 rows, the first in line 3" in output
    assert (tmp_path / "r.png").stat().st_size > 5000
    assert run(written(tmp_path / "none.csv", A10 | {"gpu": "TPU"}))[0] == 1


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"sets": "worker.gpu=H100"}, "sets is 'worker.gpu=H100'; it must be settings such as"),
        ({"sets": "{1: 2}"}, "sets is '{1: 2}'; it must be settings such as"),
        ({"sets": "{" * 500}, "it must be settings such as"),
        ({"in_dist": "zipf"}, "in_dist is 'zipf'; it must be fixed or uniform or sharegpt_in or sharegpt_out or trace"),
        ({"n": 0}, "n is '0'"),
        ({"in_dist": "uniform"}, "in_max is ''; lengths that are uniform up to it have a mean of at most that"),
        ({"in_dist": "uniform", "in_max": 96, "out_max": 15}, "out_max is '15'"),
        ({"m_out_tps": "fast"}, "m_out_tps is 'fast'; it must be a number above 0"),
    ],
)
def test_a_wrong_cell_is_refused_by_line_and_column(tmp_path, cells, said):
    with pytest.raises(FormatError, match=r"line 2: ") as refused:
        only(tmp_path, **cells)
    assert said in str(refused.value)


def test_only_percentiles_that_exist_are_measured(tmp_path):
    given = {"m_ttft_p99.9": 1.0, "m_ttft_p100": 1.0, "m_ttft_p150": 1.0, "m_ttft_px": 1.0, "m_ttft_std": 1.0}
    path = written(tmp_path / "r.csv", A10 | given, columns=[*COLUMNS, *given])
    assert set(read_file(path)[1][0].measured) == {"out_tps", "ttft_p99.9", "ttft_p100"}


def test_a_missing_column_is_named(tmp_path):
    path = written(tmp_path / "r.csv", A10, columns=[name for name in COLUMNS if name != "engine"])
    with pytest.raises(FormatError, match="no column engine; posted runs are read as docs"):
        read_file(path)
