"""What adapters cost, against published and derived figures."""

import pytest

from lorrery.worker.device.batch import LoraWork
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.lora import LoraCost, LoraKernels, adapter_bytes, adapter_slots, load_ps
from tests.worker.device.known import CATALOGUE, deployment

MIB = 2**20


@pytest.mark.parametrize(
    ("model", "targets", "mib_at_rank_8"),
    [
        ("Llama-2-7B", "qkvo", 16),
        ("Llama-2-7B", "all-linear", 38),
        ("Llama-2-13B", "qkvo", 25),
        ("Llama-2-70B", "qkvo", 62.5),
        ("Llama-2-70B", "all-linear", 197.5),
        ("Llama-3-8B", "qkvo", 13),
        ("Qwen2.5-7B", "qkvo", 9.625),
        ("Qwen2.5-72B", "all-linear", 200.78),
    ],
)
def test_adapter_bytes_are_the_published_ones(model, targets, mib_at_rank_8):
    assert adapter_bytes(CATALOGUE.model(model), 8, targets) / MIB == pytest.approx(mib_at_rank_8, rel=0.02)


@pytest.mark.parametrize(
    ("model", "slots"), [("Llama-2-7B", 4), ("Llama-2-13B", 4), ("Llama-3-70B", 25), ("Llama-3-8B", 13)]
)
def test_slots_are_s_loras_or_exact(model, slots):
    known = CATALOGUE.model(model)
    assert adapter_slots(known, 16, "slora") == 64
    assert adapter_slots(known, 16, "exact") == 16 * slots


def step_ms(model: str, adapters: list[tuple[int, int]], degree: int = 1, **kernels: object) -> float:
    known = deployment("A100-80-SXM", model, degree)
    cost = LoraCost(known.gpu, known.model, degree, LoraKernels(**kernels))  # type: ignore[arg-type]
    return cost.step(LoraWork.of(adapters))[0] * 1e3


@pytest.mark.parametrize(
    ("model", "targets", "adapters", "ms"),
    [
        ("Llama-2-7B", "qkvo", [(8, 1)], 1.3),
        ("Llama-2-7B", "qkvo", [(16, 1)] * 32, 2.2),
        ("Llama-2-7B", "qkvo", [(16, 1)] * 64, 3.2),
        ("Llama-2-7B", "qkvo", [(64, 1)] * 64, 8.4),
        ("Llama-2-7B", "qkvo", [(16, 32)], 1.4),
        ("Llama-2-7B", "all-linear", [(8, 1)], 2.3),
        ("Llama-2-7B", "all-linear", [(16, 1)] * 32, 4.5),
        ("Llama-2-7B", "all-linear", [(16, 1)] * 64, 6.7),
        ("Llama-2-7B", "all-linear", [(64, 1)] * 64, 19),
        ("Llama-2-13B", "qkvo", [(16, 1)] * 32, 3.1),
        ("Llama-2-70B", "qkvo", [(16, 1)] * 32, 6.8),
        ("Llama-2-7B", "qkvo", [(16, 1024)], 3.1),
        ("Llama-2-7B", "all-linear", [(16, 1024)], 6.5),
    ],
)
def test_a_step_with_adapters_costs_what_was_published(model, targets, adapters, ms):
    assert step_ms(model, adapters, targets=targets) == pytest.approx(ms, rel=0.035)


def test_padding_makes_small_ranks_as_dear_as_the_largest():
    mixed = [(8, 4)] * 10 + [(64, 4)]
    alike = [(64, 4)] * 11
    real, batch = (step_ms("Llama-2-7B", mixed, padding=padding) for padding in ("none", "batch"))
    assert real < batch == step_ms("Llama-2-7B", alike)
    assert step_ms("Llama-2-7B", [(8, 4)] * 11, padding=64) == step_ms("Llama-2-7B", alike)
    assert step_ms("Llama-2-7B", alike, padding=16) == step_ms("Llama-2-7B", alike)


def test_launches_are_two_per_projection_and_layer():
    slow, fast = (step_ms("Llama-2-7B", [(8, 1)], launch_us=us) for us in (5.0, 1.5))
    assert slow - fast == pytest.approx(32 * 4 * 2 * 3.5e-3)


def test_tensor_parallelism_shares_the_bytes_and_sharding_adds_an_all_reduce():
    one, four = (step_ms("Llama-2-70B", [(64, 1)] * 64, degree) for degree in (1, 4))
    sharded = step_ms("Llama-2-70B", [(64, 1)] * 64, 4, sharded=True, launch_us=0)
    assert four < one
    assert sharded > 80 * 4 * 50e-3  # the link's start-up, per projection
    assert step_ms("Llama-2-70B", [(64, 1)] * 64, 4, launch_us=0) < sharded


def test_loading_takes_the_link_and_the_copies():
    llama = CATALOGUE.model("Llama-2-7B")
    size = adapter_bytes(llama, 16)
    assert load_ps(llama, size, 24) == round((0.3 + 0.32 + 33.554432 / 24) * 1e9)
    assert load_ps(llama, size, 50) < load_ps(llama, size, 24)
    assert load_ps(llama, 10**6, 24, copies_per_layer=8) - load_ps(llama, 10**6, 24) == 32 * 7 * 10**7


def test_a_load_from_disk_takes_the_disk_and_then_the_link():
    llama = CATALOGUE.model("Llama-2-7B")
    # 32 MiB at rank 16, 24 GB/s over PCIe 4.0, 2 GB/s from disk; 0.3 ms the request, 32 copies of 10 us.
    assert load_ps(llama, adapter_bytes(llama, 16), 24, 2.0) == round(
        (0.3 + 0.32 + 33.554432 / 24 + 33.554432 / 2) * 1e9
    )
    assert load_ps(llama, 24e6, 24, 2.0) == round((0.3 + 0.32 + 1 + 12) * 1e9)


def test_adapters_on_experts_are_refused():
    with pytest.raises(CatalogueError, match="adapters on experts are not modelled"):
        adapter_bytes(CATALOGUE.model("Mixtral-8x7B"), 8, "all-linear")
    assert adapter_bytes(CATALOGUE.model("Mixtral-8x7B"), 8) == adapter_bytes(CATALOGUE.model("Mistral-7B"), 8)
