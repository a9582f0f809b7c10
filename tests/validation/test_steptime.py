"""`lorrery validate steptime`: the errors it finds, in the published measurements too."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation.figures import MEASURED_STEPS
from lorrery.validation.steptime import compare, read_file
from lorrery.worker.build import read_catalogue

HEADER = "source,gpu,model,tp,phase,num_tokens,batch_size,kv_len,prefill_chunk,prefill_kv_prefix,quality"
HEADER += ",measured_step_ms,measured_linear_ms,num_layers"
# Four rows of the published files.
ROWS = [
    "vidur,a100,Llama-2-7b,1,decode,32,32,512,,,ok,15.456,,32",
    "vidur,a100,Llama-2-7b,1,linear,1,,,,,ok,,9.28,32",
    "vidur,a100,Llama-2-70b,2,mixed,544,33,2048,512,0,ok,233.72,,80",
    "llmservingsim,rtxpro6000,Llama-3.1-8B,1,prefill,1024,1,,1024,2048,ok,46.497,,32",
]


def steptime(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["steptime", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_errors_are_printed_and_written(tmp_path):
    file, out = write(tmp_path / "m.csv", *ROWS), tmp_path / "out.json"
    code, output = steptime(str(file), "--json", str(out))
    assert code == 0
    assert "MAPE %" in output
    rows = json.loads(out.read_text())["rows"]
    assert all(row.keys() == {"gpu", "model", "source", "phase", "n", "mape", "p95"} for row in rows)
    decode = next(row for row in rows if row["phase"] == "decode" and row["model"] == "*")
    assert (decode["gpu"], decode["source"], decode["n"]) == ("a100", "vidur", 1)
    assert decode["mape"] == pytest.approx(abs(15.2846 / 15.456 - 1) * 100, abs=0.01)
    assert {row["model"] for row in rows} == {"*", "Llama-2-7b", "Llama-2-70b", "Llama-3.1-8B"}


def test_without_a_file_the_shipped_measurements_are_judged(tmp_path):
    out = tmp_path / "out.json"
    code, _ = steptime("--json", str(out))
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["source"] for row in rows} == {"vidur", "llmservingsim", "splitwise_e2e"}
    assert sum(row["n"] for row in rows if row["model"] == "*") == 1984


def test_rows_that_name_no_gpu_or_model_are_judged_once_they_are_named(tmp_path):
    bare = [row.replace("a100", "").replace("Llama-2-7b", "") for row in ROWS[:2]]
    file = write(tmp_path / "m.csv", *bare)
    code, output = steptime(str(file))
    assert code == 1
    assert "left out 2 rows: no GPU named; say which with --gpu" in output
    code, output = steptime(str(file), "--gpu", "a100")
    assert code == 1
    assert "left out 2 rows: no model named; say which with --model" in output
    code, output = steptime(str(file), "--gpu", "a100", "--model", "Llama-2-7b")
    assert code == 0
    assert "left out" not in output
    assert output == steptime(str(write(tmp_path / "named.csv", *ROWS[:2])))[1]


def test_a_name_given_is_not_taken_for_rows_that_have_one(tmp_path):
    file = write(tmp_path / "m.csv", *ROWS)
    assert steptime(str(file), "--gpu", "h100", "--model", "phi-2")[1] == steptime(str(file))[1]


def test_rows_without_their_time_are_counted(tmp_path):
    file = write(tmp_path / "m.csv", *ROWS, ROWS[0].replace("15.456", ""))
    assert "left out 1 rows: no time of their phase (measured_step_ms or step_ms;" in steptime(str(file))[1]


def test_rows_of_other_quality_count_only_if_asked(tmp_path):
    file = write(tmp_path / "m.csv", *ROWS, ROWS[0].replace(",ok,", ",suspect,"))
    _, output = steptime(str(file))
    assert "left out 1 rows: quality is suspect" in output
    _, output = steptime(str(file), "--all")
    assert "left out" not in output


def test_gpus_and_models_that_are_not_known_are_told_and_the_rest_compared(tmp_path):
    rows = [ROWS[0], ROWS[0].replace("a100", "z9"), ROWS[0].replace("Llama-2-7b", "Nobody-3B")]
    code, output = steptime(str(write(tmp_path / "m.csv", *rows)))
    assert code == 0
    assert "left out 1 rows: GPU 'z9' is not known; known: A10, A10G" in output
    assert "left out 1 rows: model 'Nobody-3B' is not known; known: Llama-2-7B" in output
    code, _ = steptime(str(write(tmp_path / "m.csv", rows[1])))
    assert code == 1


def test_own_catalogue_brings_the_gpu(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        'format = 1\n[[gpu]]\nname = "z9"\ntflops = 312\nmemory_gb = 80\ngb_per_second = 2039\nnum_sms = 108\n'
    )
    file = write(tmp_path / "m.csv", ROWS[0].replace("a100", "z9"))
    code, output = steptime(str(file), "--catalogue", str(own))
    assert code == 0
    assert "z9" in output


@pytest.mark.parametrize("model", ["llm-mock", "naive-roofline", "roofline"])
def test_every_model_can_be_held_against_measurements(tmp_path, model):
    code, output = steptime(str(write(tmp_path / "m.csv", *ROWS)), "--step-time", model)
    assert code == 0
    assert ("linear, which llm-mock does not tell apart" in output) == (model == "llm-mock")


def test_a_table_learns_from_half_of_the_rows(tmp_path):
    decode = "vidur,a100,Llama-2-7b,1,decode,{b},{b},512,,,ok,{ms},,32"
    rows = [decode.format(b=b, ms=10 + b / 10) for b in range(1, 10)]
    rows += [f"vidur,a100,Llama-2-7b,1,prefill,{n},1,,{n},0,ok,11,,32" for n in (9, 10)]
    out = tmp_path / "out.json"
    code, output = steptime(str(write(tmp_path / "m.csv", *rows)), "--step-time", "table", "--json", str(out))
    assert code == 0, output
    (decode,) = (row for row in json.loads(out.read_text())["rows"] if row["phase"] == "decode" and row["model"] == "*")
    assert decode["n"] == 4
    assert decode["mape"] == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"m\.csv: line 2: phase 'x' is not known"):
        steptime(str(write(tmp_path / "m.csv", ROWS[0].replace("decode", "x"))))
    with pytest.raises(SettingsError, match="--step-time x: no such model; there are roofline"):
        steptime(str(write(tmp_path / "m.csv", *ROWS)), "--step-time", "x")


BARS = {"decode": 4.0, "prefill": 5.0, "mixed": 6.0, "linear": 6.0}
SPLITWISE_BARS = {"decode": 4.0, "prefill": 9.0}


def test_published_measurements_are_met_within_the_error_bars():
    comparison = compare(read_file(MEASURED_STEPS), read_catalogue())
    assert set(comparison.left_out) == {"quality is suspect", "quality is proxy_prefill_attention"}
    totals = [row for row in comparison.rows if row.model == "*"]
    assert len(totals) == 17
    for row in totals:
        bar = (SPLITWISE_BARS if row.source == "splitwise_e2e" else BARS)[row.phase]
        if (row.gpu, row.phase) == ("rtx4090", "mixed"):
            bar = 8.0
        assert row.mape <= bar, row
