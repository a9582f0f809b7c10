"""`lorrery calibrate`: finds the constants that a profile was made with, and writes what the settings read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.calibrate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue.hardware import KernelFit
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE

TRUE_FIT = KernelFit.of_constants(
    {
        "gemm_flops": 0.62,
        "gemm_bandwidth": 0.80,
        "gemm_us": 7.0,
        "elementwise_bandwidth": 0.70,
        "elementwise_us": 2.0,
        "decode_bandwidth": 0.75,
        "prefill_flops": 0.55,
        "attention_us": 9.0,
        "gemm_tile": 128,
    }
)
SHEET = ["--tflops", "200", "--memory-gb", "48", "--gb-per-second", "1000", "--num-sms", "90"]


def calibrate(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def profile(path: Path, *, host_ms: float = 0.0, gpu: str = "Z1") -> Path:
    """A profile as a GPU with `TRUE_FIT` would give it."""
    chip = replace(CATALOGUE.gpu("A100"), name=gpu, tflops=200, memory_gb=48, gb_per_second=1000, num_sms=90)
    model = Roofline(
        Deployment(chip.with_fit(TRUE_FIT), CATALOGUE.model("Llama-3-8B"), engine=CATALOGUE.engine("vllm-kernels"))
    )
    lines = ["gpu,model,phase,num_tokens,batch_size,kv_len,prefill_chunk,prefill_kv_prefix,step_ms,measured_linear_ms"]
    for num in (1, 8, 32, 128):
        for kv in (128, 1024, 4096):
            ms = model.step_ps(Batch((), num, num * kv, kv)) / 1e9 + host_ms
            lines.append(f"{gpu},Llama-3-8B,decode,,{num},{kv},,,{ms:.4f},")
    for new in (64, 300, 512, 1500, 4000):
        for past in (0, 2000):
            ms = model.step_ps(Batch((PrefillChunk(new, past, samples=True),))) / 1e9 + host_ms
            lines.append(f"{gpu},Llama-3-8B,prefill,,,,{new},{past},{ms:.4f},")
    lines += [
        f"{gpu},Llama-3-8B,linear,{num},,,,,,{model.linear_seconds(num) * 1e3:.4f}"
        for num in (1, 16, 64, 128, 512, 1024, 3000)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def errors(output: str) -> dict[str, float]:
    """Phase -> MAPE after the fit."""
    found = re.findall(r"^(decode|prefill|linear) +\d+ +[\d.]+ +([\d.]+)", output, re.MULTILINE)
    return {phase: float(mape) for phase, mape in found}


def test_a_new_gpu_is_fitted_and_its_file_serves(tmp_path):
    out = tmp_path / "z1.toml"
    output = calibrate(str(profile(tmp_path / "p.csv")), *SHEET, "--out", str(out))
    assert errors(output).keys() == {"linear", "decode", "prefill"}
    assert all(mape < 1.0 for mape in errors(output).values()), output
    gpu = read_catalogue([out]).gpu("Z1")
    assert gpu.tflops == 200
    assert gpu.fit.constants["gemm_tile"] == 128
    assert gpu.fit.constants["gemm_bandwidth"] == pytest.approx(TRUE_FIT.constants["gemm_bandwidth"], rel=0.1)
    assert gpu.fit.constants["decode_bandwidth"] == pytest.approx(TRUE_FIT.constants["decode_bandwidth"], rel=0.1)
    assert gpu.fit.constants["prefill_flops"] == pytest.approx(TRUE_FIT.constants["prefill_flops"], rel=0.15)


def test_a_file_that_cannot_be_written_is_refused_before_the_fit(tmp_path):
    with pytest.raises(SettingsError, match=r"--out .*: that is in .*, which is no folder"):
        calibrate(str(profile(tmp_path / "p.csv")), *SHEET, "--out", str(tmp_path / "none" / "z1.toml"))


def test_rows_of_doubtful_quality_are_not_fitted(tmp_path):
    header, *rows = profile(tmp_path / "p.csv").read_text().splitlines()
    doubtful = [f"Z1,Llama-3-8B,decode,,{num},1024,,,900,,suspect" for num in (1, 8, 32)]
    path = tmp_path / "q.csv"
    path.write_text("\n".join([header + ",quality", *(row + ",ok" for row in rows), *doubtful]))
    output = calibrate(str(path), *SHEET)
    assert "fitting 29 rows of Z1" in output
    assert all(mape < 1.0 for mape in errors(output).values()), output


def test_the_constants_written_are_fitted_to_all_rows(tmp_path):
    header, *rows = profile(tmp_path / "p.csv").read_text().splitlines()
    prefills = [row for row in rows if ",prefill," in row]
    others = [row for row in rows if ",prefill," not in row][-len(prefills) :]
    path, out = tmp_path / "q.csv", tmp_path / "z1.toml"
    path.write_text("\n".join([header, *(row for pair in zip(others, prefills, strict=True) for row in pair)]))
    calibrate(str(path), *SHEET, "--out", str(out))
    # Every other row alone has no prefill, and leaves this constant near its default of 0.47.
    assert read_catalogue([out]).gpu("Z1").fit.constants["prefill_flops"] == pytest.approx(
        TRUE_FIT.constants["prefill_flops"], rel=0.03
    )


def test_rows_between_those_of_the_half_fit_are_the_unseen_ones(tmp_path):
    header, *rows = profile(tmp_path / "p.csv").read_text().splitlines()
    lines = [header]
    for row in (row for row in rows if ",decode," in row):
        *cells, step_ms, linear_ms = row.split(",")
        lines += [row, ",".join([*cells, str(2 * float(step_ms)), linear_ms])]
    path = tmp_path / "q.csv"
    path.write_text("\n".join(lines))
    unseen = re.search(r"^decode +24 .* ([\d.]+) *$", calibrate(str(path), *SHEET), re.MULTILINE)
    # The half fit saw only the fast ones: half of what each slow one took is missing.
    assert float(unseen[1]) == pytest.approx(50, abs=2)


def test_rows_without_their_time_are_not_fitted_but_counted(tmp_path):
    path = profile(tmp_path / "p.csv")
    with path.open("a") as file:
        file.write("Z1,Llama-3-8B,decode,,8,1024,,,,\n")
    output = calibrate(str(path), *SHEET)
    assert "left out 1 rows: no time of their phase" in output
    assert "fitting 29 rows of Z1" in output


def test_a_row_that_lacks_what_its_phase_needs_is_refused(tmp_path):
    header, *rows = profile(tmp_path / "p.csv").read_text().splitlines()
    path = tmp_path / "q.csv"
    without = header.split(",").index("kv_len")
    lines = [line.split(",") for line in (header, *rows)]
    path.write_text("\n".join(",".join(cells[:without] + cells[without + 1 :]) for cells in lines))
    with pytest.raises(FormatError, match=r"q\.csv: line 2: phase decode needs kv_len, which is not in the header"):
        calibrate(str(path), *SHEET)
    path.write_text("\n".join([header, *rows, "Z1,Llama-3-8B,decode"]))
    with pytest.raises(FormatError, match=r"q\.csv: line 31: 3 cells for the 10 columns of the header"):
        calibrate(str(path), *SHEET)


def test_a_gpu_faster_than_its_data_sheet_is_doubted(tmp_path):
    path = profile(tmp_path / "p.csv")
    assert "warning" not in calibrate(str(path), *SHEET)
    slow_sheet = ["--tflops", "200", "--memory-gb", "48", "--gb-per-second", "600", "--num-sms", "90"]
    output = calibrate(str(path), *slow_sheet)
    assert re.search(r"warning: gemm_bandwidth is 1\.\d\d: faster than the data sheet's memory bandwidth", output)
    assert "elementwise_bandwidth is" not in output


def test_the_cpus_share_is_fitted_if_asked(tmp_path):
    out = tmp_path / "z1.toml"
    path = profile(tmp_path / "p.csv", host_ms=3.0)
    output = calibrate(str(path), *SHEET, "--host", "--out", str(out))
    assert all(mape < 2.0 for mape in errors(output).values()), output
    assert read_catalogue([out]).engine("z1-engine").step_ms == pytest.approx(3.0, abs=0.8)


def test_constants_that_no_row_tells_stay(tmp_path):
    lines = profile(tmp_path / "p.csv").read_text().splitlines()
    (tmp_path / "q.csv").write_text("\n".join(line for line in lines if ",prefill," not in line))
    output = calibrate(str(tmp_path / "q.csv"), *SHEET)
    assert re.search(r"prefill_flops +0\.47 +0\.47", output)


def test_a_known_gpu_needs_no_data_sheet(tmp_path):
    output = calibrate(str(profile(tmp_path / "p.csv", gpu="L40S")))
    assert "fitting 29 rows of L40S" in output


def test_what_cannot_be_fitted_is_refused(tmp_path):
    path = profile(tmp_path / "p.csv")
    with pytest.raises(SettingsError, match=r"GPU 'Z1' is not known.*give its data sheet with --tflops"):
        calibrate(str(path))
    with pytest.raises(SettingsError, match="--tflops, --memory-gb, --gb-per-second and --num-sms go together"):
        calibrate(str(path), "--tflops", "3")
    with pytest.raises(FormatError, match="0 rows of A40 to fit to"):
        calibrate(str(path), "--gpu", "A40")
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows, rows[0].replace("Z1", "Z2")]))
    with pytest.raises(SettingsError, match="rows of Z1, Z2: say which with --gpu"):
        calibrate(str(path), *SHEET)
    path.write_text("\n".join([header, *(row.replace("Llama-3-8B", "") for row in rows)]))
    with pytest.raises(SettingsError, match="rows that name no model: say which with --model"):
        calibrate(str(path), *SHEET)
    assert "fitting 29 rows" in calibrate(str(path), *SHEET, "--model", "Llama-3-8B")
