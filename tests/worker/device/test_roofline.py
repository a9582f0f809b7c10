"""The roofline against the values that its formulas and constants are published with, and its shape."""

from dataclasses import replace

import pytest

from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.attention import prefill_waves
from lorrery.worker.device.batch import NO_LORA, PARTS, Batch, LoraWork, PrefillChunk
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import EAGER_LAUNCH_US, EAGER_LORA_LAUNCH_US, Engine
from lorrery.worker.device.lora import LoraKernels
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, deployment

# The tables that the constants were fitted to: Vidur's time the add and not the head, vLLM's the opposite.
VIDUR = "vidur-kernels"
VLLM = "vllm-kernels"


def decodes(num: int, kv_tokens: int) -> Batch:
    return Batch((), num, num * kv_tokens, kv_tokens)


def prefill(new_tokens: int, past_tokens: int) -> Batch:
    return Batch((PrefillChunk(new_tokens, past_tokens, samples=True),))


def mixed(new_tokens: int, past_tokens: int, num: int, kv_tokens: int) -> Batch:
    return Batch((PrefillChunk(new_tokens, past_tokens, samples=True),), num, num * kv_tokens, kv_tokens)


@pytest.mark.parametrize(
    ("gpu", "model", "degree", "engine", "batch", "gpu_step_ms"),
    [
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, decodes(1, 512), 10.074),
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, decodes(32, 512), 15.285),
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, prefill(1024, 0), 70.957),
        ("A100-80-SXM", "Llama-2-70B", 2, VIDUR, decodes(64, 1024), 64.395),
        ("A100-80-SXM", "Llama-2-70B", 2, VIDUR, prefill(512, 1024), 204.618),
        ("A100-80-SXM", "Llama-2-70B", 2, VIDUR, mixed(512, 0, 32, 2048), 224.301),
        ("RTX-PRO-6000", "Llama-3-8B", 1, VLLM, decodes(64, 2048), 23.537),
        ("RTX-PRO-6000", "Llama-3-8B", 1, VLLM, prefill(1024, 2048), 47.457),
        ("RTX-PRO-6000", "Llama-3-8B", 1, VLLM, mixed(512, 1024, 64, 2048), 43.831),
        ("A40", "Llama-2-7B", 1, VIDUR, decodes(32, 512), 39.818),
    ],
)
def test_gpu_step_is_the_published_one(gpu, model, degree, engine, batch, gpu_step_ms):
    roofline = Roofline(deployment(gpu, model, degree, engine))
    assert round(roofline.gpu_step_ps(batch) / 1e9, 3) == gpu_step_ms


def test_host_adds_its_share_per_step_and_per_sequence():
    roofline = Roofline(deployment("A100-80-SXM", "Llama-2-7B", engine="present-day"))
    batch = decodes(32, 512)
    assert roofline.step_ps(batch) - roofline.gpu_step_ps(batch) == 2_640_000_000
    assert roofline.step_ps(Batch()) == 2_000_000_000


def test_engine_of_2023_pays_for_each_prompt_and_each_of_its_tokens():
    known = deployment("H100-SXM", "Llama-2-70B", 2, engine="vllm-2023")
    roofline, engine = Roofline(known), known.engine
    assert engine.name == "vllm-2023-h100"
    batch = prefill(1000, 0)
    host_ms = engine.step_ms + engine.sequence_ms + engine.prefill_ms + 1000 * engine.prefill_token_ms
    assert roofline.step_ps(batch) - roofline.gpu_step_ps(batch) == pytest.approx(host_ms * 1e9)


def test_host_counts_prompt_tokens_and_no_decodes_as_tokens_of_a_prompt():
    engine = Engine("slow", step_ms=1.0, sequence_ms=0.1, prefill_ms=2.0, prefill_token_ms=0.01)
    roofline = Roofline(replace(deployment("H100-SXM", "Llama-3-8B"), engine=engine))
    # One step, 1 + 9 sequences that get a token, one prefill, 700 prompt tokens.
    host_ps = 1_000_000_000 + 10 * 100_000_000 + 2_000_000_000 + 700 * 10_000_000
    batch = mixed(700, 0, 9, 512)
    assert roofline.step_ps(batch) - roofline.gpu_step_ps(batch) == host_ps
    assert roofline.step_cost(batch).host == host_ps


