"""The roofline against the values that its formulas and constants are published with, and its shape."""

import pytest

from worker.device.batch import Batch, PrefillChunk
from worker.device.catalogue import CatalogueError, find_gpu, find_model
from worker.device.roofline import HOSTS, HostCost, Kernels, Roofline, prefill_waves

# The tables that the constants were fitted to: Vidur's time the add and not the head, LLMServingSim's the opposite.
VIDUR = Kernels(separate_add=True, head=False)
SERVING_SIM = Kernels(separate_add=False, head=True)


def decodes(num: int, kv_tokens: int) -> Batch:
    return Batch((), num, num * kv_tokens, kv_tokens)


def prefill(new_tokens: int, past_tokens: int) -> Batch:
    return Batch((PrefillChunk(new_tokens, past_tokens, samples=True),))


@pytest.mark.parametrize(
    ("gpu", "model", "degree", "kernels", "batch", "gpu_step_ms"),
    [
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, decodes(1, 512), 10.074),
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, decodes(32, 512), 15.285),
        ("A100-80-SXM", "Llama-2-7B", 1, VIDUR, prefill(1024, 0), 70.957),
        ("A100-80-SXM", "Llama-2-70B", 2, VIDUR, decodes(64, 1024), 64.395),
        ("A100-80-SXM", "Llama-2-70B", 2, VIDUR, prefill(512, 1024), 204.618),
        (
            "A100-80-SXM",
            "Llama-2-70B",
            2,
            VIDUR,
            Batch((PrefillChunk(512, 0, samples=True),), 32, 32 * 2048, 2048),
            224.301,
        ),
        ("RTX-PRO-6000", "Llama-3-8B", 1, SERVING_SIM, decodes(64, 2048), 23.537),
        ("RTX-PRO-6000", "Llama-3-8B", 1, SERVING_SIM, prefill(1024, 2048), 47.457),
        ("A40", "Llama-2-7B", 1, VIDUR, decodes(32, 512), 39.818),
    ],
)
def test_gpu_step_is_the_published_one(gpu, model, degree, kernels, batch, gpu_step_ms):
    roofline = Roofline(find_gpu(gpu), find_model(model), degree, kernels=kernels)
    assert round(roofline.gpu_step_ps(batch) / 1e9, 3) == gpu_step_ms


def test_host_adds_its_share_per_step_and_per_sequence():
    roofline = Roofline(find_gpu("A100-80-SXM"), find_model("Llama-2-7B"))
    batch = decodes(32, 512)
    assert roofline.step_ps(batch) - roofline.gpu_step_ps(batch) == 2_640_000_000
    assert roofline.step_ps(Batch()) == 2_000_000_000


def test_slow_launches_bound_the_step_and_leave_no_closed_form():
    gpu, model = find_gpu("H100-SXM"), find_model("Llama-3-8B")
    launch_bound = Roofline(gpu, model, host=HOSTS["vllm-2023-h100"])
    batch = decodes(1, 100)
    assert launch_bound.step_ps(batch) == round((32 * 0.326 + 4.3 + 0.31) * 1e9)
    assert launch_bound.decode_segment(1, 100, 100) is None
    assert launch_bound.decode_segment(64, 64 * 8000, 8000) is not None
    free = Roofline(gpu, model, host=HostCost(0, 0, 0, 0))
    assert free.step_ps(batch) == free.gpu_step_ps(batch)


def test_waves_of_one_prompt_are_tiles_over_sms():
    # 16 x 32 tiles on 108 SMs: 5 waves, each as long as half the chunk and the offset.
    assert prefill_waves([PrefillChunk(1024, 0, samples=True)], 32, 108) == 2 * 5 * (512 + 132)


def test_longest_tiles_run_first():
    chunks = [PrefillChunk(64, 0, samples=True), PrefillChunk(64, 1000, samples=True)]
    # 2 + 2 tiles on 3 SMs: the first wave lasts as long as the long prompt, the second as the short one.
    assert prefill_waves(chunks, 2, 3) == 2 * (1000 + 32 + 132) + 2 * (32 + 132)


def test_experts_cost_more_weights_as_the_batch_grows():
    gpu, mixture = find_gpu("H100-SXM"), find_model("Mixtral-8x7B")
    dense = find_model("Mistral-7B")
    few, many = (Roofline(gpu, mixture, 2).step_ps(decodes(n, 0)) for n in (1, 64))
    dense_few, dense_many = (Roofline(gpu, dense, 2).step_ps(decodes(n, 0)) for n in (1, 64))
    assert many - few > 2 * (dense_many - dense_few)


def test_degree_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(CatalogueError, match=r"Qwen2\.5-7B has 28 heads .* tensor_parallel 8"):
        Roofline(find_gpu("A100-80-SXM"), find_model("Qwen2.5-7B"), 8)
