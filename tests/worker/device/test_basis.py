"""What figures rest on: what nobody measured is never shown as fitted."""

import pytest

from lorrery.worker.device.basis import Ground, grounds, slow_kernels
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.catalogue.architecture import WEIGHT_DTYPES, precision
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import deployment


def decodes(num: int, kv_each: int) -> Batch:
    return Batch((), num, num * kv_each, kv_each)


def ground(part: str, gpu: str, model: str, degree: int = 1, engine: str = "present-day", **types: str) -> Ground:
    kinds = precision(types.get("weights", "bfloat16"), types.get("kv", "bfloat16"))
    known = deployment(gpu, model, degree, engine=engine, precision=kinds)
    return next(ground for ground in grounds(known) if ground.part == part)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_products_are_fitted_in_the_types_that_were_measured_alone(dtype: str) -> None:
    found = ground("gemm", "H100-SXM", "Llama-3-8B", weights=dtype)
    experts = ground("moe", "H100-SXM", "Mixtral-8x7B", 2, weights=dtype)
    if dtype in ("int8", "int4", "nvfp4"):
        assert (found.basis, found.why) == ("assumed", f"no measurement of {dtype}: the constants of bf16")
    else:
        assert found.basis == "fitted"
    if dtype == "int8":
        assert (experts.basis, experts.why) == ("assumed", found.why)
    elif dtype == "nvfp4":  # unpacked, as Hopper has no products in 4 bits
        assert (experts.basis, experts.why) == ("assumed", "no measurement of nvfp4: the constants of int4")
    else:
        assert experts.basis == "fitted"


@pytest.mark.parametrize(
    ("gpu", "degree", "why"),
    [
        ("H100-SXM", 8, None),
        ("H100-SXM", 16, "no measurement of all-reduces over 16 GPUs: from those over 2, 4, 8 (fit to vLLM 0.24"),
        ("H20", 8, "no measurement of all-reduces between H20: those of H100-SXM (fit to vLLM 0.24"),
        ("A40", 2, None),
        ("RTX-A6000", 2, "assumed: half of PCIe 5.0"),
        ("H800", 8, "assumed: a100-graph with two thirds of the NVLink bandwidth"),
    ],
)
def test_sums_are_fitted_over_the_gpus_that_were_measured_alone(gpu: str, degree: int, why: str | None) -> None:
    found = ground("all_reduce", gpu, "Llama-3.1-405B" if degree == 16 else "Llama-3-8B", degree)
    assert found.basis == ("fitted" if why is None else "assumed")
    assert why is None or found.why.startswith(why)


def test_an_engine_that_runs_another_kernel_for_experts_says_so() -> None:
    assert ground("moe", "H100-SXM", "Mixtral-8x7B", 2, "vllm", weights="fp8").basis == "fitted"
    found = ground("moe", "H100-SXM", "Mixtral-8x7B", 2, "trtllm", weights="fp8")
    assert (found.basis, found.why) == ("assumed", "no measurement of fp8 in trtllm: the constants of fp8_block")
    older = ground("moe", "A100-80-SXM", "Mixtral-8x7B", 4, "vllm-2023")
    assert (older.basis, older.why) == ("assumed", "no measurement of experts: computed as matrix products")


@pytest.mark.parametrize(
    ("gpu", "engine", "dtype", "slow"),
    [
        ("H200-SXM", "present-day", "fp8", True),  # CUTLASS, one scale per tensor: 2.7 ms measured, and 0.7 in 16 bits
        ("H200-SXM", "present-day", "fp8_block", False),
        ("H200-SXM", "present-day", "int8", False),
        ("H200-SXM", "trtllm", "fp8", False),
        ("B200", "present-day", "fp8", False),
        ("A100-80-SXM", "present-day", "fp8", False),
    ],
)
def test_experts_that_are_slower_in_fewer_bits_are_named(gpu: str, engine: str, dtype: str, slow: bool) -> None:
    known = deployment(gpu, "Mixtral-8x7B", 4, engine=engine, precision=precision(dtype, "bfloat16"))
    notes = slow_kernels(known)
    assert len(notes) == slow
    for note in notes:
        assert "ms in fp8_block" in note
        assert "worker.weight_dtype" in note
    assert slow_kernels(known, "table") == []


@pytest.mark.parametrize(
    "gpu", ["L40S", "L4", "A10", "RTX-PRO-6000", "H100-PCIe", "H100-NVL", "A100-80-PCIe", "MI300X"]
)
@pytest.mark.parametrize("num_decodes", [1, 32])
def test_two_gpus_of_today_decode_faster_than_one(gpu: str, num_decodes: int) -> None:
    one, two = (
        Roofline(deployment(gpu, "Llama-3.1-8B", degree, engine="vllm")).step_ps(decodes(num_decodes, 1000))
        for degree in (1, 2)
    )
    assert two < one