def test_slow_launches_bound_the_first_steps_of_a_segment():
    slow = Engine("slow", launch_ms=0.326, step_ms=4.3, sequence_ms=0.31)
    launch_bound = Roofline(replace(deployment("H100-SXM", "Llama-3-8B"), engine=slow))
    batch = decodes(1, 100)
    assert launch_bound.step_ps(batch) == round((32 * 0.326 + 4.3 + 0.31) * 1e9)
    alone = launch_bound.decode_segment(1, 100, 100)
    assert (alone.base_ps, alone.slope_ps) == (launch_bound.step_ps(batch), 0)
    last, next_one = (decodes(1, 100 + alone.num_steps + later) for later in (-1, 0))
    assert launch_bound.step_ps(last) == launch_bound.step_ps(batch) < launch_bound.step_ps(next_one)
    assert launch_bound.decode_segment(64, 64 * 8000, 8000).num_steps == NEVER
    free = Roofline(deployment("H100-SXM", "Llama-3-8B"))
    assert free.step_ps(batch) == free.gpu_step_ps(batch)
    waiting = launch_bound.step_cost(batch)
    assert waiting.host == launch_bound.step_ps(batch) - free.gpu_step_ps(batch)


@pytest.mark.parametrize(
    ("model", "degree", "launches"),
    [("Llama-3.1-8B", 1, 10), ("Llama-3.1-8B", 2, 12), ("Qwen3-32B", 1, 12), ("Qwen3-235B-A22B", 4, 18)],
)
def test_without_graphs_a_step_takes_its_launches_and_its_adapters_launches(model, degree, launches):
    eager = deployment("B200", model, degree, engine="vllm-async", enforce_eager=True)
    eager = replace(eager, lora=LoraKernels(kernels="grouped"))
    graphs, without = Roofline(replace(eager, enforce_eager=False)), Roofline(eager)
    batch = decodes(1, 100)
    layers, host_ps = eager.model.num_layers, graphs.step_ps(batch) - graphs.gpu_step_ps(batch)
    assert without.step_ps(batch) - host_ps == layers * launches * EAGER_LAUNCH_US * 1e6
    adapted = Batch((), 1, 100, 100, LoraWork(1, 16, 16, 1, 16))
    # two kernels each at query, key and value, and at the output
    more_ps = layers * 4 * EAGER_LORA_LAUNCH_US * 1e6
    assert without.step_ps(adapted) == without.step_ps(batch) + more_ps
    assert without.gpu_step_ps(adapted) == graphs.gpu_step_ps(adapted)


def test_without_graphs_a_step_that_is_bound_by_the_gpu_takes_as_long():
    eager = deployment("A10", "Qwen2.5-7B", engine="vllm-async", enforce_eager=True)
    graphs = replace(eager, enforce_eager=False)
    for batch in (prefill(2048, 0), decodes(128, 4000)):
        assert Roofline(eager).step_ps(batch) == Roofline(graphs).step_ps(batch)


def test_an_engine_that_launches_its_kernels_anyway_is_no_slower_without_graphs():
    old = deployment("A10G", "Llama-2-7B", engine="s-lora-a10g")
    batch = decodes(1, 100)
    assert Roofline(replace(old, enforce_eager=True)).step_ps(batch) == Roofline(old).step_ps(batch)


def test_narrow_products_in_eight_bits_are_further_from_the_peak():
    fp8 = precision("fp8", "bfloat16")
    times = [
        Roofline(deployment("B200", "Llama-3-70B", degree, engine="present-day", precision=fp8)).linear_seconds(8192)
        for degree in (1, 8)
    ]
    assert times[0] / 8 < 0.8 * times[1]


def test_modern_engine_uses_the_attention_of_today():
    old, new = (Roofline(deployment("A100-80-SXM", "Llama-2-7B", engine=e)) for e in (None, "present-day"))
    batch = prefill(2000, 0)
    assert new.gpu_step_ps(batch) < old.gpu_step_ps(batch)


def test_waves_of_one_prompt_are_tiles_over_sms():
    # 16 x 32 tiles on 108 SMs: 5 waves, each as long as half the chunk and the offset.
    assert prefill_waves([PrefillChunk(1024, 0, samples=True)], 32, 108) == 2 * 5 * (512 + 132)


