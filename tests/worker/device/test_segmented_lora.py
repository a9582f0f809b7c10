"""SGLang's kernels of adapters: against timings, what sizes their grids, and how a replica uses them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.worker.device.basis import kernel_ground
from lorrery.worker.device.batch import Batch, LoraWork, PrefillChunk
from lorrery.worker.device.lora import LoraCost, LoraKernels
from lorrery.worker.device.lora_kernels import Slices, graph_slots, num_segments, segmented_seconds
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, deployment

FIT = CATALOGUE.gpu("H100-SXM").segmented_lora
QKV, GATE_UP, DOWN = Slices(4096, 6144, 4096, 3), Slices(4096, 28672, 14336, 2), Slices(14336, 4096, 4096)
OUTPUT = Slices(4096, 4096, 4096)


def step_seconds(adapters: list[tuple[int, int]], degree: int = 1, **kernels: object) -> float:
    known = deployment("H100-SXM", "Llama-3.1-8B", degree)
    cost = LoraCost(known.gpu, known.model, degree, LoraKernels(kernels="segmented", **kernels))  # type: ignore[arg-type]
    return cost.step(LoraWork.of(adapters))[0]


@pytest.mark.parametrize(
    ("slices", "batch", "us"),
    [
        # Timed on H100: tokens, segments, slots, rank.
        (DOWN, (1, 1, 1, 16), 39.64),
        (QKV, (8, 8, 256, 16), 29.11),
        (QKV, (64, 64, 64, 16), 31.32),
        (Slices(2048, 8192, 8192), (64, 64, 512, 32), 79.51),
        (GATE_UP, (2048, 128, 520, 64), 948.56),
        (QKV, (8192, 512, 512, 16), 408.65),
    ],
)
def test_they_take_what_was_measured(slices, batch, us):
    assert segmented_seconds(FIT, slices, *batch, batch[-1]) * 1e6 == pytest.approx(us, rel=0.17)


def test_tokens_of_each_adapter_are_cut_into_segments_of_sixteen():
    assert [num_segments(tokens, 1) for tokens in (1, 16, 17, 2048)] == [1, 1, 2, 128]
    assert num_segments(64, 64) == 64
    assert num_segments(2048, 8) == 8 + 127, "the most that any split makes"
    assert graph_slots(8192, 8) == 520


def test_a_layer_is_one_pair_of_launches_for_projections_side_by_side():
    batch = [(16, 2)] * 4
    for targets, layers in (("qkvo", [QKV, OUTPUT]), ("all-linear", [QKV, OUTPUT, GATE_UP, DOWN])):
        layer = sum(segmented_seconds(FIT, slices, 8, 4, 256, 64, 16) for slices in layers)
        assert step_seconds(batch, targets=targets, pool_rank=64, decode_slots=256) == pytest.approx(32 * layer)


def test_a_step_shrinks_at_the_pools_rank_and_expands_at_its_adapters_own():
    batch = [(16, 4)] * 4
    alike = step_seconds(batch, pool_rank=16)
    assert step_seconds(batch) == alike, "the pool has room for the step's ranks at least"
    assert alike < step_seconds(batch, pool_rank=64) < step_seconds([(64, 4)] * 4)
    assert step_seconds([(8, 4), (64, 4)], pool_rank=64) < step_seconds([(64, 4)] * 2, pool_rank=64)
    assert step_seconds(batch, padding=64, pool_rank=64) == step_seconds([(64, 4)] * 4)


def test_room_of_a_graph_costs_time_without_work_but_no_step_without_adapters():
    batch = [(16, 4)] * 4
    assert step_seconds(batch) < step_seconds(batch, decode_slots=256) < step_seconds(batch, decode_slots=512)
    assert step_seconds(batch, decode_slots=2) == step_seconds(batch)
    assert step_seconds(batch, launch_us=100.0) == step_seconds(batch)
    assert step_seconds([], decode_slots=256) == 0


def test_an_adapter_without_new_tokens_takes_one_segment():
    assert 0 < step_seconds([(16, 0)]) <= step_seconds([(16, 1)])


def test_a_row_parallel_projections_own_product_is_summed_over_the_gpus():
    known = deployment("H100-SXM", "Llama-3.1-8B", 2)
    link = known.gpu.link(2)
    batch = [(16, 32)]
    qkv, output = Slices(4096, 3072, 2048, 3), Slices(2048, 4096, 4096)
    layer = sum(segmented_seconds(FIT, slices, 32, 2, 0, 16, 16) for slices in (qkv, output))
    assert step_seconds(batch, degree=2) == pytest.approx(32 * (layer + link.seconds(32 * 16 * 2, 2)))


def test_prefills_have_grids_of_their_own_graphs():
    lora = LoraWork.of([(16, 64)])
    prefill = Batch((PrefillChunk(64, 0, True),), lora=lora)
    decode = Batch((), 64, 6400, 100, lora)

    def lora_ps(batch: Batch, **slots: int) -> int:
        kernels = LoraKernels(kernels="segmented", **slots)  # type: ignore[arg-type]
        return Roofline(deployment("H100-SXM", "Llama-3.1-8B", lora=kernels)).step_cost(batch).lora

    assert lora_ps(prefill) == lora_ps(prefill, decode_slots=256) < lora_ps(prefill, prefill_slots=520)
    assert lora_ps(decode) == lora_ps(decode, prefill_slots=520) < lora_ps(decode, decode_slots=256)


def test_what_is_not_known_of_a_gpus_segmented_kernels_is_assumed():
    a100, h200 = CATALOGUE.gpu("A100-80-SXM"), CATALOGUE.gpu("H200-SXM")
    assert a100.modern_fit.lora_segmented is None
    assert h200.segmented_lora == h200.modern_fit.lora_segmented
    assert a100.segmented_lora.token_ns == h200.segmented_lora.token_ns * h200.num_sms / a100.num_sms
    assert kernel_ground(a100, "lora_segmented", "bf16").basis == "assumed"
    assert kernel_ground(h200, "lora_segmented", "bf16").basis == "fitted"


@given(
    adapters=st.integers(1, 64),
    tokens=st.integers(0, 9000),
    slots=st.integers(0, 600),
    rank=st.sampled_from([8, 16, 32, 64, 128, 256]),
    slices=st.sampled_from([QKV, GATE_UP, DOWN, Slices(64, 96, 64, 3)]),
)
def test_more_adapters_room_rank_or_tokens_never_cost_less(adapters, tokens, slots, rank, slices):
    tokens += adapters

    def seconds(
        tokens: int = tokens, adapters: int = adapters, slots: int = slots, rank: int = rank, own: int = 8
    ) -> float:
        return segmented_seconds(FIT, slices, tokens, num_segments(tokens, adapters), slots, rank, own)

    assert seconds() > 0
    assert seconds() <= seconds(tokens + 1)
    assert seconds() <= seconds(tokens + 1, adapters + 1)
    assert seconds() <= seconds(tokens + 1, tokens + 1)
    assert seconds() <= seconds(slots=slots + 1)
    assert seconds() <= seconds(rank=2 * rank)
    assert seconds() <= seconds(own=rank)
