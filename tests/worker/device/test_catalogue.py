"""GPUs and models by name, and what fits."""

import pytest

from worker.device.catalogue import (
    GPUS,
    MODELS,
    CatalogueError,
    find_gpu,
    find_model,
    kv_bytes_per_token,
    kv_pool_tokens,
)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("Llama-2-7B", 6.74, 524_288),
        ("Llama-2-13B", 13.02, 819_200),
        ("Llama-2-70B", 68.98, 327_680),
        ("LLaMA-65B", 65.28, 2_621_440),
        ("Llama-3-8B", 8.03, 131_072),
        ("Llama-3-70B", 70.55, 327_680),
        ("Qwen2.5-7B", 7.62, 57_344),
        ("Qwen2.5-72B", 72.70, 327_680),
        ("Mistral-7B", 7.24, 131_072),
        ("Mixtral-8x7B", 46.70, 131_072),
        ("phi-2", 2.78, 327_680),
        ("CodeLlama-34B", 33.74, 196_608),
        ("internlm-20B", 20.09, 1_228_800),
        ("Qwen-72B", 72.28, 2_621_440),
        ("Qwen3-32B", 32.76, 262_144),
        ("BLOOM-176B", 176.23, 4_014_080),
    ],
)
def test_model_sizes_are_the_published_ones(name, billions, kv_bytes):
    model = find_model(name)
    assert round(model.num_parameters / 1e9, 2) == billions
    assert kv_bytes_per_token(model) == kv_bytes


def test_names_are_unique_and_listed():
    assert len(GPUS) == 15
    assert len(MODELS) == 16


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(CatalogueError, match=r"GPU 'A100' is not known; known: .*A100-80-SXM"):
        find_gpu("A100")
    with pytest.raises(CatalogueError, match="model 'GPT' is not known; known: Llama-2-7B, "):
        find_model("GPT")


def test_pool_is_what_the_weights_leave():
    a100, llama = find_gpu("A100-80-SXM"), find_model("Llama-2-7B")
    assert kv_pool_tokens(a100, llama) == (72_000_000_000 - 2_000_000_000 - llama.weight_bytes) // 524_288
    assert kv_pool_tokens(find_gpu("H100-SXM"), find_model("Llama-3-8B")) // 1000 == 411


def test_kv_heads_are_held_more_than_once_on_more_gpus_than_heads():
    assert kv_bytes_per_token(find_model("Llama-3-8B"), 16) == 2 * kv_bytes_per_token(find_model("Llama-3-8B"), 8)


def test_what_does_not_fit_is_refused_with_the_sum():
    with pytest.raises(CatalogueError, match=r"0\.9 x 80 GB x 1 - 2 GB x 1 - 141\.1 GB of weights = -71\.1 GB"):
        kv_pool_tokens(find_gpu("A100-80-SXM"), find_model("Llama-3-70B"))
    with pytest.raises(CatalogueError, match="does not fit on 2 x A100-80-SXM"):
        kv_pool_tokens(find_gpu("A100-80-SXM"), find_model("Llama-3-70B"), 2)
    assert kv_pool_tokens(find_gpu("A100-80-SXM"), find_model("Llama-3-70B"), 4) > 400_000