def test_longest_tiles_run_first():
    chunks = [PrefillChunk(64, 0, samples=True), PrefillChunk(64, 1000, samples=True)]
    # 2 + 2 tiles on 3 SMs: the first wave lasts as long as the long prompt, the second as the short one.
    assert prefill_waves(chunks, 2, 3) == 2 * (1000 + 32 + 132) + 2 * (32 + 132)


def test_one_attention_kernel_knows_each_decode_or_takes_it_for_the_longest():
    unified = Roofline(deployment("RTX-4090", "Llama-3-8B", engine=VLLM))
    chunk = PrefillChunk(512, 0, samples=True)
    each = Batch((chunk,), 64, 63 * 100 + 8000, 8000, decode_lengths=(8000, *[100] * 63))
    unknown = Batch((chunk,), 64, 63 * 100 + 8000, 8000)
    alike = Batch((chunk,), 64, 64 * 8000, 8000)
    assert unified.step_ps(each) < unified.step_ps(unknown) <= unified.step_ps(alike)


def test_experts_cost_more_weights_as_the_batch_grows():
    mixture, dense = (Roofline(deployment("H100-SXM", name, 2)) for name in ("Mixtral-8x7B", "Mistral-7B"))
    few, many = (mixture.step_ps(decodes(n, 0)) for n in (1, 64))
    dense_few, dense_many = (dense.step_ps(decodes(n, 0)) for n in (1, 64))
    assert many - few > 2 * (dense_many - dense_few)


def test_grouped_queries_read_less_of_the_cache():
    grouped, alone = (Roofline(deployment("A100-80-SXM", name)) for name in ("Llama-3-8B", "Llama-2-7B"))

    def per_token(model: Roofline) -> float:
        return (model.gpu_step_ps(decodes(32, 3000)) - model.gpu_step_ps(decodes(32, 1000))) / 64_000

    assert per_token(alone) == pytest.approx(4 * per_token(grouped), rel=1e-5)


def test_eight_bits_halve_the_time_of_what_is_read():
    exact = Roofline(deployment("H100-SXM", "Llama-3-70B", 4))
    small = Roofline(deployment("H100-SXM", "Llama-3-70B", 4, precision=precision("fp8", "fp8")))
    one = decodes(1, 0)
    weights, small_weights = (m.step_cost(one).memory for m in (exact, small))
    assert 0.48 < small_weights / weights < 0.56
    long = decodes(64, 8000)
    assert small.step_cost(long).attention < 0.54 * exact.step_cost(long).attention
    assert small.step_cost(prefill(4096, 0)).compute < 0.55 * exact.step_cost(prefill(4096, 0)).compute


def test_weights_that_a_gpu_cannot_multiply_are_unpacked_which_slows_large_products_and_quickens_small_ones():
    plain, eight, four = (
        Roofline(deployment("A100-80-SXM", "Llama-3-8B", precision=precision(dtype, "bfloat16")))
        for dtype in ("bfloat16", "fp8", "int4")
    )
    many, few = ([m.step_ps(batch) for m in (plain, eight, four)] for batch in (prefill(4096, 0), decodes(4, 100)))
    assert many[0] < many[2] < many[1]
    assert few[0] > few[1] > few[2]


def test_large_products_run_in_larger_tiles_where_the_gpu_has_them():
    h100 = Roofline(deployment("H100-SXM", "Llama-2-70B"))
    assert h100.linear_seconds(520) == pytest.approx(h100.linear_seconds(768), rel=0.02)
    assert h100.linear_seconds(520) > 1.25 * h100.linear_seconds(512)


@pytest.mark.parametrize("engine", ["present-day", "vllm-2023", "vllm-kernels"])
def test_parts_add_up_to_the_step_exactly(engine):
    model = Roofline(deployment("A100-80-SXM", "Llama-2-70B", 4, engine=engine))
    for batch in (
        decodes(1, 0),
        decodes(200, 3000),
        prefill(1, 0),
        prefill(5000, 1000),
        mixed(700, 3, 9, 512),
        Batch(),
    ):
        cost = model.step_cost(batch)
        assert cost.total_ps == model.step_ps(batch)
        assert all(getattr(cost, part) >= 0 for part in PARTS)


