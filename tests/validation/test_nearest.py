"""The measured runs nearest to a deployment."""

from lorrery.validation.nearest import how_far


def test_the_same_runs_are_named_if_there_are_some():
    assert how_far("vllm", "H100-SXM", "fp8", "Llama-3.1-70B", adapters=False) == (
        "nearest measured runs: 40 of vllm Llama-3.1-70B fp8 on H100-SXM, mean error TTFT 7.1 %, TPOT 4.5 %"
    )


def test_gpu_counts_before_engine_and_the_difference_is_said():
    told = how_far("vllm", "H200-SXM", "bfloat16", "Qwen3-14B", adapters=False)
    assert "fp8 on H200-SXM" in told
    assert "another engine and type of weights" in told


def test_with_adapters_the_nearest_with_adapters_are_named_too():
    told = how_far("slora", "A10G", "float16", "Llama-2-7B", adapters=True)
    assert "nearest measured runs, with adapters: 30 of slora on A10G, mean error tokens/s 0.9 %, TTFT 4.9 %" in told
