"""Whether a simulated request's cost is independent of the run's size: more requests, longer prompts, more workers.

Each point is a run in its own process, which does nothing else: CPU time of the engine as in lab/bench/sim_speed.py,
and that process's peak memory. The points of a series alternate, and a cost is the median of its runs. A series' growth
is the cost of its largest point over that of its smallest; 1 is flat.

* requests: the uniform load of lab/bench/sim_scenarios.py, whose batches do not depend on the number of requests.
* prompt tokens: block hashes are given, as in a trace, and each prompt begins with one of 16 shared halves. One worker
  with a block cache, paged memory and chunks, and the same number of prompt tokens per second.
* workers: the same request rate for each worker, and the same total number of requests, so with more workers they
  arrive within less time, and each worker has fewer. Placement is included.
* command: `lorrery simulate` as a whole, from its start to the printed report, with no and with 200 adapters; and with
  a backlog: every request arrives in the first seconds, and waits.

    python -m lab.bench.sim_growth workers.least_loaded 512     one run, as JSON; for profilers
"""

import json
import os
import runpy
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from lab.bench import sim_scenarios
from lab.bench.cluster import BenchBrokenError
from lab.bench.sim_scenarios import PROJECT, Columns, Scenario
from lab.bench.sim_speed import COMPILED, own_peak_rss_mb, run_once
from lorrery.loadgen.workload.request import BLOCK_TOKENS
from lorrery.scheduler.core.replica_settings import ReplicaSettings

FLAT_AIM = 1.5
"""Cost of the largest point of a series over that of the smallest."""
COMMAND_AIM_MB, WAITING_AIM_KB = 300.0, 1.0

PROMPT_REQUESTS, WORKER_REQUESTS = 1_000, 20_000
TOKENS_PER_SECOND = 20_000
SHARED_HALVES = 16
MOST_CPU_SECONDS = 60.0
"""Most CPU time of a point of `requests` for which the next one, with ten times as many, is run."""


