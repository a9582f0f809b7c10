"""Experts as a grouped product: its formulas, how they are cut and dealt, and that older engines keep theirs."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lorrery.service.files.reading import read_tables
from lorrery.worker.device.basis import grounds
from lorrery.worker.device.batch import Batch, LoraWork, PrefillChunk
from lorrery.worker.device.calibration.kernel_prediction import KernelPredictions
from lorrery.worker.device.calibration.kernel_rows import read_kernel_rows
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.catalogue.hardware import CatalogueError, KernelFit, MoeFit
from lorrery.worker.device.catalogue.tables import PACKAGE, Catalogue
from lorrery.worker.device.deployment import weight_bytes
from lorrery.worker.device.moe import DISTRIBUTIONS, ExpertKernels, Experts
from lorrery.worker.device.naive import NaiveRoofline
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, deployment

H100 = CATALOGUE.gpu("H100-SXM")
QWEN = Experts.of(CATALOGUE.model("Qwen3-235B-A22B"))
EXCERPT = Path(__file__).parents[3] / "src" / "lorrery" / "validation" / "data" / "kernel_measured_excerpt.csv"
PLAIN = MoeFit(flops=0.5, bandwidth=0.8, us=20.0, expert_rows=32, activation_bandwidth=0.4, all_pairs=0.25)


def kernels(experts: Experts = QWEN, groups: int = 1, cut: int = 1, distribution: str = "served") -> ExpertKernels:
    return ExpertKernels(
        H100,
        PLAIN,
        experts,
        tflops=1000.0,
        weight_bytes=1.0,
        expert_parallel=groups,
        cut=cut,
        distribution=distribution,
    )


def decodes(num: int, kv_tokens: int) -> Batch:
    return Batch((), num, num * kv_tokens, kv_tokens)


def modern(model: str, degree: int, groups: int = 1, **more: object) -> Roofline:
    return Roofline(deployment("H100-SXM", model, degree, "present-day", expert_parallel=groups, **more))


# --- the formulas ---


def test_time_is_that_of_products_weights_permutation_and_a_constant():
    # By hand, for 16 tokens of 2 of 8 experts of 1000 x 512, dealt to 2 groups: 4 held, all read, 16 pairs.
    small = Experts(hidden=1000, ffn=512, count=8, per_token=2)
    compute = 2 * 3 * 1000 * 512 * (16 + 4 * 32) / (1000e12 * 0.5)
    memory = 4 * 3 * 1000 * 512 / (3350e9 * 0.8)
    moved = 2 * (3 * 512 + 2 * 1000) * (0.25 * 32 + 0.75 * 16) / (3350e9 * 0.4)
    times = kernels(small, groups=2, distribution="balanced").times(16)
    assert times.seconds == pytest.approx((compute**2 + memory**2) ** 0.5 + moved + 20e-6, rel=1e-12)
    assert times.constant == pytest.approx(20e-6)
    assert times.flops == 2 * 3 * 1000 * 512 * 16


def test_ungated_experts_have_two_products():
    gated, plain = (kernels(replace(QWEN, gated=gate)).times(4096) for gate in (True, False))
    assert plain.flops * 3 == gated.flops * 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(128, 8), (8, 2), (512, 10), (1, 1), (4, 4), (7, 3)])
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
def test_more_tokens_never_take_less_time(distribution: str, shape: tuple[int, int], groups: int):
    count, per_token = shape
    if groups > count:
        return
    experts = kernels(Experts(1024, 256, count, per_token), groups, distribution=distribution)
    tokens = [*range(1, 300), *(int(1.07**power) for power in range(85, 180))]
    seconds = [experts.times(n).seconds for n in tokens]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds))
    for n in tokens:
        assert 1 <= experts.imbalance(n) <= max(min(groups, count / per_token), 1) + 1e-12
        assert 1 <= experts.read(n) <= -(-count // groups)


def test_one_token_reads_the_experts_that_it_uses_and_many_read_all():
    for distribution in DISTRIBUTIONS:
        assert kernels(distribution=distribution).read(1) == pytest.approx(8)
        assert kernels(distribution=distribution).read(100_000) == pytest.approx(128, rel=0.05)
    # Served tokens prefer the same experts; balanced ones never meet before all are in use.
    read = {name: kernels(distribution=name).read(16) for name in DISTRIBUTIONS}
    assert read["served"] < read["power_law_1.2"] < read["balanced"] == 128


def test_gpu_with_most_pairs_has_more_of_them_the_more_groups_there_are():
    shares = [kernels(groups=groups).imbalance(256) for groups in (1, 2, 4, 8, 16)]
    assert shares[0] == 1.0
    assert shares == sorted(shares)
    assert all(kernels(groups=groups, distribution="balanced").imbalance(256) == 1.0 for groups in (1, 8))
    # No expert has more pairs than there are tokens.
    assert kernels(Experts(4096, 14336, 8, 2), groups=8, distribution="power_law_1.2").imbalance(10**6) == 4.0


# --- in a step ---


def test_experts_are_a_kernel_of_their_own_for_present_day_engines_alone():
    # The older engines' figures as they were before experts had kernels of their own.
    older = Roofline(deployment("A100-80-SXM", "Mixtral-8x7B", 2, "vidur-2024"))
    assert older.step_ps(decodes(16, 1000)) == 33_591_220_581
    assert older.step_ps(Batch((PrefillChunk(700, 0, samples=True),), 3, 3000, 1000)) == 61_744_233_449
    known = deployment("H100-SXM", "Qwen3-30B-A3B", 1, "vllm-2023")
    assert Roofline(known).step_ps(decodes(16, 1000)) == 25_058_018_430
    assert Roofline(replace(known, expert_distribution="balanced")).step_ps(decodes(16, 1000)) == 25_058_018_430
    balanced, served = (
        modern("Qwen3-30B-A3B", 1, expert_distribution=name).step_ps(decodes(16, 1000))
        for name in ("balanced", "served")
    )
    assert balanced > served


def test_decode_steps_in_closed_form_are_those_one_by_one():
    model = modern("Qwen3-235B-A22B", 8, 8)
    segment = model.decode_segment(37, 37 * 500, 500)
    assert segment is not None
    for step in range(5):
        assert model.step_ps(decodes(37, 500 + step)) == segment.step_ps(step)


def test_parts_of_a_step_add_up():
    model, batch = modern("Qwen3-235B-A22B", 8, 4), decodes(64, 800)
    assert model.step_cost(batch).total_ps == model.step_ps(batch)


def test_experts_that_all_tokens_share_are_computed_and_held():
    plain = deployment("H100-SXM", "Qwen3-30B-A3B", 1, "present-day")
    shared = replace(plain, model=replace(plain.model, shared_ffn=2048))
    few = decodes(4, 100)
    assert Roofline(shared).step_ps(few) > Roofline(plain).step_ps(few) + 48 * 10**6
    assert shared.model.num_parameters - plain.model.num_parameters == 48 * 3 * 2048 * 2048


def test_engine_may_have_another_kernel_for_experts_in_eight_bits():
    eight = precision("fp8", "bfloat16")
    vllm, trtllm = (
        Roofline(deployment("H100-SXM", "Qwen3-235B-A22B", 4, name, precision=eight)) for name in ("vllm", "trtllm")
    )
    assert trtllm.step_cost(decodes(32, 500)).memory < 0.5 * vllm.step_cost(decodes(32, 500)).memory


def test_kernels_without_constants_for_experts_are_products():
    known = deployment("RTX-4090", "Mixtral-8x7B", 4, "present-day")
    assert not known.fit.moe
    assert Roofline(known).step_ps(decodes(8, 100)) > 0


def test_adapters_on_the_attention_of_a_mixture_cost_what_they_do_elsewhere():
    model = modern("Qwen3-235B-A22B", 8, 8)
    plain = decodes(8, 500)
    with_adapters = replace(plain, lora=LoraWork.of([(16, 4), (8, 4)]))
    cost = model.step_cost(with_adapters)
    assert cost.lora > 0
    assert cost.total_ps == model.step_ps(plain) + cost.lora


def test_figures_say_what_experts_rest_on():
    def basis(gpu: str) -> str:
        known = deployment(gpu, "Qwen3-30B-A3B", 1, "present-day")
        return next(ground.basis for ground in grounds(known) if ground.part == "moe")

    assert basis("H100-SXM") == "fitted"
    assert basis("L40") == "assumed"


def test_models_that_are_computed_otherwise_than_they_are_say_so():
    known = deployment("H100-SXM", "openai/gpt-oss-120b", 2, "present-day")
    known = replace(known, model=replace(known.model, caveat="computed as if it had no sinks"))
    assert any("as if it had no sinks" in ground.why for ground in grounds(known))
    for name in ("DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "DeepSeek-V2-Chat"):
        with pytest.raises(CatalogueError, match=r"is not modelled: its attention is multi-head latent"):
            CATALOGUE.model(name)
    # A table of one's own may have such a model all the same.
    table = {"format": 1, "not_modelled": {"X": "no"}, "model": [{**SMALL, "name": "X"}]}
    assert Catalogue([*read_tables(PACKAGE), ("own", table)]).model("X").ffn == 64


SMALL = {"num_layers": 1, "hidden": 64, "num_heads": 1, "num_kv_heads": 1, "head_size": 64, "ffn": 64, "vocabulary": 9}


# --- cut and dealt ---


@pytest.mark.parametrize(
    ("model", "degree", "groups", "message"),
    [
        ("Qwen3-235B-A22B", 8, 3, "expert_parallel 3 must divide tensor_parallel, which is 8"),
        ("Qwen3-235B-A22B", 4, 8, "expert_parallel 8 must divide tensor_parallel, which is 4"),
        ("Llama-3-70B", 8, 8, "Llama-3-70B has no experts; expert_parallel 8 must be 1"),
        ("Mixtral-8x7B", 16, 16, "Mixtral-8x7B has 8 experts; expert_parallel 16 must be at most that"),
        ("Qwen3-235B-A22B", 3, 3, "tensor_parallel 3 must divide the heads"),
    ],
)
def test_experts_that_cannot_be_dealt_so_are_refused(model: str, degree: int, groups: int, message: str):
    known = deployment("H100-SXM", model, degree, "present-day", expert_parallel=groups)
    for build in (Roofline, NaiveRoofline, lambda d: d.kv_pool_tokens()):
        with pytest.raises(CatalogueError, match=message):
            build(known)


def test_experts_are_not_dealt_where_nothing_is_known_of_their_kernels():
    for gpu, engine in (("H100-SXM", "vidur-2024"), ("RTX-4090", "present-day")):
        with pytest.raises(CatalogueError, match=f"not for engine {engine} on {gpu}: leave it at 1"):
            Roofline(deployment(gpu, "Mixtral-8x7B", 4, engine, expert_parallel=4))


def test_unknown_distribution_is_refused():
    with pytest.raises(CatalogueError, match=r"known: balanced, power_law_1\.2, power_law_1\.01, served"):
        kernels(distribution="zipf")


def test_dealt_experts_need_not_be_divided_by_the_gpus_that_cut_attention():
    odd = replace(CATALOGUE.model("Qwen3-30B-A3B"), ffn=766)  # 4 does not divide it
    whole = replace(deployment("H100-SXM", "Qwen3-30B-A3B", 4, "present-day"), model=odd)
    with pytest.raises(CatalogueError, match="must divide both"):
        Roofline(whole)
    dealt = replace(whole, expert_parallel=4)
    assert Roofline(dealt).step_ps(decodes(1, 1)) > 0
    assert dealt.kv_pool_tokens() > 0


def test_fullest_group_decides_how_much_memory_is_left():
    model = CATALOGUE.model("Mixtral-8x7B")
    even, odd = (replace(model, num_experts=count) for count in (8, 9))
    spare = weight_bytes(odd, expert_parallel=4) - weight_bytes(odd)
    assert weight_bytes(even, expert_parallel=4) == weight_bytes(even)
    assert spare == 2 * 3 * odd.num_layers * odd.expert_parameters  # four groups of 3 hold 12


# --- measured kernels ---


def predictions() -> list[tuple[float, float]]:
    predict = KernelPredictions(CATALOGUE).predict
    with EXCERPT.open(encoding="utf-8", newline="") as file:
        rows = [row for row in read_kernel_rows(file)[1] if row.op == "moe"]
    found = [(row.latency_us, predict(row).us) for row in rows]
    assert all(us is not None for _, us in found)
    return [(measured, us or 0.0) for measured, us in found]


def test_measured_experts_are_met_within_18_percent():
    errors = [abs(us / measured - 1) for measured, us in predictions()]
    assert len(errors) >= 50
    assert sum(errors) / len(errors) < 0.18


def test_fit_without_experts_says_so():
    row = next(row for row in read_kernel_rows(ROWS)[1])
    prediction = KernelPredictions(CATALOGUE).predict(row)
    assert prediction.us is None
    assert "no constants for experts" in prediction.why


ROWS = [
    "gpu,op,dtype,latency_us,tokens,hidden,ffn,top_k,num_experts,moe_tp,moe_ep,distribution",
    "RTX-4090,moe,bfloat16,100,8,2048,768,8,128,1,1,balanced",
]


def test_type_without_constants_takes_those_of_16_bits():
    fit = KernelFit(1.0, 1.0, {}, {}, {"bf16": PLAIN})
    assert fit.moe_of("fp8_block") is PLAIN
    assert KernelFit(1.0, 1.0, {}, {}).moe_of("bf16") is None
