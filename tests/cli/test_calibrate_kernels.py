"""`lorrery calibrate` of single kernels: finds the constants they were made with, and says what they do not tell."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.calibrate import app
from lorrery.cli.validate import app as validate
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation.figures import MEASURED_KERNELS, MEASURED_SEGMENTED_LORA
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.attention import Heads
from lorrery.worker.device.basis import no_measurement
from lorrery.worker.device.calibration.kernel_prediction import SingleKernels
from lorrery.worker.device.catalogue.hardware import AllReduce, AttentionFit, GemmFit
from tests.worker.device.known import CATALOGUE

WIDE = {"COLUMNS": "200"}
SHEET = ["--gpu", "Z1", "--tflops", "200", "--memory-gb", "48", "--gb-per-second", "1000", "--num-sms", "90"]
GEMM = GemmFit(0.61, 0.78, 6.0, 128)
ATTENTION = AttentionFit(0.75, 0.5, 9.0, 8.0, 20.0, 0.2, 0.1, 64, 300.0, 2.0)
GRAPH = AllReduce(5.0, 90.0, 1.2)
HEADER = "op,dtype,kv_dtype,kernel,m,n,k,batch,tokens,q_heads,kv_heads,head_size,message_bytes,num_gpus,latency_us"
Z1 = replace(
    CATALOGUE.gpu("L40S"), name="Z1", tflops=200, memory_gb=48, gb_per_second=1000, num_sms=90, fp8_tflops=None,
    modern_fit=replace(CATALOGUE.fits["default-modern"], gemm={"bf16": GEMM}, attention={"bf16": ATTENTION}),
    modern_all_reduce=GRAPH,
)  # fmt: skip
KERNELS = SingleKernels(Z1)


def calibrate(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env=WIDE)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def gemms(tokens: tuple[int, ...] = (1, 16, 64, 200, 500, 1000, 4000, 9000)) -> list[str]:
    return [
        f"gemm,bfloat16,,,{m},{n},{k},,,,,,,,{KERNELS.gemm(m, n, k) * 1e6:.4f}"
        for n in (512, 2048, 4096, 6144, 14336)
        for k in (1024, 4096, 8192)
        for m in tokens
    ]


def attentions() -> list[str]:
    lines = []
    for query, kv in ((8, 1), (32, 8)):
        heads = Heads(query, kv, 128, 2, "bf16")
        for batch in (1, 4, 16, 64):
            for tokens in (63, 511, 2047, 8191):
                cells = f"{batch},{tokens},{query},{kv},128,,"
                decode = KERNELS.decode(batch, tokens, heads) * 1e6
                lines.append(f"attention_decode,bfloat16,bfloat16,,,,,{cells},{decode:.4f}")
                prefill = KERNELS.prefill(batch, tokens, heads) * 1e6
                lines.append(f"attention_prefill,bfloat16,bfloat16,,,,,{cells},{prefill:.4f}")
    return lines


def all_reduces() -> list[str]:
    return [
        f"all_reduce,bfloat16,,{kernel},,,,,,,,,{size},{degree},{KERNELS.all_reduce(size, degree) * 1e6 + launch:.4f}"
        for degree in (2, 4, 8)
        for size in (2**power for power in range(12, 28))
        for kernel, launch in (("vLLM_custom_graph", 0), ("vLLM_custom_eager", 20))
    ]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def test_the_constants_of_a_new_gpu_are_found_and_serve(tmp_path):
    out = tmp_path / "z1.toml"
    path = written(tmp_path / "k.csv", [*gemms(), *attentions(), *all_reduces()])
    output = calibrate(path, *SHEET, "--out", out)
    assert "left out 48 rows: of kernels that no constant is for" in output  # the eager ones, with their launch
    unseen = re.findall(r"^(\S+) +\w+ +\d+ +[\d.]+ +([\d.]+) +\S+ +\d+ +[\d.]+ +([\d.]+)$", output, re.MULTILINE)
    assert {name for name, *_ in unseen} == {"gemm.bf16", "attention.bf16", "modern_all_reduce"}, output
    assert all(float(error) < 1.0 for _, *errors in unseen for error in errors), output

    catalogue = read_catalogue([out])
    gpu = catalogue.gpu("Z1")
    gemm, attention = gpu.modern_fit.gemm["bf16"], gpu.modern_fit.attention["bf16"]
    assert (gemm.flops, gemm.bandwidth, gemm.us) == pytest.approx((0.61, 0.78, 6.0), rel=0.04)
    assert gemm.tile == 128
    assert attention.decode_bandwidth == pytest.approx(0.75, rel=0.03)
    assert (attention.decode_us, attention.prefill_us) == pytest.approx((9.0, 8.0), rel=0.05)
    assert attention.sequence_ns == pytest.approx(20, rel=0.2)
    assert gpu.link(8, modern=True).bandwidth(8) == pytest.approx(90, rel=0.05)
    assert no_measurement(gpu) is None
    assert set(gpu.modern_fit.assumed) >= {"elementwise", "gemm.fp8", "attention.fp8"}
    assert "gemm.bf16" not in gpu.modern_fit.assumed
    assert catalogue.gpu("L40S") == CATALOGUE.gpu("L40S")

    result = CliRunner().invoke(validate, ["kernels", str(path), "--gpu", "Z1", "--catalogue", str(out)], env=WIDE)
    assert result.exit_code == 0, result.output
    assert re.search(r"gemm +bfloat16 .* 0\.\d +[+-]0\.\d .* fitted", result.output), result.output


def test_constants_that_the_rows_do_not_tell_are_named_and_kept(tmp_path):
    before = CATALOGUE.fits["default-modern"].gemm["bf16"]
    output = calibrate(written(tmp_path / "small.csv", gemms((1, 8))), *SHEET, "--out", tmp_path / "small.toml")
    assert f"not determined: gemm.bf16 flops, kept at {before.flops:.4g}; told by many tokens" in output
    assert "bandwidth, kept" not in output
    assert read_catalogue([tmp_path / "small.toml"]).gpu("Z1").modern_fit.gemm["bf16"].flops == before.flops
    large = [line for line in gemms((9000, 16000)) if ",14336,8192," in line or ",6144,8192," in line]
    output = calibrate(written(tmp_path / "large.csv", large), *SHEET)
    assert "not determined: gemm.bf16 bandwidth, kept at" in output
    assert "not determined: gemm.bf16 us, kept at" in output
    assert "flops, kept" not in output
    assert "no rows: attention.bf16, attention.fp8, moe.bf16, " in output


def test_a_gpu_of_the_catalogue_keeps_what_was_not_fitted(tmp_path):
    out = tmp_path / "h100.toml"
    lines = [f"{line.rpartition(',')[0]},{float(line.rpartition(',')[2]) / 4:.4f}" for line in gemms()]
    calibrate(written(tmp_path / "k.csv", lines), "--gpu", "h100", "--out", out)
    old, new = CATALOGUE.gpu("H100-SXM"), read_catalogue([out]).gpu("H100-SXM")
    assert new.modern_fit.gemm["bf16"] != old.modern_fit.gemm["bf16"]
    assert new.modern_fit.gemm["fp8"] == old.modern_fit.gemm["fp8"]
    assert new.modern_fit.attention == old.modern_fit.attention
    assert (new.fit, new.all_reduce.us, new.usable_memory_gb) == (old.fit, old.all_reduce.us, old.usable_memory_gb)
    assert new.link(8, modern=True).seconds(2**20, 8) == old.link(8, modern=True).seconds(2**20, 8)


def test_the_published_rows_give_a_fit_as_good_as_the_shipped_one(tmp_path):
    out, errors, rows = tmp_path / "b200.toml", tmp_path / "errors.json", tmp_path / "b200.csv"
    header, *lines = MEASURED_KERNELS.read_text().splitlines()
    kept = [line for line in lines if line.startswith("B200,") and ",moe," not in line and ",fp8," not in line]
    rows.write_text("\n".join([header, *kept]))
    calibrate(rows, "--out", out)
    mape = {}
    for name, more in (("shipped", []), ("own", ["--catalogue", str(out)])):
        result = CliRunner().invoke(validate, ["kernels", str(rows), "--json", str(errors), "--group", "gpu,op", *more])
        assert result.exit_code == 0, result.output
        groups = json.loads(errors.read_text())["groups"]
        mape[name] = {one["group"]["op"]: one["judged"]["mape"] for one in groups}
    for op in ("gemm", "attention_decode", "attention_prefill"):
        assert mape["own"][op] < mape["shipped"][op] * 1.15 + 1, mape


def test_the_kernels_of_adapters_are_fitted_by_engine(tmp_path):
    out, rows = tmp_path / "h100.toml", tmp_path / "rows.csv"
    header, *lines = MEASURED_SEGMENTED_LORA.read_text().splitlines()
    rows.write_text("\n".join([header, *(line for line in lines[::7] if line.startswith("H100-SXM,"))]))
    told = calibrate(rows, "--out", out)
    assert "not determined" not in told
    old, new = CATALOGUE.gpu("H100-SXM").modern_fit, read_catalogue([out]).gpu("H100-SXM").modern_fit
    assert new.lora == old.lora
    for constant in ("step_us", "expand_ns", "token_ns", "idle_ns"):
        assert getattr(new.lora_segmented, constant) == pytest.approx(getattr(old.lora_segmented, constant), rel=0.1)


def test_what_cannot_be_fitted_is_refused(tmp_path):
    path = written(tmp_path / "k.csv", gemms((1, 8)))
    with pytest.raises(SettingsError, match="no gpu column: say which with --gpu"):
        calibrate(path)
    with pytest.raises(SettingsError, match=r"rows of A100-80-SXM, B200, B300, .*, RTX-PRO-6000: say which with --gpu"):
        calibrate(MEASURED_KERNELS)
    with pytest.raises(FormatError, match=r"k\.csv: no rows of Z1 to fit to, of 48"):
        calibrate(written(path, [line for line in all_reduces() if "eager" in line]), *SHEET)
    with pytest.raises(FormatError, match="no rows of A40 to fit to"):
        calibrate(MEASURED_KERNELS, "--gpu", "A40")
    with pytest.raises(SettingsError, match="--model, --engine and --host are for steps"):
        calibrate(path, *SHEET, "--host")
    with pytest.raises(SettingsError, match="--fp8-tflops -3: must be above 0"):
        calibrate(path, *SHEET, "--fp8-tflops", "-3")
    with pytest.raises(FormatError, match=r"k\.csv: line 2: m is 'x'; it must be a whole number"):
        calibrate(written(path, ["gemm,bfloat16,,,x,1,1,,,,,,,,3"]), *SHEET)


def test_a_file_in_gzip_that_is_cut_is_told_so(tmp_path):
    path = tmp_path / "k.csv.gz"
    path.write_bytes(gzip.compress("\n".join([HEADER, *gemms()]).encode()))
    assert "120 rows of Z1" in calibrate(path, *SHEET)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match=r"k\.csv\.gz: cut or damaged gzip"):
        calibrate(path, *SHEET)


def test_experts_that_cannot_be_dealt_so_are_left_out(tmp_path):
    header = "gpu,op,dtype,tokens,hidden,ffn,top_k,num_experts,moe_tp,moe_ep,distribution,latency_us"
    shapes = [(tokens, ffn) for tokens in (1, 16, 256, 4096) for ffn in (512, 768, 1024, 2048)]
    rows = [f"B200,moe,bfloat16,{tokens},2048,{ffn},8,64,1,4,balanced,{40 + tokens / 9}" for tokens, ffn in shapes]
    bad = ["B200,moe,bfloat16,8,2048,512,8,64,3,1,balanced,40", "B200,moe,bfloat16,8,2048,512,8,64,1,1,zipf,40"]
    path = tmp_path / "moe.csv"
    path.write_text("\n".join([header, *rows, *bad]))
    output = calibrate(path)
    assert "16 rows of B200" in output
    assert "left out 2 rows" in output


def test_a_gpu_faster_than_its_data_sheet_is_doubted(tmp_path):
    slow = ["--gpu", "Z1", "--tflops", "90", "--memory-gb", "48", "--gb-per-second", "1000", "--num-sms", "90"]
    output = calibrate(written(tmp_path / "k.csv", gemms()), *slow)
    assert re.search(r"warning: gemm\.bf16 flops is 1\.\d\d: faster than the data sheet's FLOPS", output), output