@pytest.mark.parametrize("engine", ["present-day", "vllm-2023", "vllm-kernels"])
@pytest.mark.parametrize("launch_ms", [0.0, 0.9])
def test_pieces_of_one_prompt_take_what_each_step_takes_by_itself(engine, launch_ms):
    made = deployment("A10G", "Llama-2-7B", engine=engine)
    model = Roofline(replace(made, engine=replace(made.engine, launch_ms=launch_ms)))
    lora = LoraWork.of(((16, 300), (8, 1)))
    for num, lora_work in ((0, NO_LORA), (7, NO_LORA), (7, lora)):
        steps = [
            Batch(
                (PrefillChunk(500, 130 + n * 500, False),),
                num,
                900 * num + n * num,
                (1_000 + n) if num else 0,
                lora_work,
            )
            for n in range(6)
        ]
        ends_ps = [sum(model.step_ps(one) for one in steps[: n + 1]) for n in range(6)]
        assert model.piece_ends_ps(steps[0], 6, None) == ends_ps
        assert model.piece_ends_ps(steps[0], 4, None) == ends_ps[:4]
        assert model.piece_ends_ps(steps[0], 6, ends_ps[2]) == ends_ps[:3]
        assert model.piece_ends_ps(steps[0], 6, ends_ps[2] + 1) == ends_ps[:4]
        assert model.piece_ends_ps(steps[0], 6, -1) == ends_ps[:1]


def test_work_is_two_flops_per_weight_and_token_and_every_weight_read():
    llama = CATALOGUE.model("Llama-2-7B")
    cost = Roofline(deployment("A100-80-SXM", "Llama-2-7B")).step_cost(decodes(1, 0))
    assert cost.flops == pytest.approx(2 * (llama.layer_parameters + llama.head_parameters), rel=1e-3)
    assert cost.num_bytes == pytest.approx(2 * (llama.layer_parameters + llama.head_parameters), rel=1e-2)


def test_degree_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(CatalogueError, match=r"Qwen2\.5-7B has 28 heads .* tensor_parallel 8"):
        Roofline(deployment("A100-80-SXM", "Qwen2.5-7B", 8))


def test_an_engine_may_have_faster_kernels_than_those_that_were_fitted():
    known = deployment("H200-SXM", "Llama-3-70B", 4, engine="present-day", precision=precision("fp8", "fp8"))
    plain = Roofline(known)
    batch = Batch((PrefillChunk(500, 0, samples=True),), 32, 64_000, 2_000)
    for factor, part in (
        ("fp8_decode_factor", "attention"),
        ("prefill_factor", "attention"),
        ("all_reduce_factor", "all_reduce"),
        ("gemm_factor", "memory"),
    ):
        quick = Roofline(replace(known, engine=replace(known.engine, **{factor: 0.5})))
        saved = plain.step_ps(batch) - quick.step_ps(batch)
        assert saved > 0
        assert getattr(quick.step_cost(batch), part) < getattr(plain.step_cost(batch), part)
    assert Roofline(replace(known, engine=replace(known.engine, decode_factor=0.5))).step_ps(batch) == plain.step_ps(
        batch
    )


@pytest.mark.parametrize("past_tokens", [0, 1, 100, 5000])
def test_a_prompt_chunk_of_one_token_is_the_work_of_a_decode(past_tokens: int):
    roofline = Roofline(deployment("H100-SXM", "Llama-3-8B", 1, "present-day"))
    chunk = roofline.step_cost(Batch((PrefillChunk(1, past_tokens, samples=True),)))
    decode = roofline.step_cost(Batch((), 1, past_tokens, past_tokens))
    assert (chunk.flops, chunk.num_bytes) == (pytest.approx(decode.flops), pytest.approx(decode.num_bytes))
    # Each token before it: 4 FLOP in each of 32 layers with 32 heads of 128, and 2 x 2 bytes of their 8 KV heads.
    alone = roofline.step_cost(Batch((PrefillChunk(1, 0, samples=True),)))
    assert chunk.flops - alone.flops == pytest.approx(524_288 * past_tokens)
    assert chunk.num_bytes - alone.num_bytes == pytest.approx(131_072 * past_tokens)
