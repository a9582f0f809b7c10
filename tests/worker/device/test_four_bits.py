"""Weights in 4 bits: how many bytes they take, in which type they are multiplied, and which models may have them."""

import pytest

from lorrery.worker.device.basis import Ground, grounds
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.catalogue.hardware import EXPERT_TYPES, TYPE_BYTES, CatalogueError
from lorrery.worker.device.deployment import Deployment, weight_bytes
from lorrery.worker.device.kernels import compute_type
from lorrery.worker.device.naive import NaiveRoofline
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, decodes, deployment


def test_checkpoints_of_gpt_oss_have_the_size_of_their_files():
    # 65.2 and 13.8 GB: the sizes of the repositories' weights.
    for name, gigabytes in (("gpt-oss-120b", 65.2), ("gpt-oss-20b", 13.8)):
        model = CATALOGUE.model(name)
        assert weight_bytes(model, precision("mxfp4", "bfloat16", model)) == pytest.approx(gigabytes * 1e9, rel=0.01)


def test_other_weights_than_experts_stay_in_16_bits_in_mxfp4():
    model = CATALOGUE.model("gpt-oss-120b")
    experts = model.num_layers * model.num_experts * model.expert_parameters
    others = model.layer_parameters - experts
    for dtype, others_bytes in (("mxfp4", 2.0), ("nvfp4", TYPE_BYTES["nvfp4"])):
        expected = others * others_bytes + experts * TYPE_BYTES[dtype] + 2 * model.embedding_parameters
        assert weight_bytes(model, precision(dtype, "bfloat16")) == round(expected)


def test_mxfp4_is_refused_for_a_model_without_experts():
    with pytest.raises(CatalogueError, match="mxfp4 is one of experts, and Llama-3-8B has none; int4 and nvfp4"):
        precision("mxfp4", "bfloat16", CATALOGUE.model("Llama-3-8B"))


def test_a_gpu_multiplies_in_4_bits_only_if_it_can():
    h100, b200 = CATALOGUE.gpu("H100"), CATALOGUE.gpu("B200")
    assert compute_type(b200, "nvfp4") == (b200.fp4_tflops, "nvfp4")
    assert compute_type(h100, "nvfp4") == (h100.tflops, "int4")
    for unpacked in ("mxfp4", "int4"):
        assert compute_type(b200, unpacked) == (b200.tflops, unpacked)
    assert compute_type(CATALOGUE.gpu("A100"), "fp8_block") == (312, "bf16")
    assert set(TYPE_BYTES) == set(EXPERT_TYPES)


@pytest.mark.parametrize(("gpu", "model", "degree"), [("B200", "Llama-3.1-70B", 1), ("GB300", "Qwen3-235B-A22B", 2)])
def test_narrower_weights_never_take_longer_where_the_gpu_multiplies_them(gpu, model, degree):
    for kind in (Roofline, NaiveRoofline):
        steps = [
            kind(deployment(gpu, model, degree, "vllm-async", precision=precision(dtype, "fp8")))
            for dtype in ("nvfp4", "fp8", "bfloat16")
        ]
        for batch in (decodes(1, 500), decodes(64, 500)):
            times = [step.step_ps(batch) for step in steps]
            assert times == sorted(times)


def test_marlins_kernel_is_faster_with_few_tokens_and_slower_with_prompts():
    four_bits = precision("mxfp4", "bfloat16")
    auto, marlin, elsewhere = (
        deployment(gpu, "gpt-oss-120b", 2, "vllm", precision=four_bits, moe_backend=backend)
        for gpu, backend in (("H100-SXM", "auto"), ("H100-SXM", "marlin"), ("B200", "marlin"))
    )
    prompt = Batch((PrefillChunk(8192, 0, samples=True),))
    assert Roofline(marlin).step_ps(decodes(4, 500)) < Roofline(auto).step_ps(decodes(4, 500))
    assert Roofline(marlin).step_ps(prompt) > 1.5 * Roofline(auto).step_ps(prompt)
    own = deployment("B200", "gpt-oss-120b", 2, "vllm", precision=four_bits)
    assert Roofline(elsewhere).step_ps(prompt) == Roofline(own).step_ps(prompt)
    assert [of_experts(one).basis for one in (auto, marlin, elsewhere)] == ["fitted", "fitted", "assumed"]
    assert of_experts(elsewhere).why == "no measurement of Marlin's kernel on B200: the one timed for mxfp4"


def of_experts(known: Deployment) -> Ground:
    return next(ground for ground in grounds(known) if ground.part == "moe")


def test_a_model_that_does_not_fit_says_how_its_checkpoint_is_stored():
    with pytest.raises(CatalogueError, match=r"KV cache; its checkpoint is in mxfp4, 65\.1 GB$"):
        deployment("H100-SXM", "gpt-oss-120b").kv_pool_tokens()
    with pytest.raises(CatalogueError, match=r"GB for the KV cache$"):
        deployment("H100-SXM", "Llama-3-70B").kv_pool_tokens()
