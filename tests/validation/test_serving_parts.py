"""`lorrery validate serving`: what causes are worth, groups left out, and the figure."""

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import SettingsError
from lorrery.validation import serving
from lorrery.validation.figures import MEASURED_SERVING
from lorrery.validation.serving_ablation import CAUSES, named, without
from lorrery.validation.serving_rows import ServingRow, read_file
from lorrery.validation.serving_run import (
    Options,
    Prediction,
    load_options,
    predict,
    settings_of,
    tables_of,
    write_changed,
)
from lorrery.worker.build import deployment_of, read_catalogue
from tests.validation.test_serving import SGLANG, row, written

ROWS = read_file(MEASURED_SERVING).rows


def quick(**cells: object) -> ServingRow:
    """Return the measured row of these values that is simulated the quickest."""
    found = [one for one in ROWS if all(getattr(one, name) == value for name, value in cells.items())]
    return min(found, key=lambda one: one.concurrency * one.output_tokens)


@cache
def as_shipped(line: int) -> Prediction:
    return predict(next(one for one in ROWS if one.line == line), Options())


VLLM = quick(backend="vllm", quality="ok", gpu="H100-SXM", tensor_parallel=8, weight_dtype="fp8")
TRTLLM = quick(backend="trtllm", quality="ok", gpu="H100-SXM", weight_dtype="fp8", tensor_parallel=2)
STREAMED = quick(backend="trtllm", quality="ok", gpu="B200", stream_interval=20, tensor_parallel=4)
EXPERTS = quick(quality="moe")
SHOWN_BY = dict.fromkeys(CAUSES, VLLM) | {
    "query-key-norms": TRTLLM, "client-time": TRTLLM, "messages": STREAMED, "expert-padding": EXPERTS,
    "expert-imbalance": EXPERTS, "prefill-form": TRTLLM, "reported-memory": None,
    "engine-factors": STREAMED,
}  # fmt: skip
"""A row that each cause is part of; None: memory, which no quick row runs out of."""


@pytest.mark.parametrize(("cause", "shown"), SHOWN_BY.items())
def test_each_cause_can_be_left_out_and_is_part_of_a_row(tmp_path: Path, cause: str, shown: ServingRow | None):
    options = without(cause, Options(), tmp_path)
    if shown is None:
        pools = [deployment_of(settings_of(VLLM, one)).kv_pool_tokens() for one in (Options(), options)]
        assert pools[0] > pools[1]
        return
    before, after = as_shipped(shown.line), predict(shown, options)
    assert not after.why
    assert (before.tpot_ms, before.ttft_ms) != (after.tpot_ms, after.ttft_ms)


def test_without_drawn_lengths_all_are_the_longest(tmp_path: Path):
    load = load_options(VLLM, without("drawn-lengths", Options(), tmp_path))
    assert load.output_lengths == (VLLM.output_tokens, VLLM.output_tokens)


def test_a_changed_catalogue_has_the_entries_that_changed(tmp_path: Path):
    before = read_catalogue()
    files = write_changed(tmp_path / "c.toml", (), lambda tables: tables["engines"]["vllm"].update(step_ms=7.5))
    after = read_catalogue(files)
    assert after.engines["vllm"].step_ms == 7.5
    assert {name for name in before.engines if before.engines[name] != after.engines[name]} == {"vllm"}
    assert after.gpus == before.gpus
    assert tables_of(files)["engines"]["vllm"]["step_ms"] == 7.5
    everything = write_changed(tmp_path / "all.toml", (), lambda tables: [_marked(t) for t in tables["fits"].values()])
    assert read_catalogue(everything).fits.keys() == before.fits.keys()


def _marked(entry: dict[str, object]) -> None:
    entry["source"] = 'a "source" of one\'s own'


def test_a_cause_that_there_is_not_is_named():
    assert named(["types", "types"]) == ["types"]
    assert named(["types", "all"]) == list(CAUSES)
    with pytest.raises(SettingsError, match=r"--without weather: no such cause; there are host-time, .*, all"):
        named(["types", "weather"])


def test_every_nth_row_of_each_group_is_kept():
    file = read_file(MEASURED_SERVING)
    few = serving.every(file, 10)
    groups = {tuple(one.cells[name] for name in ("quality", *serving.GROUPED_BY)) for one in file.rows}
    assert {tuple(one.cells[name] for name in ("quality", *serving.GROUPED_BY)) for one in few.rows} == groups
    assert len(file.rows) / 10 <= len(few.rows) <= len(file.rows) / 10 + len(groups)
    assert serving.every(file, 1).rows == list(file.rows)


def test_ablations_and_left_out_groups_are_shown_and_written(tmp_path: Path):
    """Two groups of one engine, of which each is predicted with constants of the other."""
    short = SGLANG | {"concurrency": 2, "requests_per_client": 2, "input_tokens": 256, "output_tokens": 16}
    other = {"model": "Llama-3.1-8B", "gpu": "H200-SXM", "tensor_parallel": 1}
    path, out, plot = (
        written(tmp_path / "s.csv", row(short), row(short, **other)),
        tmp_path / "s.json",
        tmp_path / "s.svg",
    )
    arguments = [str(path), "--json", str(out), "--without", "host-time", "--leave-one-out", "--plot", str(plot)]
    result = CliRunner().invoke(app, ["serving", *arguments, "--jobs", "1"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "host-time  the CPU takes no time" in result.output
    found = json.loads(out.read_text())
    *groups, overall = found["ablations"]
    assert (overall["group"], overall["rows"], overall["rows_changed"]) == ({}, 2, 2)
    assert [group["rows"] for group in groups] == [1, 1]
    assert overall["tpot_mape"] == found["overall"]["tpot_mape"] != overall["tpot_mape_without"]
    for group, donor in zip(found["left_out"], ("Qwen3-32B", "Llama-3.1-8B"), strict=True):
        assert f"1 rows of {donor}" in group["constants_from"]
        assert group["tpot_mape_left_out"] != group["tpot_mape"]
        assert group["constants"]["step_ms"] >= 0
    drawn = plot.read_text()
    assert "TPOT" in drawn
    assert "Qwen3-32B" in drawn


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), {"no other rows"}),
        (("worker.engine=present-day",), {"no other rows"}),
        (("worker.engine=vidur-kernels",), {"no constants"}),
    ],
)
def test_a_group_of_which_nothing_can_be_left_out_says_so(tmp_path: Path, overrides: tuple[str, ...], why: set[str]):
    short = SGLANG | {"concurrency": 2, "requests_per_client": 2, "input_tokens": 64, "output_tokens": 8}
    rows = [row(short)]
    if why == {"no constants"}:
        rows.append(row(short, model="Llama-3.1-8B", gpu="H200-SXM", tensor_parallel=1))
    path, out = written(tmp_path / "s.csv", *rows), tmp_path / "s.json"
    sets = [part for one in overrides for part in ("--set", one)]
    arguments = ["serving", str(path), "--json", str(out), "--leave-one-out", "--jobs", "1", *sets]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["left_out"]
    assert len(found) == len(rows)
    assert {one["constants_from"] for one in found} == why
    assert all(one["tpot_mape"] is not None and one["tpot_mape_left_out"] is None for one in found)
    assert why.pop() in result.output
