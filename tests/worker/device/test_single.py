"""Single kernels are those of a step, and more of anything never takes less time."""

import pytest

from lorrery.worker.device.attention import Heads
from lorrery.worker.device.basis import grounds, no_measurement
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.calibration.kernel_prediction import SingleKernels
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.deployment import MemoryUse
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, deployment

MODERN = ("A100-80-SXM", "H100-SXM", "H200-SXM", "B200", "B300", "L40S", "RTX-PRO-6000", "H20")


@pytest.mark.parametrize("gpu", MODERN)
def test_a_single_attention_is_that_of_a_step(gpu):
    model = CATALOGUE.model("Llama-3-8B")
    step = Roofline(deployment(gpu, "Llama-3-8B", 2, engine="present-day"))
    kernels, heads = SingleKernels(CATALOGUE.gpu(gpu)), Heads(16, 4, 128, 2, "bf16")
    chunks = (PrefillChunk(700, 0, samples=True),) * 3
    assert step.attention_seconds(Batch(chunks)) == pytest.approx(
        model.num_layers * kernels.prefill(3, 700, heads), rel=1e-4
    )
    decodes = Batch((), 40, 40 * 900, 900)
    assert step.attention_seconds(decodes) == pytest.approx(model.num_layers * kernels.decode(40, 900, heads), rel=1e-4)


@pytest.mark.parametrize("gpu", MODERN)
def test_a_larger_message_or_product_never_takes_less(gpu):
    kernels = SingleKernels(CATALOGUE.gpu(gpu))
    sizes = [2**power for power in range(8, 30)]
    for degree in (2, 4, 8):
        times = [kernels.all_reduce(size, degree) for size in sizes]
        assert times == sorted(times)
    for weight_type in ("bf16", "fp8", "fp8_block", "nvfp4"):
        times = [kernels.gemm(rows, 4096, 8192, weight_type) for rows in range(1, 3000)]
        assert times == sorted(times)


def test_what_nobody_measured_says_so():
    assert no_measurement(CATALOGUE.gpu("H200-SXM")) is None
    assert "no measurement of L20" in str(no_measurement(CATALOGUE.gpu("L20")))
    assert "those of H100-SXM" in str(no_measurement(CATALOGUE.gpu("H20")))
    known = deployment("A100-80-SXM", "Llama-3-8B", 2, engine="present-day", precision=precision("bfloat16", "fp8"))
    found = {ground.part: ground.basis for ground in grounds(known)}
    assert found["gemm"] == found["all_reduce"] == "fitted"
    assert found["attention"] == "assumed"  # A100's cache was timed in 16 bits alone


def test_host_times_and_memory_say_what_they_rest_on():
    def found(gpu: str, engine: str, step_time: str = "roofline") -> dict[str, str]:
        served = deployment(gpu, "Llama-3-8B", engine=engine, memory=MemoryUse(reported=True))
        return {ground.part: f"{ground.basis}: {ground.why}" for ground in grounds(served, step_time)}

    there, elsewhere, card = found("H100-SXM", "vllm"), found("H200-SXM", "vllm"), found("L20", "vllm")
    assert there["host"].startswith("fitted: fit to every third")
    assert there["host"].endswith("; up to 128 sequences in a step")
    assert elsewhere["host"].startswith("assumed: no measurement of vllm on H200-SXM")
    assert there["usable_memory_gb"].startswith("measured")
    assert card["memory_gb"] == "assumed: no measurement of L20's memory: its label's 48 GB"
    assert (
        there["activation_gb"]
        == there["gpu_memory_utilization"]
        == ("assumed: settings, not measured: 2 GB of each GPU, and 0.9 of its memory")
    )
    assert "gemm" not in found("H100-SXM", "vllm", "constant")
    assert found("H100-SXM", "vllm", "constant")["step time"] == "assumed: worker.constant"
    assert "host" not in found("H100-SXM", "vllm-kernels")
