"""Results of benchmarks, as their programs print and save them, become runs with the right load, command and figures.

`benchmarks/aiperf.json` and `guidellm.json` are cut from what aiperf 0.13 and guidellm 0.8 wrote of runs against
`lorrery serve`; `pasted.txt` has the forms of vLLM's and SGLang's blocks.
"""

import json
from pathlib import Path

import pytest

from lorrery.service.errors import FormatError
from lorrery.validation.benchmark_output import Asked, holds_benchmarks, read_benchmarks
from lorrery.validation.figures import MEASURED_KERNELS, MEASURED_STEPS
from lorrery.validation.posted import PostedRow

FOLDER = Path(__file__).with_name("benchmarks")
NOTHING = Asked("", {})


def read(name: str, asked: Asked = NOTHING) -> list[PostedRow]:
    assert holds_benchmarks(FOLDER / name)
    return read_benchmarks(FOLDER / name, asked)


def test_pasted_blocks_have_the_load_and_the_command_that_came_before_them():
    first, second = read("pasted.txt")
    assert (first.engine, first.num_requests, first.clients, first.rate) == ("vllm", 80, 8, None)
    assert first.lengths == (("uniform", 1012.5, 1500), ("uniform", 101.25, 150))
    assert first.measured == {"out_tps": 405.0, "ttft": 101.0, "tpot": 18.0}
    assert first.flags == {
        "model": "meta-llama/Llama-3.1-8B",
        "worker.tensor_parallel": 2,
        "scheduler.max_num_seqs": 128,
        "scheduler.max_num_batched_tokens": 4096,
        "scheduler.prefix_cache.kind": "none",
    }
    assert (second.engine, second.num_requests, second.clients, second.rate) == ("sglang", 200, None, 4.0)
    assert second.lengths == (("sharegpt_in", 300.0, 0), ("sharegpt_out", 200.0, 0))
    assert second.measured == {"out_tps": 800.5, "ttft": 140.0, "e2e": 3500.0}
    assert second.flags == {
        "model": "Qwen/Qwen3-32B", "worker.tensor_parallel": 4, "scheduler.prefix_cache.kind": "none"
    }  # fmt: skip


def test_what_the_caller_says_takes_precedence():
    first, _ = read("pasted.txt", Asked("vllm-0.24", {"worker.tensor_parallel": 1, "worker.gpu": "A10"}))
    assert (first.engine, first.version) == ("vllm", "0.24")
    assert (first.flags["worker.tensor_parallel"], first.flags["worker.gpu"]) == (1, "A10")


@pytest.mark.parametrize(
    ("name", "lengths", "tokens_per_second"), [("aiperf.json", (127, 30.1), 388.8), ("guidellm.json", (145, 32), 346.9)]
)
def test_results_of_other_load_generators_are_read(name: str, lengths: tuple[float, float], tokens_per_second: float):
    (row,) = read(name)
    assert (row.num_requests, row.clients, row.rate) == (20, 4, None)
    assert [mean for _, mean, _ in row.lengths] == pytest.approx(lengths)
    assert row.measured["out_tps"] == pytest.approx(tokens_per_second, abs=0.1)
    assert set(row.measured) == {"out_tps", "ttft", "tpot", "e2e"}
    assert row.measured["e2e"] == pytest.approx(row.measured["ttft"] + (lengths[1] - 1) * row.measured["tpot"], rel=0.1)


def test_saved_results_of_the_engines_own_benchmarks_are_read(tmp_path: Path):
    vllm = {
        "backend": "vllm", "model_id": "m", "num_prompts": 50, "request_rate": "inf", "max_concurrency": 4,
        "completed": 50, "total_input_tokens": 5000, "total_output_tokens": 1000, "output_throughput": 99.5,
        "mean_ttft_ms": 30.0, "mean_tpot_ms": 9.0, "mean_e2el_ms": 210.0, "ttfts": [0.03] * 50,
    }  # fmt: skip
    (row,) = _written(tmp_path / "vllm.json", json.dumps(vllm, indent=2))
    assert (row.engine, row.clients, row.rate, row.lengths[0]) == ("vllm", 4, None, ("fixed", 100.0, 0))
    assert row.measured == {"out_tps": 99.5, "ttft": 30.0, "tpot": 9.0, "e2e": 210.0}
    sglang = {
        "backend": "sglang", "dataset_name": "random", "request_rate": 2.0, "max_concurrency": None, "completed": 10,
        "random_input_len": 100, "random_output_len": 20, "random_range_ratio": 0.5, "total_input_tokens": 750,
        "total_output_tokens": 150, "output_throughput": 20.0, "mean_ttft_ms": 40.0, "mean_e2e_latency_ms": 90.0,
    }  # fmt: skip
    rows = _written(tmp_path / "sglang.jsonl", "\n".join([json.dumps(sglang), "", json.dumps(sglang)]))
    assert [(row.engine, row.clients, row.rate, row.lengths[0]) for row in rows] == [
        ("sglang", None, 2.0, ("uniform", 75.0, 100))
    ] * 2


def _written(path: Path, text: str) -> list[PostedRow]:
    path.write_text(text)
    assert holds_benchmarks(path)
    return read_benchmarks(path, NOTHING)


def test_tables_are_no_benchmarks():
    assert not holds_benchmarks(MEASURED_STEPS)
    assert not holds_benchmarks(MEASURED_KERNELS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no result of a benchmark: neither a block"),
        ("[" * 100_000, "no result of a benchmark"),
        (
            "Serving Benchmark Result\nSuccessful requests: 5\n",
            "result 1 does not say its prompt_tokens, output_tokens",
        ),
        (
            "Serving Benchmark Result\nSuccessful requests: 5\nTotal input tokens: 5\nTotal generated tokens: 5\n",
            "result 1 has no token rate, TTFT, TPOT or E2E",
        ),
    ],
)
def test_what_is_no_result_or_lacks_its_load_is_refused(tmp_path: Path, text: str, said: str):
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    with pytest.raises(FormatError, match=said):
        read_benchmarks(path, NOTHING)
