"""What adapters cost, against published and derived figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.adapters.loads import AdapterCosts
from lorrery.scheduler.core.sequence import Adapter
from lorrery.worker.device.basis import kernel_ground
from lorrery.worker.device.batch import Batch, LoraWork
from lorrery.worker.device.lora import LoraCost, LoraKernels, adapter_bytes, load_ps, place_bytes
from lorrery.worker.device.lora_kernels import Slices, grouped_seconds
from lorrery.worker.device.roofline import Roofline
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
    costs = AdapterCosts(CATALOGUE.model(model), "qkvo", 24.0, 2.0)
    assert Adapter("a", 16).slots == 64
    assert Adapter("a", 16, costs.exact_slots(16)).slots == 16 * slots


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


MIXTRAL_EXPERTS = 3 * 8 * (4096 + 14336)  # elements of A and B per rank and layer: gate, up, down of eight experts


def test_adapters_on_experts_have_their_matrices_for_each_of_them_and_for_the_router():
    mixtral, attention = CATALOGUE.model("Mixtral-8x7B"), 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert adapter_bytes(mixtral, 8, "all-linear") == 2 * 8 * 32 * (attention + 4096 + 8 + MIXTRAL_EXPERTS)
    assert adapter_bytes(mixtral, 8) == adapter_bytes(CATALOGUE.model("Mistral-7B"), 8)


def test_a_step_reads_the_matrices_of_the_experts_that_an_adapters_tokens_use():
    known = deployment("H100-SXM", "Mixtral-8x7B")

    def step(targets: str, adapters: list[tuple[int, int]]) -> tuple[float, float, float]:
        kernels = LoraKernels(targets=targets)  # type: ignore[arg-type]
        return LoraCost(known.gpu, known.model, 1, kernels).step(LoraWork.of(adapters))

    def of_experts(adapters: list[tuple[int, int]]) -> tuple[float, float]:
        _, whole_flops, whole_bytes = step("all-linear", adapters)
        _, flops, num_bytes = step("qkvo", adapters)
        tokens = sum(tokens for _, tokens in adapters)
        router = 2 * len(adapters) * 8 * (4096 + 8) + 2 * tokens * (4096 + 8 + 2 * 8)
        return (whole_flops - flops) / 32 - 2 * tokens * 8 * (4096 + 8), (whole_bytes - num_bytes) / 32 - router

    once = 2 * 3 * 2 * (4096 + 14336 + 2 * 8)  # inputs, outputs and products of a token's two experts
    for adapters, read in (([(8, 1)], 2 / 8), ([(8, 1), (8, 1)], 2 * 2 / 8), ([(8, 3)], 1 - (1 - 2 / 8) ** 3)):
        flops, num_bytes = of_experts(adapters)
        tokens = sum(tokens for _, tokens in adapters)
        assert flops == pytest.approx(2 * tokens * 8 * MIXTRAL_EXPERTS * 2 / 8)
        assert num_bytes == pytest.approx(2 * 8 * MIXTRAL_EXPERTS * read + tokens * once)
    assert step("all-linear", [(8, 1)])[0] > step("qkvo", [(8, 1)])[0]


@pytest.mark.parametrize(
    ("name", "rank", "tensor_parallel", "sharded", "per_gpu"),
    [
        ("Llama-2-7B", 64, 1, False, 4 * 8192 + 3 * (4096 + 11008)),
        # q, k, v, gate and up have A whole and B cut, o and down A cut and B whole
        ("Llama-2-7B", 16, 4, False, 3 * (4096 + 1024) + 1024 + 4096 + 2 * (4096 + 2752) + 2752 + 4096),
        ("Llama-2-7B", 16, 4, True, 4 * (1024 + 1024) + 3 * (1024 + 2752)),
        # one KV head is the least that a GPU has; of 128 experts it has all, each cut; the router is whole
        (
            "Qwen3-30B-A3B",
            16,
            8,
            False,
            2048 + 512 + 2 * (2048 + 128) + 512 + 2048 + 2048 + 128 + 128 * (2 * (2048 + 96) + 96 + 2048),
        ),
    ],
)
def test_a_place_has_room_for_the_largest_adapter_at_every_projection(
    name: str, rank: int, tensor_parallel: int, sharded: bool, per_gpu: int
):
    model = CATALOGUE.model(name)
    found = place_bytes(model, rank, "all-linear", tensor_parallel, sharded=sharded)
    assert found == 2 * rank * model.num_layers * tensor_parallel * per_gpu


def test_experts_dealt_to_groups_of_gpus_have_their_places_there():
    model = CATALOGUE.model("Qwen3-30B-A3B")
    whole, dealt = place_bytes(model, 16, "all-linear", 8), place_bytes(model, 16, "all-linear", 8, 8)
    # cut eight times each GPU has 128 experts' A of gate and up, and B of down; dealt it has 16 whole experts
    of_experts = 128 * (2 * (2048 + 96) + 96 + 2048) - 16 * 3 * (2048 + 768)
    assert whole - dealt == 2 * 16 * model.num_layers * 8 * of_experts


def grouped_ms(adapters: list[tuple[int, int]], gpu: str = "H100-SXM", **kernels: object) -> float:
    known = deployment(gpu, "Llama-3.1-8B")
    cost = LoraCost(known.gpu, known.model, 1, LoraKernels(kernels="grouped", **kernels))  # type: ignore[arg-type]
    return cost.step(LoraWork.of(adapters))[0] * 1e3


@pytest.mark.parametrize(
    ("shape", "us"),
    [
        # Timed on H100: inner, outer, widest, slices; tokens, adapters, max_loras, rank.
        ((4096, 6144, 4096, 3, 8, 1, 1, 16), 13.20),
        ((4096, 6144, 4096, 3, 64, 64, 64, 16), 260.18),
        ((4096, 6144, 4096, 3, 2048, 1, 8, 16), 140.00),
        ((4096, 6144, 4096, 3, 8192, 1, 64, 16), 1737.61),
        ((14336, 4096, 4096, 1, 64, 64, 64, 16), 45.80),
        ((14336, 4096, 4096, 1, 256, 1, 1, 16), 49.54),
    ],
)
def test_grouped_kernels_take_what_was_measured(shape, us):
    inner, outer, widest, slices, *batch = shape
    fit = CATALOGUE.gpu("H100-SXM").modern_fit.lora
    assert grouped_seconds(fit, Slices(inner, outer, widest, slices), *batch) * 1e6 == pytest.approx(us, rel=0.2)


def test_grouped_kernels_are_launched_once_for_projections_side_by_side():
    fit = CATALOGUE.gpu("H100-SXM").modern_fit.lora
    qkvo = [Slices(4096, 6144, 4096, 3), Slices(4096, 4096, 4096)]
    ffn = [Slices(4096, 28672, 14336, 2), Slices(14336, 4096, 4096)]
    batch = [(16, 2)] * 4
    for targets, layers in (("qkvo", qkvo), ("all-linear", qkvo + ffn)):
        layer = sum(grouped_seconds(fit, slices, 8, 4, 8, 64) for slices in layers)
        assert grouped_ms(batch, targets=targets, padding=64, places=8) == pytest.approx(32 * layer * 1e3)


def test_kernels_run_at_all_projections_if_told_whatever_the_adapters_modify():
    batch = [(16, 4)] * 8
    for form in ({"kernels": "grouped", "places": 8}, {"kernels": "roofline"}):
        of = {
            (targets, whole): step_ms("Llama-3.1-8B", batch, targets=targets, all_linear=whole, **form)
            for targets in ("qkvo", "all-linear")
            for whole in (False, True)
        }
        assert of["qkvo", False] < of["qkvo", True] == of["all-linear", True] == of["all-linear", False]
    experts = [step_ms("Mixtral-8x7B", batch, kernels="grouped", all_linear=whole) for whole in (False, True)]
    assert experts[0] == experts[1]


@pytest.mark.parametrize(
    ("sequences", "adapters", "ms"),
    [(1, 1, 8.31), (8, 8, 11.03), (32, 0, 8.09), (32, 1, 9.79), (32, 8, 12.35), (64, 8, 14.08)],
)
def test_a_decode_step_of_vllm_takes_what_was_measured(sequences, adapters, ms):
    kernels = LoraKernels("all-linear", 16, kernels="grouped", places=8)
    step_time = Roofline(deployment("H100-SXM", "Llama-3.1-8B", engine="vllm-async", lora=kernels))
    each = [sequences // adapters + (index < sequences % adapters) for index in range(adapters)]
    batch = Batch((), sequences, sequences * 980, 980, LoraWork.of([(16, number) for number in each]))
    assert step_time.step_ps(batch) / 1e9 == pytest.approx(ms, rel=0.05)


def test_grouped_kernels_cost_what_places_and_rank_they_were_made_for_not_what_a_step_uses():
    batch = [(8, 4)] * 4
    few, many = (grouped_ms(batch, places=places) for places in (4, 64))
    assert few == grouped_ms(batch) < many
    assert grouped_ms(batch, padding=64) == grouped_ms([(64, 4)] * 4) > few
    assert grouped_ms(batch, launch_us=100.0) == few
    assert grouped_ms([]) == 0
    assert grouped_ms(batch, places=64, graphs=False) == few


def test_what_is_not_known_of_a_gpus_grouped_kernels_is_assumed():
    a100, h200 = CATALOGUE.gpu("A100-80-SXM"), CATALOGUE.gpu("H200-SXM")
    assert a100.modern_fit.lora is None
    assert h200.grouped_lora == h200.modern_fit.lora
    assert a100.grouped_lora.us == h200.grouped_lora.us
    assert a100.grouped_lora.idle_ns == h200.grouped_lora.idle_ns * h200.num_sms / a100.num_sms
    assert kernel_ground(a100, "lora", "bf16").basis == "assumed"
    assert kernel_ground(h200, "lora", "bf16").basis == "fitted"


@given(
    adapters=st.integers(1, 64),
    tokens=st.integers(0, 9000),
    places=st.integers(1, 64),
    rank=st.sampled_from([8, 16, 32, 64, 128, 256]),
    slices=st.sampled_from(
        [Slices(4096, 6144, 4096, 3), Slices(2048, 8192, 8192), Slices(8192, 14336, 7168, 2), Slices(64, 96, 64, 3)]
    ),
)
def test_more_adapters_places_rank_or_tokens_never_cost_less(adapters, tokens, places, rank, slices):
    fit = CATALOGUE.gpu("H100-SXM").modern_fit.lora
    tokens += adapters

    def seconds(tokens: int = tokens, adapters: int = adapters, places: int = places, rank: int = rank) -> float:
        return grouped_seconds(fit, slices, tokens, adapters, places, rank)

    assert seconds() > 0
    assert seconds() <= seconds(tokens + 1, adapters + 1) or tokens == 127
    assert seconds() <= seconds(places=places + 1)
    assert seconds() <= seconds(rank=2 * rank)
    assert seconds() <= seconds(tokens + 1) or tokens == 127  # other tiles from 128 tokens on
