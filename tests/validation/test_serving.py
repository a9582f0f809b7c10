"""`lorrery validate serving`: each row simulated or counted with the reason, and errors that are those of its rows."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation import serving
from lorrery.validation.figures import MEASURED_SERVING
from lorrery.validation.serving_rows import read_file
from lorrery.validation.serving_run import Options, load_options, predict, settings_of

HEADER = MEASURED_SERVING.read_text().splitlines()[0]
COLUMNS = HEADER.split(",")

VLLM: dict[str, object] = {
    "source": "inferencex", "backend": "vllm", "backend_version": "0.15.1", "model": "Llama-3.1-70B", "gpu": "H100-SXM",
    "weight_dtype": "fp8", "fp8_scaling": "tensor", "kv_dtype": "fp8", "tensor_parallel": 4, "concurrency": 4,
    "input_tokens": 1024, "output_tokens": 64, "length_ratio": 0.8, "requests_per_client": 10, "stream_interval": 1,
    "ttft_ms": 120.5, "tpot_ms": 12.25, "quality": "ok", "ttft_quality": "ok",
}  # fmt: skip
SGLANG = VLLM | {"source": "nvidia_internal", "backend": "sglang", "backend_version": "", "model": "Qwen3-32B"}


def row(cells: dict[str, object], **others: object) -> str:
    cells = cells | others
    return ",".join(str(cells.get(name, "")) for name in COLUMNS)


def written(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serving", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def in_json(path: Path, *arguments: str | Path) -> dict[str, Any]:
    out = path.with_suffix(".json")
    run(path, "--json", out, *arguments)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_rows_are_predicted_and_keep_their_columns(tmp_path):
    found = in_json(written(tmp_path / "s.csv", row(VLLM), row(SGLANG)))
    for one, cells in zip(found["rows"], (VLLM, SGLANG), strict=True):
        assert list(one) == [*COLUMNS, "predicted_tpot_ms", "predicted_ttft_ms"]
        assert {name: one[name] for name in cells if cells[name] != ""} == {k: v for k, v in cells.items() if v != ""}
        assert 1 < one["predicted_tpot_ms"] < 100
        assert 5 < one["predicted_ttft_ms"] < 5000


def test_errors_of_groups_and_overall_are_those_of_their_rows(tmp_path):
    rows = [row(VLLM, tensor_parallel=tp, concurrency=c, tpot_ms=5 + c) for tp in (4, 8) for c in (1, 4)]
    rows += [row(VLLM, ttft_quality="suspect_client_bound"), row(VLLM, quality="suspect_other_setup")]
    found = in_json(written(tmp_path / "s.csv", *rows), "--group", "tensor_parallel")
    tpot = [(one["predicted_tpot_ms"] / one["tpot_ms"] - 1) * 100 for one in found["rows"]]
    ttft = [(one["predicted_ttft_ms"] / one["ttft_ms"] - 1) * 100 for one in found["rows"]]
    four, eight, apart = found["groups"]
    assert [four["group"], eight["group"]] == [{"tensor_parallel": "4"}, {"tensor_parallel": "8"}]
    assert (four["rows"], four["ttft_rows"], eight["rows"]) == (3, 2, 2)
    assert four["tpot_mape"] == pytest.approx(mean(map(abs, (*tpot[:2], tpot[4]))), abs=0.01)
    assert four["ttft_mape"] == pytest.approx(mean(map(abs, ttft[:2])), abs=0.01)
    assert (apart["quality"], apart["rows"]) == ("suspect_other_setup", 1)
    overall = found["overall"]
    assert (overall["rows"], overall["ttft_rows"]) == (5, 4)
    assert overall["tpot_signed_median"] == pytest.approx(median(tpot[:5]), abs=0.01)


def test_a_row_does_not_depend_on_its_file_nor_on_the_number_of_processes(tmp_path):
    rows = [row(VLLM, concurrency=1 + n % 3, output_tokens=16 + n) for n in range(8)]
    whole = in_json(written(tmp_path / "w.csv", *rows), "--jobs", "2")
    part = in_json(written(tmp_path / "p.csv", *rows[5:6]))
    assert part["rows"][0] == whole["rows"][5]
    assert in_json(written(tmp_path / "o.csv", *rows[5:6]), "--seed", "7")["rows"][0] != whole["rows"][5]


def test_a_row_runs_as_its_source_ran_it(tmp_path):
    file = read_file(written(tmp_path / "s.csv", row(VLLM, concurrency=48), row(SGLANG, length_ratio="")))
    vllm, sglang = file.rows
    settings = settings_of(vllm, Options())
    assert (settings.engine, settings.worker.tensor_parallel, settings.worker.kv_dtype) == ("vllm-0.15", 4, "fp8")
    assert (settings.scheduler.max_num_seqs, settings.scheduler.max_num_batched_tokens) == (48, 8192)
    load = load_options(vllm, Options())
    assert (load.prompt_lengths, load.output_lengths, load.most_requests) == ((819, 1024), (51, 64), 480)
    assert settings_of(sglang, Options()).scheduler.batching == "sglang"
    assert load_options(sglang, Options()).prompt_lengths == (972, 1024)
    assert settings_of(sglang, Options(overrides=("scheduler.max_num_seqs=3",))).scheduler.max_num_seqs == 3


def test_messages_of_several_tokens_delay_the_first(tmp_path):
    file = read_file(written(tmp_path / "s.csv", row(VLLM), row(VLLM, stream_interval=20)))
    one, twenty = (predict(each, Options()) for each in file.rows)
    assert one.tpot_ms is not None
    assert one.ttft_ms is not None
    assert twenty.tpot_ms == pytest.approx(one.tpot_ms, rel=0.2)
    assert twenty.ttft_ms == pytest.approx(one.ttft_ms + 19 * one.tpot_ms, rel=0.1)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"weight_dtype": "nvfp8"}, "nvfp8"),
        ({"model": "DeepSeek-R1"}, "multi-head latent"),
        ({"moe_ep": 4}, "has no experts"),
        ({"gpu": "TPU"}, "TPU"),
        ({"backend": "tgi"}, "'tgi' is not known"),
        ({"tensor_parallel": 7}, "tensor_parallel 7"),
        ({"tensor_parallel": 1, "weight_dtype": "bfloat16"}, "does not fit"),
        ({"output_tokens": 1}, "no time per output token"),
        ({"input_tokens": 500_000}, "max_req_"),
    ],
)
def test_rows_that_cannot_be_simulated_are_counted_with_the_reason(tmp_path, cells, why):
    code, output = run(written(tmp_path / "s.csv", row(VLLM | cells), row(VLLM | cells)))
    assert code == 1
    assert "not predicted: 2 rows, the first in line 2: " in output
    assert why in output


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("tpot_ms", "nan", "it must be a number above 0"),
        ("ttft_ms", "-3", "it must be a number above 0"),
        ("concurrency", "4.5", "it must be a whole number"),
        ("concurrency", "1e12", "at most 100,000"),
        ("length_ratio", "1.5", "at most 1"),
        ("model", "", "it must be a name"),
        ("adapters", "5000", "at most 4,096"),
        ("adapter_projections", "lm_head", "it must be qkvo or all-linear"),
    ],
)
def test_a_cell_that_cannot_be_is_named(tmp_path, column, value, said):
    file = written(tmp_path / "s.csv", row(VLLM), row(VLLM, **{column: value}))
    with pytest.raises(FormatError, match=rf"s\.csv: line 3: {column} is .*{said}"):
        read_file(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "no UTF-8 text"),
        (b"a,b\n1,2\n", "line 1: no column backend, model"),
        (HEADER.encode() + b"\n", "a header and no rows"),
        ((HEADER + ",model\n").encode(), "model is there twice"),
        ((HEADER + "\n" + row(VLLM) + ",x\n").encode(), "line 2: more cells than the header"),
        (b"", "line 1: no column backend"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, said):
    file = tmp_path / "s.csv"
    file.write_bytes(content)
    with pytest.raises(FormatError, match=said):
        read_file(file)


def test_a_run_with_adapters_is_that_of_its_server_and_names_each_as_often(tmp_path):
    adapters = {
        "adapters": 5,
        "adapter_rank": 16,
        "adapter_projections": "all-linear",
        "max_loras": 2,
        "max_num_seqs": 9,
    }
    cells = VLLM | {"source": "", "backend_version": "0.24.0", "model": "Llama-3.1-8B"}
    base, own = read_file(written(tmp_path / "s.csv", row(cells), row(cells | adapters))).rows
    settings = settings_of(own, Options())
    assert (settings.adapters.max_loras, settings.adapters.target_modules) == (2, "all-linear")
    assert [(family.rank, family.count) for family in settings.adapters.registry] == [(16, 5)]
    assert settings.scheduler.max_num_seqs == 9
    load = load_options(own, Options())
    assert (load.adapters, load.adapter_exponent) == ("all", 0)
    assert (settings_of(base, Options()).adapters.registry, load_options(base, Options()).adapters) == ((), None)
    without, with_them = predict(base, Options()), predict(own, Options())
    assert with_them.tpot_ms is not None
    assert without.tpot_ms is not None
    assert with_them.tpot_ms > without.tpot_ms + 1


@pytest.mark.parametrize(
    ("version", "preset"),
    [("0.9.1", "0.11"), ("0.11.2", "0.11"), ("0.13.0rc2", "0.12"), ("0.31", "0.24"), ("nightly", "0.32")],
)
def test_a_version_that_is_not_known_runs_as_the_last_one_before_it(tmp_path, version, preset):
    (one,) = read_file(written(tmp_path / "s.csv", row(VLLM, backend_version=version))).rows
    assert settings_of(one, Options()).engine == f"vllm-{preset}"


def test_a_first_token_that_does_not_count_need_not_have_been_measured(tmp_path):
    path = written(tmp_path / "s.csv", row(VLLM, ttft_ms="", ttft_quality="not_measured"))
    assert dict(read_file(path).rows[0].measured) == {"tpot_ms": 12.25}
    assert run(path)[0] == 0
    with pytest.raises(FormatError, match="ttft_ms is ''; it must be a number above 0"):
        read_file(written(tmp_path / "t.csv", row(VLLM, ttft_ms="")))


def test_runs_of_a_batch_whose_prompts_are_cached_do_not_wait_for_prompts(tmp_path):
    batch = {"model": "Llama-3.1-8B", "tensor_parallel": 1, "concurrency": 32, "requests_per_client": 1}
    prompts = {"input_tokens": 2048}
    cached, fresh = read_file(
        written(tmp_path / "s.csv", *(row(VLLM, source=source, **batch, **prompts) for source in ("amd", "other")))
    ).rows
    assert load_options(cached, Options()).shared_prefix == (2032, 1)
    cached_ms, fresh_ms = (predict(one, Options()).tpot_ms for one in (cached, fresh))
    assert cached_ms < fresh_ms * 0.95


def test_a_run_without_a_version_is_of_the_one_that_its_source_ran(tmp_path):
    unknown = row(VLLM, backend_version="")
    other = row(VLLM, backend_version="", source="")
    of = [settings_of(one, Options()).engine for one in read_file(written(tmp_path / "s.csv", unknown, other)).rows]
    assert of == ["vllm-0.11", "vllm-0.32"]


def test_columns_to_group_by_must_be_there(tmp_path):
    with pytest.raises(SettingsError, match="no_such: no such column; there are id, source"):
        run(written(tmp_path / "s.csv", row(VLLM)), "--group", "gpu,no_such")


def test_the_shipped_runs_can_be_read():
    file = read_file(MEASURED_SERVING)
    assert sum(one.counts for one in file.rows) == 637
    assert set(serving.GROUPED_BY) <= set(file.columns)
