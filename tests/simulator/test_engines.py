"""Clusters of named engines, simulated: what is theirs in how batches form, and adapters under each."""

from collections.abc import Mapping

import numpy as np
import pytest

import lorrery
from lorrery.cli.flags import with_deployment
from lorrery.service.errors import SettingsError
from lorrery.service.settings.presets import presets
from lorrery.simulator.result import SimulationResult

LOOP = {"concurrency": 6, "input_tokens": 900, "output_tokens": 60, "length_ratio": 0.8, "requests_per_client": 3}


def simulated(engine: str, workload: Mapping[str, object] = LOOP, **overrides: object) -> SimulationResult:
    settings = {"engine": engine, "model": "Llama-3.1-8B", "worker.gpu": "H100-SXM"}
    return lorrery.simulate({}, workload, overrides=settings | {k.replace("__", "."): v for k, v in overrides.items()})


@pytest.mark.parametrize("engine", presets())
def test_adapters_run_under_each_engine_and_decisions_do_not_depend_on_jumps(engine: str):
    settings = {
        "engine": engine,
        "adapters.registry": [{"id": "a", "rank": 16, "count": 5}],
        "adapters.max_loras": 2,
        "scheduler.max_num_seqs": 4,
    }
    jumped, stepped = (
        lorrery.simulate({}, LOOP | {"adapters": "all"}, overrides=settings, one_step=one_step)
        for one_step in (False, True)
    )
    assert jumped.summary.num_completed == 18
    assert np.array_equal(jumped.columns.end_seconds, stepped.columns.end_seconds)
    assert np.array_equal(jumped.columns.ttft_seconds, stepped.columns.ttft_seconds)


def test_long_prompts_need_no_further_settings():
    workload = {"concurrency": 2, "input_tokens": 30_000, "output_tokens": 20, "requests_per_client": 1}
    for engine in presets():
        assert simulated(engine, workload).summary.num_completed == 2


def test_sglang_holds_decodes_up_until_a_wave_of_prompts_is_computed():
    workload = {"concurrency": 8, "input_tokens": 20_000, "output_tokens": 30, "requests_per_client": 1}
    longest = {engine: simulated(engine, workload).summary.itl_ms.p99 for engine in ("vllm", "sglang")}
    # Eight prompts of three chunks each: with vLLM's way a decode waits for one chunk, with SGLang's for all of them.
    assert longest["sglang"] > 5 * longest["vllm"]


def test_trtllm_lets_nobody_in_whom_it_could_have_to_put_out():
    workload = {"concurrency": 2, "input_tokens": 96, "output_tokens": 224, "requests_per_client": 1}
    lengths = {"scheduler__max_total_token_num": 480, "scheduler__block_size": 16}
    for memory, together in (("no_evict", False), ("paged", True)):
        columns = simulated("trtllm", workload, scheduler__memory=memory, **lengths).columns
        assert (columns.ttft_seconds.max() < columns.end_seconds.min()) == together


def test_option_and_set_that_say_the_same_are_refused_by_name():
    assert with_deployment({"engine": "vllm", "tensor_parallel": 2, "other": 3}, ["scheduler.seed=1"]) == [
        "engine=vllm",
        "worker.tensor_parallel=2",
        "scheduler.seed=1",
    ]
    with pytest.raises(
        SettingsError, match=r"--gpu L4 and --set worker\.gpu=A40 both say what worker\.gpu is; give one"
    ):
        with_deployment({"gpu": "L4"}, ["worker.gpu=A40"])


def test_an_engine_is_one_worker_unless_more_are_asked_for():
    def num_workers(overrides: Mapping[str, object], workers: int | None = None) -> int:
        columns = lorrery.simulate({}, {"num_requests": 40, "rate": 20}, overrides=overrides, workers=workers).columns
        return len(set(columns.worker_id))

    assert num_workers({"engine": "vllm"}) == 1
    assert num_workers({"engine": "vllm"}, workers=3) == 3
    assert num_workers({}) == 2
