"""`lorrery validate kernels`: each row predicted or counted with the reason, and errors that are those of its rows."""

import gzip
import json
from pathlib import Path
from statistics import mean, median

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation.figures import MEASURED_KERNELS

HEADER = MEASURED_KERNELS.read_text().splitlines()[0]
COLUMNS = HEADER.split(",")


def row(**cells: object) -> str:
    return ",".join(str(cells.get(name, "")) for name in COLUMNS)


GEMM = {"gpu": "H100-SXM", "op": "gemm", "dtype": "bfloat16", "m": 64, "n": 4096, "k": 8192, "latency_us": 30.5}
DECODE = {
    "gpu": "H200-SXM", "op": "attention_decode", "dtype": "bfloat16", "kv_dtype": "bfloat16", "batch": 8,
    "q_heads": 32, "kv_heads": 8, "head_size": 128, "tokens": 4095, "latency_us": 40,
}  # fmt: skip
ALL_REDUCE = {
    "gpu": "B200", "op": "all_reduce", "dtype": "bfloat16", "kernel": "vLLM_custom_graph", "num_gpus": 8,
    "message_bytes": 2**20, "latency_us": 14,
}  # fmt: skip


def kernels(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["kernels", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def written(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def in_json(path: Path, *arguments: str | Path) -> dict[str, list[dict[str, object]]]:
    out = path.with_suffix(".json")
    kernels(path, "--json", out, *arguments)
    found: dict[str, list[dict[str, object]]] = json.loads(out.read_text())
    return found


def test_rows_are_predicted_and_keep_their_columns(tmp_path):
    found = in_json(written(tmp_path / "k.csv", row(**GEMM), row(**DECODE), row(**ALL_REDUCE)))
    for one, cells in zip(found["rows"], (GEMM, DECODE, ALL_REDUCE), strict=True):
        assert list(one) == [*COLUMNS, "predicted_us"]
        assert {name: one[name] for name in cells} == cells
        assert one["predicted_us"] > 0
        assert all(one[name] is None for name in COLUMNS if name not in cells)


def test_errors_of_a_group_are_those_of_its_rows(tmp_path):
    cells = [{"m": m, "n": n, "latency_us": 12 + m / 40} for m in (1, 64, 1000) for n in range(256, 8192, 512)]
    rows = [row(**{**GEMM, **one}) for one in cells]
    found = in_json(written(tmp_path / "k.csv", *rows))
    errors = [(one["predicted_us"] / one["latency_us"] - 1) * 100 for one in found["rows"]]
    (group,) = found["groups"]
    assert group["group"] == {"gpu": "H100-SXM", "op": "gemm", "dtype": "bfloat16", "kv_dtype": ""}
    assert group["rows"] == len(rows) == group["fitted"]["rows"] + group["judged"]["rows"]
    assert group["mape"] == pytest.approx(mean(map(abs, errors)), abs=0.01)
    assert group["signed_median"] == pytest.approx(median(errors), abs=0.01)
    parts = [(group[part]["mape"], group[part]["rows"]) for part in ("fitted", "judged")]
    assert all(rows for _, rows in parts)
    assert sum(mape * rows for mape, rows in parts) / len(rows) == pytest.approx(group["mape"])


def test_groups_are_by_the_columns_named(tmp_path):
    path = written(tmp_path / "k.csv", row(**GEMM), row(**{**GEMM, "m": 128}), row(**DECODE))
    assert [(one["group"], one["rows"]) for one in in_json(path, "--group", "op")["groups"]] == [
        ({"op": "attention_decode"}, 1),
        ({"op": "gemm"}, 2),
    ]
    assert len(in_json(path, "--group", "op,m", "--group", "gpu")["groups"]) == 3
    with pytest.raises(SettingsError, match="--group ranks: no such column; there are gpu, backend"):
        kernels(path, "--group", "ranks")
    with pytest.raises(SettingsError, match="--group gpu,: an empty name"):
        kernels(path, "--group", "gpu,")


def test_all_reduces_of_other_kernels_are_never_pooled(tmp_path):
    eager, nccl = {**ALL_REDUCE, "kernel": "vLLM_custom_eager"}, {**ALL_REDUCE, "kernel": "nccl"}
    found = in_json(written(tmp_path / "k.csv", row(**ALL_REDUCE), row(**eager), row(**nccl)), "--group", "gpu")
    assert {one["group"]["kernel"]: one["rows"] for one in found["groups"]} == {
        "vLLM_custom_graph": 1, "vLLM_custom_eager": 1, "nccl": 1,
    }  # fmt: skip


def test_messages_of_nvidias_rows_are_counted_in_numbers_of_two_bytes(tmp_path):
    own, theirs = row(**{**ALL_REDUCE, "message_bytes": 2**21}), row(**ALL_REDUCE, version="0.24.0")
    found = in_json(written(tmp_path / "k.csv", own, theirs))
    assert found["rows"][0]["predicted_us"] == found["rows"][1]["predicted_us"]
    assert [one["message_bytes"] for one in found["rows"]] == [2**21, 2**20]


def test_rows_that_cannot_be_predicted_are_counted_with_the_reason(tmp_path):
    rows = [
        row(**GEMM),
        row(**{**GEMM, "gpu": "Z9"}),
        row(**{**GEMM, "op": "conv3d"}),
        row(**{**GEMM, "dtype": "mxfp4"}),
        row(**{**ALL_REDUCE, "message_bytes": 2**29}),
        row(**{**GEMM, "gpu": "Z9", "m": 2}),
        row(**{**GEMM, "gpu": ""}),
    ]
    path = written(tmp_path / "k.csv", *rows)
    code, output = kernels(path)
    assert code == 0
    assert "not predicted: 2 rows, the first in line 3: GPU 'Z9' is not known" in output
    assert "not predicted: 1 rows, the first in line 4: op 'conv3d' is not known; known: gemm, attention_" in output
    assert "line 5: dtype 'mxfp4' is not known; known: bfloat16, " in output
    assert "line 6: a custom all-reduce of more than 256 MiB" in output
    assert "line 8: no GPU named; say which with --gpu" in output
    found = in_json(path)
    assert [one["predicted_us"] is None for one in found["rows"]] == [False, *[True] * 6]
    assert sum(one["rows"] for one in found["not_predicted"]) == 6
    assert "line 8" not in kernels(path, "--gpu", "A100")[1]
    assert kernels(written(path, rows[1]))[0] == 1


def test_a_gpu_of_ones_own_says_that_nothing_was_measured(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        'format = 1\n[[gpu]]\nname = "Z9"\ntflops = 300\nmemory_gb = 80\ngb_per_second = 2000\nnum_sms = 99\n'
    )
    code, output = kernels(written(tmp_path / "k.csv", row(**{**GEMM, "gpu": "z-9"})), "--catalogue", own)
    assert code == 0
    assert "no measurement" in output


MOE = {
    "gpu": "B200", "op": "moe", "tokens": 64, "hidden": 2048, "ffn": 768, "top_k": 8, "num_experts": 128,
    "latency_us": 50,
}  # fmt: skip
BAD_ROWS = {
    "m is 'abc'; it must be a whole number of at least 1": {**GEMM, "m": "abc"},
    "n is '-4'; it must be a whole number of at least 1": {**GEMM, "n": -4},
    "k is '0'; it must be a whole number": {**GEMM, "k": 0},
    "k is '1.5'; it must be a whole number": {**GEMM, "k": 1.5},
    "k is 'inf'; it must be a whole number": {**GEMM, "k": "inf"},
    "m is '1" + "0" * 39 + "'; it must be": {**GEMM, "m": "1" + "0" * 6000},
    "n is empty; op gemm needs m, n, k": {**GEMM, "n": ""},
    "latency_us is 'nan'; it must be a number of microseconds above 0": {**GEMM, "latency_us": "nan"},
    "latency_us is '-3'; it must be": {**GEMM, "latency_us": -3},
    "latency_us is ''; it must be": {**GEMM, "latency_us": ""},
    "q_heads is 12; it must be a multiple of kv_heads, 8": {**DECODE, "q_heads": 12},
    "top_k is 200; it must be at most num_experts, 128": {**MOE, "top_k": 200},
    "moe_ep is 200; it must be at most num_experts, 128": {**MOE, "moe_ep": 200},
    "num_gpus is 1; an all-reduce is over at least 2": {**ALL_REDUCE, "num_gpus": 1},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_row_that_cannot_be_is_refused_by_file_line_and_value(tmp_path, message):
    path = written(tmp_path / "k.csv", row(**GEMM), row(**BAD_ROWS[message]))
    with pytest.raises(FormatError) as refused:
        kernels(path)
    assert str(refused.value).startswith(f"{path}: line 3: {message}")
    assert len(str(refused.value)) < len(str(path)) + 200


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "k.csv"

    def refusal(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(FormatError) as refused:
            kernels(path)
        assert str(refused.value).startswith(f"{path}: ")
        return str(refused.value)

    assert "is empty; the first line names the columns" in refusal(b"")
    assert "a header and no rows" in refusal(HEADER.encode())
    assert "line 1: no column op, latency_us; there are phase, step_ms" in refusal(b"phase,step_ms\n")
    assert "line 1: column op is there twice" in refusal(b"op,op,latency_us\n")
    assert "line 2: 1 cells for the 25 columns" in refusal(HEADER.encode() + b"\ngemm\n")
    assert "no UTF-8 text" in refusal(HEADER.encode() + b"\n\xff\xfe\x00\n")
    assert "kv_heads is not in the header" in refusal(
        b"op,latency_us,batch,tokens,q_heads,head_size\nattention_decode,3,1,1,1,64\n"
    )
    whole = gzip.compress(MEASURED_KERNELS.read_bytes())
    assert "cut or damaged gzip" in refusal(whole[: len(whole) // 2])
    assert "cut or damaged gzip" in refusal(whole[:3000] + b"\x00" * 50 + whole[3050:])


def test_figures_as_data_frames_write_them_and_gzip_and_a_byte_order_mark_are_read(tmp_path):
    plain = in_json(written(tmp_path / "k.csv", row(**GEMM)))["rows"]
    path = tmp_path / "frame.csv.gz"
    frame = "\ufeff" + HEADER + "\r\n" + row(**{**GEMM, "m": "64.0", "n": "4096.0", "k": "8192.0"}) + "\r\n"
    path.write_bytes(gzip.compress(frame.encode()))
    assert in_json(path)["rows"] == plain


def test_without_a_file_the_shipped_excerpt_is_judged(tmp_path):
    out = tmp_path / "out.json"
    assert kernels("--json", out)[0] == 0
    found = json.loads(out.read_text())
    assert len(found["rows"]) > 3000
    assert {one["gpu"] for one in found["rows"]} == {
        "A100-80-SXM", "H100-SXM", "H200-SXM", "B200", "B300", "GB200", "GB300", "L40S", "RTX-PRO-6000", "MI300X",
        "MI355X",
    }  # fmt: skip
    predicted = [one for one in found["rows"] if one["predicted_us"] is not None]
    assert sum(one["rows"] for one in found["groups"]) == len(predicted)
    assert len(found["rows"]) - len(predicted) == sum(one["rows"] for one in found["not_predicted"])


def test_the_figure_has_a_panel_for_each_op_and_type(tmp_path):
    path, figure = written(tmp_path / "k.csv", row(**GEMM), row(**DECODE), row(**ALL_REDUCE)), tmp_path / "k.svg"
    assert kernels(path, "--plot", figure)[0] == 0
    drawn = figure.read_text()
    for text in ("gemm bfloat16", "attention_decode bfloat16", "all_reduce vLLM_custom_graph", "H100-SXM", "B200"):
        assert f">{text}<" in drawn, text
    with pytest.raises(SettingsError, match=r"the name must end in \.svg, \.png, \.pdf"):
        kernels(path, "--plot", tmp_path / "k.txt")


LORA = {
    "gpu": "H100-SXM", "op": "lora", "tokens": 64, "inner": 4096, "outer": 6144, "widest": 4096, "slices": 3,
    "adapters": 8, "max_loras": 64, "rank": 16, "latency_us": 62.16,
}  # fmt: skip
LORA_HEADER = ",".join(LORA)


def test_adapters_are_predicted_by_the_grouped_kernels(tmp_path):
    path = written(tmp_path / "l.csv", ",".join(map(str, LORA.values())), header=LORA_HEADER)
    (found,) = in_json(path)["rows"]
    assert found["predicted_us"] == pytest.approx(62.16, rel=0.2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"adapters": 65, "max_loras": 65}, "adapters is 65; it must be at most tokens, 64"),
        ({"max_loras": 7}, "adapters is 8; it must be at most max_loras, 7"),
        ({"widest": 2047}, "widest is 2047; the widest of 3 slices of 6144 in all is from 2048 to 6142"),
        ({"widest": 6143}, "from 2048 to 6142"),
        ({"rank": 0}, "rank is '0'; it must be a whole number of at least 1"),
    ],
)
def test_adapters_that_no_kernel_runs_are_refused(tmp_path, changed, says):
    path = written(tmp_path / "l.csv", ",".join(map(str, {**LORA, **changed}.values())), header=LORA_HEADER)
    with pytest.raises(FormatError, match=says):
        kernels(path)


SEGMENTED = {
    "gpu": "H100-SXM", "op": "lora_segmented", "tokens": 64, "inner": 4096, "outer": 6144, "slices": 3,
    "segments": 8, "slots": 256, "rank": 16, "latency_us": 28.99,
}  # fmt: skip
SEGMENTED_HEADER = ",".join(SEGMENTED)


def test_adapters_are_predicted_by_the_segmented_kernels(tmp_path):
    path = written(tmp_path / "l.csv", ",".join(map(str, SEGMENTED.values())), header=SEGMENTED_HEADER)
    (found,) = in_json(path)["rows"]
    assert found["predicted_us"] == pytest.approx(28.99, rel=0.15)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"segments": 3}, "segments is 3; 64 tokens make from 4 to 64 segments of at most 16"),
        ({"segments": 65}, "segments is 65; 64 tokens make from 4 to 64"),
        ({"slots": 7}, "segments is 8; it must be at most slots, 7"),
        ({"slots": ""}, "slots is empty; op lora_segmented needs tokens, inner, outer, slices, segments, slots, rank"),
    ],
)
def test_segments_that_no_kernel_runs_are_refused(tmp_path, changed, says):
    path = written(tmp_path / "l.csv", ",".join(map(str, {**SEGMENTED, **changed}.values())), header=SEGMENTED_HEADER)
    with pytest.raises(FormatError, match=says):
        kernels(path)


def test_the_published_kernels_are_those_of_all_files():
    code, output = kernels("--group", "op")
    assert code == 0
    for text in ("moe", "lora", "4,805", "lora_segmented", "5,686"):
        assert text in output