def long_prompts(prompt_tokens: int, num_requests: int = PROMPT_REQUESTS) -> Scenario:
    """Return prompts of one length, half of each shared with a sixteenth of the others."""
    rng = np.random.default_rng(5)
    device = sim_scenarios.deployment("H100-SXM", "Llama-3-8B")
    num_blocks = -(-prompt_tokens // BLOCK_TOKENS)
    num_shared = num_blocks // 2
    halves = rng.integers(0, SHARED_HALVES, num_requests).tolist()
    hash_ids = [
        array("Q", range(half * num_blocks, half * num_blocks + num_shared))
        + array("Q", range((SHARED_HALVES + n) * num_blocks + num_shared, (SHARED_HALVES + n + 1) * num_blocks))
        for n, half in enumerate(halves)
    ]
    columns = Columns(
        np.cumsum(rng.exponential(prompt_tokens / TOKENS_PER_SECOND, num_requests)),
        np.full(num_requests, prompt_tokens),
        rng.integers(64, 257, num_requests),
        hash_ids=hash_ids,
    )
    replica = ReplicaSettings("fcfs", device.kv_pool_tokens(), 131_072, "chunked", "paged", prefix_cache="blocks")
    return sim_scenarios.scenario(f"prompts of {prompt_tokens:,} tokens", columns, device, replica)


def workers(placement: str, num_workers: int) -> Scenario:
    """Return the uniform load, with a rate proportional to the number of workers."""
    return _on_workers(sim_scenarios.uniform(WORKER_REQUESTS), placement, num_workers)


def workers_with_caches(placement: str, num_workers: int) -> Scenario:
    """Return prompts of 1,000 tokens with shared halves, with a rate proportional to the number of workers."""
    return _on_workers(long_prompts(1_000, WORKER_REQUESTS), placement, num_workers)


def _on_workers(one: Scenario, placement: str, num_workers: int) -> Scenario:
    columns = replace(one.columns, at_seconds=one.columns.at_seconds / num_workers)
    return replace(
        one, title=f"{num_workers} workers, {placement}", columns=columns, num_workers=num_workers, placement=placement
    )


SERIES: Mapping[str, Callable[[int], Scenario]] = {
    "requests": sim_scenarios.uniform,
    "prompt tokens": long_prompts,
    "workers.round_robin": partial(workers, "round_robin"),
    "workers.least_loaded": partial(workers, "least_loaded"),
    "workers.predicted_finish": partial(workers, "predicted_finish"),
    "workers.prefix_match": partial(workers_with_caches, "prefix_match"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Points of each series, and number of turns."""

    requests: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    prompt_tokens: tuple[int, ...] = (1_000, 10_000, 100_000)
    workers: tuple[int, ...] = (1, 8, 64, 512)
    command_requests: int = 1_000_000
    backlog_requests: tuple[int, int] = (20_000, 120_000)
    turns: int = 3

    def of(self, series: str) -> tuple[int, ...]:
        """Return the points of one series."""
        sizes: tuple[int, ...] = getattr(self, series.partition(".")[0].replace(" ", "_"))
        return sizes


QUICK = Sizes((1_000, 10_000), (1_000, 10_000), (1, 16), 10_000, (2_000, 12_000), 1)


@dataclass(slots=True)
class Point:
    """One size of a series: microseconds per request and peak memory of each run."""

    size: int
    us_per_request: list[float] = field(default_factory=list)
    peak_rss_mb: list[float] = field(default_factory=list)

    @property
    def cost_us(self) -> float:
        """Median CPU microseconds per request."""
        return median(self.us_per_request)


@dataclass(frozen=True, slots=True)
class Growth:
    """All series by name, with the points that were run, and the command as a whole.

    Attributes:
        core: core that was measured.
        command_peak_rss_mb: peak memory in MB of `lorrery simulate` by its load; the aim applies to the first two.
        waiting_kb: memory of one additional waiting request, in 1e3 bytes.
    """

    core: str
    series: dict[str, list[Point]]
    command_peak_rss_mb: dict[str, float]
    waiting_kb: float

    def ratio(self, name: str) -> float:
        """Return the cost of the largest point over that of the smallest."""
        points = self.series[name]
        return points[-1].cost_us / points[0].cost_us

    def as_json(self) -> dict[str, object]:
        """Return every run and the derived figures."""
        return {**asdict(self), "ratios": {name: self.ratio(name) for name in self.series}}


def measure(sizes: Sizes, on_run: Callable[[str], None] = lambda what: None) -> Growth:
    """Run every point; `on_run` is called with the name of the next run."""
    series = {name: [Point(size) for size in sizes.of(name)] for name in SERIES}
    core = ""
    for turn in range(sizes.turns):
        for name, points in series.items():
            cpu_seconds = 0.0
            for point in list(points):
                if name == "requests" and turn and point.size > 1_000_000:
                    continue  # one run is enough: it takes minutes
                if name == "requests" and cpu_seconds > MOST_CPU_SECONDS:
                    points.remove(point)
                    continue
                on_run(f"{name} {point.size:,}")
                result = _in_a_process([name, str(point.size)])
                core, cpu_seconds = result["core"], result["cpu_seconds"]
                point.us_per_request.append(result["us_per_request"])
                point.peak_rss_mb.append(result["peak_rss_mb"])
    return Growth(core, series, *_command(sizes, on_run))


def _command(sizes: Sizes, on_run: Callable[[str], None]) -> tuple[dict[str, float], float]:
    """Return the command's peak memory by load, and the memory of one additional waiting request."""
    adapters = ["--set", 'adapters.registry=[{id = "a", rank = 16, count = 200}]', "--num-adapters", "200"]
    usual = ["--rate", "20"]
    no_bound = ["--timeout", "1e9", "--set", "scheduler.max_waiting_requests=10000000"]
    backlog = ["--rate", "100000", "--output", "8", *no_bound]
    loads: dict[str, tuple[int, list[str]]] = {
        f"{sizes.command_requests:,} requests, no adapters": (sizes.command_requests, usual),
        f"{sizes.command_requests:,} requests, 200 adapters": (sizes.command_requests, [*usual, *adapters]),
    }
    waiting = [f"{number:,} waiting" for number in sizes.backlog_requests]
    loads |= {name: (number, backlog) for name, number in zip(waiting, sizes.backlog_requests, strict=True)}
    peaks: dict[str, float] = {}
    for name, (number, options) in loads.items():
        on_run(f"lorrery simulate, {name}")
        peaks[name] = _in_a_process(["command", "simulate", "-n", str(number), *options])["peak_rss_mb"]
    few, many = sizes.backlog_requests
    return peaks, (peaks[waiting[1]] - peaks[waiting[0]]) * 1e3 / (many - few)


def _in_a_process(arguments: list[str]) -> dict[str, Any]:
    """Run this file with the compiled core, if there is one; return the figures in its last line."""
    environment = dict(os.environ)
    if COMPILED.exists():
        environment |= {"PYTHONPATH": f"{COMPILED}{os.pathsep}{PROJECT}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "lab.bench.sim_growth", *arguments]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchBrokenError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if result["num_finished"] != result["num_requests"]:
        raise BenchBrokenError(f"{arguments}: {result['num_finished']} of {result['num_requests']} requests finished")
    return result


def _run_command(arguments: list[str]) -> dict[str, Any]:
    """Run the command `lorrery`, and continue after its end."""
    sys.argv[1:] = arguments
    status = 0
    try:
        runpy.run_module("lorrery.cli", run_name="__main__")
    except SystemExit as ended:
        status = int(ended.code or 0)
    if status:
        raise BenchBrokenError(f"lorrery {' '.join(arguments)} ended with {status}")
    return {"num_requests": 0, "num_finished": 0, "peak_rss_mb": own_peak_rss_mb()}


def main() -> None:
    """Run the point that the arguments name, or after `command` the command line that they form."""
    what, *arguments = sys.argv[1:]
    result = _run_command(arguments) if what == "command" else run_once(SERIES[what](int(arguments[0])))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
