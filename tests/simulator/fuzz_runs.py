"""Runs as a user asks for them, by settings and options, drawn by number: with and without skipping steps.

    python -m tests.simulator.fuzz_runs --first 2000 --cases 5000

The corpus of `fuzz_cases` builds a cluster's parts by hand. This one goes through settings and `lorrery.simulate`, and
so also has what only they put together: engines and their LoRA kernels, mixed and autoscaled workers, tenants with
shares and limits, sessions and shared prefixes, several faults of workers and of requests, outputs that end early,
times that fall on the end of a step.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

import numpy as np

import lorrery
from lorrery.loadgen.options import LoadOptions
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import MEMORIES, QUEUES
from lorrery.service.errors import SettingsError
from lorrery.simulator.result import SimulationResult
from tests.seeds import check_all

ENGINES = ("vllm", "vllm-0.11", "sglang", "trtllm")
BATCHINGS = ("slora_loop", "continuous", "mixed", "chunked", "prefill_first", "static", "vllm", "sglang")
_WITH_ANY_BATCHING = [memory for memory in MEMORIES if memory not in ("on_demand", "estimated")]
NUM_REQUESTS = 70
STEP_MS = 10.0


@dataclass(slots=True)
class Run:
    """What to simulate.

    Attributes:
        workload: options of the load, or the requests themselves.
        overrides: settings.
        workers: processes.
        shards: schedulers.
        faults: as for `--fault`.
    """

    workload: LoadOptions | lorrery.Requests
    overrides: dict[str, object] = field(default_factory=dict)
    workers: int = 1
    shards: int = 1
    faults: list[str] = field(default_factory=list)


def draw_run(number: int) -> Run:
    """Draw a run; the settings may exclude each other."""
    rng = Random(number)
    adapters = rng.random() < 0.6
    run = Run(_workload(rng, with_adapters=adapters), workers=rng.choice([1, 2, 3, 6]))
    own = run.overrides
    own |= {"model": rng.choice(["Llama-2-7B", "Llama-3-8B"]), "scheduler.placement": rng.choice([*PLACEMENTS])}
    own |= {"scheduler.max_num_seqs": rng.choice([4, 16, 256]), "scheduler.max_req_input_len": 6_000}
    own |= {"scheduler.max_req_total_len": 8_000, "scheduler.max_num_batched_tokens": rng.choice([8_192, 9_000])}
    own |= {"adapters.registry": [{"id": "l", "rank": rng.choice([8, 64]), "count": rng.choice([3, 24])}]}
    if rng.random() < 0.4:
        own["engine"] = rng.choice(ENGINES)
    else:
        own["scheduler.batch_max_tokens"] = 9_000
        _parts(rng, own)
    _fairness(rng, own)
    if adapters:
        _adapters(rng, own)
    if rng.random() < 0.25:
        own["workers"] = [{"count": 2, "gpu": "H100-SXM"}, {"count": run.workers, "gpu": "A10G", "gpus": 2}]
        run.workers = 0
    else:
        own["worker.gpu"] = rng.choice(["A10G", "H100-SXM"])
    if rng.random() < 0.15:
        own["scheduler.deadline_admission"], own["scheduler.start_within_seconds"] = True, rng.choice([0.2, 3.0])
    if rng.random() < 0.15:
        own["autoscaler"] = {"enabled": True, "target": 2.0, "start_seconds": 0.5, "sync_period_seconds": 2.0}
        own["autoscaler"] |= {"scale_down_stabilization_seconds": 4.0, "min_replicas": 1}
    elif run.workers and rng.random() < 0.15:
        run.shards = 2
        run.workers = max(run.workers, 2)
    _faults(rng, run)
    return run


def _workload(rng: Random, *, with_adapters: bool) -> LoadOptions | lorrery.Requests:
    rate = rng.choice([2.0, 10.0, 60.0])
    if rng.random() < 0.4:
        return _requests(rng, rate, with_adapters=with_adapters)
    asked: dict[str, Any] = {"num_requests": NUM_REQUESTS, "seed": rng.randrange(1000)}
    if with_adapters:
        asked["adapters"] = "all"
    kind = rng.choice(["poisson", "chat", "mooncake", "azure"])
    if kind in ("poisson", "chat"):
        asked |= {"workload": kind, "rate": rate, "input_range": (1, 300), "output_range": (1, 200)}
        if rng.random() < 0.5:
            asked["shared_prefix"] = (rng.choice([64, 301]), 3)
        if kind == "chat":
            asked["think"] = rng.choice([0.0, 0.3])
    else:
        asked |= {"workload": kind, "speed_up": 5.0, "skip_too_long": True}
    if rng.random() < 0.3:
        asked |= {"ignore_eos": False, "max_new_tokens": 300}
    if rng.random() < 0.2 and kind in ("poisson", "chat"):
        asked["concurrency"] = rng.choice([3, 40])
        del asked["rate"]
    if rng.random() < 0.2:
        asked["timeout"] = rng.choice([0.5, 4.0])
    return LoadOptions(**asked)


def _requests(rng: Random, rate: float, *, with_adapters: bool) -> lorrery.Requests:
    """Return requests of four tenants, at times some of which are multiples of a step."""
    draws = np.random.default_rng(rng.randrange(1000))
    at = np.cumsum(draws.exponential(1 / rate, NUM_REQUESTS))
    if rng.random() < 0.5:
        at = np.round(at * 1000 / STEP_MS) * STEP_MS / 1000
    return lorrery.Requests(
        at_seconds=at,
        prompt_tokens=draws.integers(1, 400, NUM_REQUESTS),
        output_tokens=draws.integers(1, 250, NUM_REQUESTS),
        adapter_id=[f"l-{n % 3}" if with_adapters and n % 4 else None for n in draws.integers(0, 9, NUM_REQUESTS)],
        tenant_id=[f"t{n}" for n in draws.integers(0, 4, NUM_REQUESTS)],
    )


def _parts(rng: Random, own: dict[str, object]) -> None:
    policy, batching = rng.choice([*QUEUES]), rng.choice(BATCHINGS)
    if policy in ("fcfs_tail", "lpm") or batching == "sglang":  # these go together only
        policy, batching = policy if policy in ("fcfs_tail", "lpm") else "lpm", "sglang"
    if policy in ("pets", "peft") and batching in ("chunked", "prefill_first", "vllm"):
        batching = "continuous"
    own |= {"scheduler.policy": policy, "scheduler.batching": batching}
    own["scheduler.memory"] = "peak" if batching == "static" else rng.choice(_WITH_ANY_BATCHING)
    if batching == "vllm":
        own |= {"scheduler.memory": "on_demand", "scheduler.async_scheduling": rng.random() < 0.5}
    if batching == "sglang":
        own["scheduler.memory"] = "estimated"
    own["scheduler.limits"] = rng.choice(["slora", "vllm"])
    own["worker.step_time"] = rng.choice(["roofline", "naive-roofline", "constant", "constant"])
    own["worker.constant.step_ms"] = STEP_MS
    if policy == "cluster":
        own["scheduler.batch_num_adapters"] = rng.choice([1, 2])
    if batching == "slora_loop" and policy not in ("pets", "peft", "abort") and rng.random() < 0.5:
        own["scheduler.prefetch"] = True
    if rng.random() < 0.5:
        own["scheduler.prefix_cache.kind"] = "radix" if batching == "sglang" else "blocks"
        own["scheduler.prefix_cache.share_within_plan"] = rng.random() < 0.3
        own["scheduler.block_size"] = rng.choice([1, 16])


def _fairness(rng: Random, own: dict[str, object]) -> None:
    if rng.random() < 0.3 and own.get("scheduler.policy") != "cluster":
        own["scheduler.policy"] = "vtc_fair"
        own.pop("scheduler.prefetch", None)
    if own.get("scheduler.policy") == "vtc_fair":
        own["scheduler.fair_by"] = rng.choice(["adapter", "tenant"])
        if rng.random() < 0.5:
            own["scheduler.fair_max_running"] = rng.choice([1, 4])
        if rng.random() < 0.5:
            name = "t1" if own["scheduler.fair_by"] == "tenant" else "l-1"
            own["scheduler.fair_weights"] = {name: rng.choice([0.3, 4.0])}
    if rng.random() < 0.15:
        own["scheduler.max_waiting_requests_per_tenant"] = rng.choice([1, 8])


def _adapters(rng: Random, own: dict[str, object]) -> None:
    choices: dict[str, list[object]] = {
        "adapters.max_loras": [1, 2, 8],
        "adapters.max_cpu_loras": [8],
        "adapters.loading": ["blocking"],
        "adapters.max_concurrent_loads": [1],
        "adapters.load_failure_ratio": [0.1],
        "adapters.look_ahead": [0, 2],
        "adapters.max_overtakes": [0, 2],
        "adapters.host_gb_per_second": [0.02],
        "worker.lora.projections": ["all-linear"],
    }
    for key, values in choices.items():
        if rng.random() < 0.3:
            own[key] = rng.choice(values)


def _faults(rng: Random, run: Run) -> None:
    drawn: list[Callable[[], str]] = [
        lambda: f"slow_worker,at={rng.choice([0, 0.5])},worker=worker-0,factor={rng.choice([1.37, 4])},for=2",
        lambda: f"worker_loss,at={rng.choice([0.3, 1, 2.5])},worker=worker-{rng.randrange(2)},for={rng.choice([1, 3])}",
        lambda: "freeze_worker,at=1,worker=worker-0,for=0.4",
        lambda: "adapter_load_failure,at=0.2,for=1",
        lambda: "slow_adapter_load,at=0,for=3,factor=20",
        lambda: f"refuse,share={rng.choice([0.1, 0.5])},seed=3",
        lambda: f"cut,after={rng.choice([1, 20])},share=0.3,seed=4",
        lambda: "stall,after=5,seconds=0.7,first=10",
        lambda: f"delay,seconds={rng.choice([0.01, 0.2])},share=0.5",
    ]
    autoscaled = "autoscaler" in run.overrides
    for fault in rng.sample(drawn, rng.choice([0, 0, 1, 2, 3])):
        text = fault()
        if not (autoscaled and "worker" in text):
            run.faults.append(text)


def simulate(run: Run, *, one_step: bool) -> SimulationResult:
    """Simulate.

    Raises:
        SettingsError: settings that exclude each other.
    """
    return lorrery.simulate(
        {},
        run.workload,
        overrides=run.overrides,
        workers=run.workers or None,
        shards=run.shards,
        faults=run.faults,
        one_step=one_step,
    )


def text_columns(result: SimulationResult) -> dict[str, list[str]]:
    """Return what became of each request, by column."""
    columns = result.columns
    return {one.name: [str(value) for value in getattr(columns, one.name)] for one in fields(columns)}


def wrong_gaps(run: Run, result: SimulationResult) -> str | None:
    """Return how the gaps between tokens differ from those that the requests' columns say there are, or None."""
    if any(fault.startswith("stall") for fault in run.faults):
        return None  # gaps leave stalls out
    columns, itl_ms = result.columns, result.summary.itl_ms
    answered = columns.output_tokens > 0
    num_gaps = int((columns.output_tokens[answered] - 1).sum())
    if itl_ms.count != num_gaps:
        return f"{itl_ms.count} gaps for {num_gaps} tokens after the first"
    if not columns.completed[answered].all() or not num_gaps:
        return None
    seconds = float((columns.e2e_seconds - columns.ttft_seconds)[answered].sum())
    in_gaps = itl_ms.mean * itl_ms.count / 1e3
    return None if math.isclose(seconds, in_gaps, rel_tol=1e-9) else f"gaps of {in_gaps} s in {seconds} s"


def check(number: int) -> str | None:
    """Return where a run that jumps and one that steps part, or None; an exception is wrong too."""
    run = draw_run(number)
    try:
        step_by_step = simulate(run, one_step=True)
    except SettingsError:
        return None
    except Exception as error:
        return f"run {number}: {type(error).__name__}: {error}"
    in_jumps = simulate(run, one_step=False)
    for result in (step_by_step, in_jumps):
        if (found := wrong_gaps(run, result)) is not None:
            return f"run {number}: {found}; {run}"
    stepped, jumped = text_columns(step_by_step), text_columns(in_jumps)
    for name, expected in stepped.items():
        if jumped[name] != expected:
            pairs = enumerate(zip(expected, jumped[name], strict=True))
            row, (one, other) = next((row, pair) for row, pair in pairs if pair[0] != pair[1])
            return f"run {number}: {name} of request {row}: {one} against {other}; {run}"
    return None


def main() -> int:
    """Run a part of the corpus on all cores; 1 if a run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=None, help="processes; unset: one a core")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases)
    return check_all(check, numbers, jobs=options.jobs, chunk=10, noun="runs")


if __name__ == "__main__":
    sys.exit(main())
