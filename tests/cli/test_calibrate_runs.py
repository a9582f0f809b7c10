"""`lorrery calibrate` of benchmark results finds the factors that the runs were made with, and says what is unknown."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.calibrate import app
from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.validation.posted import PostedRow, predict
from lorrery.validation.serving_run import Options
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.calibration.catalogue_file import to_toml
from tests.worker.device.known import CATALOGUE

SHEET = ["--gpu", "Z1", "--tflops", "200", "--memory-gb", "48", "--gb-per-second", "1000", "--num-sms", "90"]
LOADS = [(4, 1, 2000, 10), (4, 1, 100, 30), (16, 8, 600, 20), (20, 20, 1500, 10)]


def calibrate(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a GPU whose products and attention are 0.7 times as fast as the default's, its memory 0.8 times."""
    folder = tmp_path_factory.mktemp("runs")
    fit = CATALOGUE.fits["default-modern"]
    bf16, attention = fit.gemm["bf16"], fit.attention["bf16"]
    slow = replace(
        fit,
        gemm={"bf16": replace(bf16, flops=0.7 * bf16.flops, bandwidth=0.8 * bf16.bandwidth)},
        attention={
            "bf16": replace(
                attention,
                prefill_flops=0.7 * attention.prefill_flops,
                decode_bandwidth=0.8 * attention.decode_bandwidth,
            )
        },
    )
    gpu = replace(
        CATALOGUE.gpu("A100-80-SXM"), name="Z1", tflops=200, memory_gb=48, gb_per_second=1000, num_sms=90,
        usable_memory_gb=None, modern_fit=slow,
    )  # fmt: skip
    (folder / "truth.toml").write_text(to_toml(gpu, "the truth", modern=True))
    blocks = []
    for number, clients, prompt, output in LOADS:
        flags = {"model": "Llama-3.1-8B", "worker.gpu": "Z1"}
        row = PostedRow(
            0, {}, "ok", True, "", "vllm", "0.24", number, clients, None,
            (("fixed", prompt, 0), ("fixed", output, 0)), None, 0, flags, {"out_tps": 1.0, "ttft": 1.0, "tpot": 1.0},
        )  # fmt: skip
        figures = predict(row, Options((folder / "truth.toml",))).figures
        blocks.append(
            "============ Serving Benchmark Result ============\n"
            f"Successful requests: {number}\nMaximum request concurrency: {clients}\n"
            f"Total input tokens: {number * prompt}\nTotal generated tokens: {number * output}\n"
            f"Output token throughput (tok/s): {figures['out_tps']:.2f}\n"
            f"Mean TTFT (ms): {figures['ttft']:.2f}\nMean TPOT (ms): {figures['tpot']:.2f}\n"
        )
    path = folder / "pasted.txt"
    path.write_text("$ vllm serve meta-llama/Llama-3.1-8B\n" + "\n".join(blocks))
    return path


def test_what_a_new_gpu_does_is_found_from_a_few_runs_of_a_benchmark(pasted: Path, tmp_path: Path):
    out = tmp_path / "z1.toml"
    output = calibrate(pasted, *SHEET, "--engine", "vllm-0.24", "--out", out)
    found = {
        name: float(value) for name, value in re.findall(r"^(\w+) +1 x +([\d.]+) x +\d+ +fitted", output, re.MULTILINE)
    }
    assert found == {"flops": pytest.approx(0.7, rel=0.06), "bandwidth": pytest.approx(0.8, rel=0.06)}
    means = re.findall(r"^mean .*?([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert len(means) == 3
    assert all(float(fitted) < 3 and float(unseen) < 5 for _, fitted, unseen in means), output

    known = read_catalogue([out])
    gpu, default = known.gpu("Z1"), CATALOGUE.fits["default-modern"]
    assert gpu.modern_fit.gemm["bf16"].flops == pytest.approx(0.7 * default.gemm["bf16"].flops, rel=0.06)
    assert set(gpu.modern_fit.assumed) >= {"gemm.fp8", "attention.fp8", "moe.bf16", "elementwise"}
    assert "gemm.bf16" not in gpu.modern_fit.assumed
    engine = known.engine("vllm-async", gpu)
    assert (engine.name, engine.gpus) == ("vllm-async-z1-own", ("Z1",))
    assert engine.request_ms == CATALOGUE.engine("vllm-async").request_ms


def test_what_the_runs_do_not_tell_is_named_and_kept(pasted: Path, tmp_path: Path):
    long = tmp_path / "long.txt"
    blocks = pasted.read_text().split("============ Serving")
    long.write_text("============ Serving".join([blocks[0], blocks[1], blocks[4], blocks[1]]))
    output = calibrate(long, *SHEET, "--model", "Llama-3.1-8B", "--engine", "vllm-0.24")
    assert "not determined: step_ms, kept; told by one client, on a small model" in output
    assert re.search(r"^step_ms +0\.5 +0\.5 +assumed, as before", output, re.MULTILINE), output


def test_what_is_missing_is_said(pasted: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match="say on which GPU with --gpu"):
        calibrate(pasted)
    two = tmp_path / "two.txt"
    two.write_text("============ Serving".join(pasted.read_text().split("============ Serving")[:3]))
    with pytest.raises(FormatError, match="2 runs; at least 3 are needed, with different loads"):
        calibrate(two, *SHEET)
    nameless = tmp_path / "nameless.txt"
    nameless.write_text(pasted.read_text().partition("\n")[2])
    with pytest.raises(FormatError, match="result 1 names no model: say which with --model"):
        calibrate(nameless, *SHEET)
    with pytest.raises(LorreryError, match="does not fit on 1 x Z1"):
        calibrate(pasted, *SHEET, "--model", "Llama-3.1-405B")
