"""CPU cost of simulating a request: the whole engine, compared with a bare closed-form loop.

The engine is that of `lorrery simulate`: the complete scheduler core and mock GPU. It is timed from a workload in
columns to the times of each first token and end, in columns; drawing the workload is excluded, making the requests is
included. The bare loop (lab/bench/bare_sim.py) gets the same columns and yields the same two times. They alternate, and
a ratio is the median over the turns; a cost is the median of its runs. CPU time is the process's, user and system.

If the compiled core has been built (`make compiled`), a second process with it takes turns too, as do other simulators
if installed (lab/bench/sim_peers.py).

Peak memory is measured in a separate process, which does nothing else; it includes interpreter and libraries.

    python -m lab.bench.sim_speed uniform 100000       one run, as JSON; for profilers
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from lab.bench import bare_sim, sim_scenarios
from lab.bench.cluster import BenchBrokenError
from lab.bench.companion import Companion
from lab.bench.sim_peers import PeerRow, Peers
from lab.bench.sim_scenarios import PROJECT, Scenario
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.service.installed import core_is_compiled
from lorrery.simulator.interpreter import garbage_collected_seldom
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.steptime import pace_of

BARE_AIM, GROWTH_AIM, LENGTH_AIM, MEMORY_AIM_MB = 8.0, 1.5, 1.5, 600.0

COMPILED = PROJECT / "build" / "compiled"
"""Folder in which `make compiled` unpacks the wheel with the compiled core."""

T = TypeVar("T")


class Core(StrEnum):
    """The two ways to run the same files."""

    INTERPRETED = "interpreted"
    COMPILED = "compiled"

    @classmethod
    def here(cls) -> "Core":
        """Return the kind of core of this process."""
        return cls.COMPILED if core_is_compiled() else cls.INTERPRETED


RATE_AIMS: Mapping[str, Mapping[Core, float]] = {
    "vidur": {Core.INTERPRETED: 35_000, Core.COMPILED: 100_000},
    "multi-lora": {Core.INTERPRETED: 15_000, Core.COMPILED: 40_000},
    "mooncake": {Core.INTERPRETED: 8_000, Core.COMPILED: 25_000},
    "fleet": {Core.COMPILED: 10_000},
}
"""Minimum requests per CPU second of a load, if there is an aim."""

SCENARIOS: Mapping[str, Callable[[int], Scenario]] = {
    "vidur": sim_scenarios.vidur,
    "uniform": sim_scenarios.uniform,
    "doubled": lambda num_requests: sim_scenarios.uniform(num_requests, 2),
    "multi-lora": sim_scenarios.multi_lora,
    "mooncake": sim_scenarios.mooncake,
    "fleet": sim_scenarios.fleet,
}
BARE_TOO = ("vidur", "uniform", "doubled")
"""Loads that the bare loop supports: one worker that is not overloaded, no adapters, no prefixes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: requests of each load, and turns.

    Attributes:
        small_uniform: size with which `uniform` is compared, and of the load with outputs twice as long.
        few: turns of the large loads.
        many: turns of the small loads, in each turn of the large ones.
    """

    vidur: int = 2_000
    uniform: int = 1_000_000
    small_uniform: int = 10_000
    multi_lora: int = 200_000
    mooncake: int = 2_000
    few: int = 3
    many: int = 5


QUICK = Sizes(uniform=50_000, multi_lora=5_000, mooncake=200, few=2, many=3)


@dataclass(frozen=True, slots=True)
class Times:
    """Result of our simulation: times in picoseconds in request order, -1 for a refused request."""

    num_finished: int
    output_tokens: int
    first_token_ps: "array[int]"
    finished_ps: "array[int]"


@dataclass(slots=True)
class SpeedRow:
    """One load's cost.

    Attributes:
        cpu_seconds: of each of our runs, by core.
        bare_cpu_seconds: of each run of the bare loop, alternating with ours; empty if it does not support the load.
        peak_rss_mb: of a process that only runs this load, with this process's core; None: not measured.
    """

    load: str
    title: str
    num_requests: int
    num_finished: int = 0
    output_tokens: int = 0
    cpu_seconds: dict[Core, list[float]] = field(default_factory=dict)
    bare_cpu_seconds: list[float] = field(default_factory=list)
    peak_rss_mb: float | None = None

    def us_per_request(self, core: Core) -> float:
        """Return the median CPU microseconds per request."""
        return median(self.cpu_seconds[core]) / self.num_requests * 1e6

    def requests_per_second(self, core: Core) -> float:
        """Return requests per second of CPU time."""
        return 1e6 / self.us_per_request(core)

    @property
    def bare_us_per_request(self) -> float | None:
        """Median CPU microseconds per request of the bare loop."""
        return median(self.bare_cpu_seconds) / self.num_requests * 1e6 if self.bare_cpu_seconds else None

    def bare_ratio(self, core: Core) -> float | None:
        """Return our cost over the bare loop's, median over the turns."""
        if not self.bare_cpu_seconds:
            return None
        return median(ours / bare for ours, bare in zip(self.cpu_seconds[core], self.bare_cpu_seconds, strict=True))

    def as_json(self) -> dict[str, object]:
        """Return every run, and figures derived by core."""
        return {
            **{key: getattr(self, key) for key in SpeedRow.__slots__},
            "us_per_request": {core: self.us_per_request(core) for core in self.cpu_seconds},
            "bare_us_per_request": self.bare_us_per_request,
            "bare_ratio": {core: self.bare_ratio(core) for core in self.cpu_seconds},
        }


@dataclass(frozen=True, slots=True)
class SimSpeed:
    """All rows, by name; `uniform small` differs from `uniform` only in size, and from `doubled` only in lengths."""

    rows: dict[str, SpeedRow]
    peers: list[PeerRow] = field(default_factory=list)

    @property
    def cores(self) -> tuple[Core, ...]:
        """Cores that took turns."""
        return tuple(self.rows["uniform"].cpu_seconds)

    def growth_ratio(self, core: Core) -> float:
        """Return the cost per request of the large uniform load over that of the small one."""
        return self.rows["uniform"].us_per_request(core) / self.rows["uniform small"].us_per_request(core)

    def length_ratio(self, core: Core) -> float:
        """Return the cost per request with outputs twice as long over that with unchanged outputs."""
        doubled, base = (self.rows[name].cpu_seconds[core] for name in ("doubled", "uniform small"))
        return median(longer / shorter for longer, shorter in zip(doubled, base, strict=True))

    def as_json(self) -> dict[str, object]:
        """Return every run, and figures derived by core."""
        return {
            "rows": {name: row.as_json() for name, row in self.rows.items()},
            "peers": [row.as_json() for row in self.peers],
            "growth_ratio": {core: self.growth_ratio(core) for core in self.cores},
            "length_ratio": {core: self.length_ratio(core) for core in self.cores},
        }


class CompiledCore(Companion):
    """A process with the compiled core that performs runs on request."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{COMPILED}{os.pathsep}{PROJECT}", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "lab.bench.sim_speed"]
        super().__init__("the process with the compiled core", command, PROJECT, environment)

    def run(self, load: str, num_requests: int) -> float:
        """Return the CPU seconds of one run.

        Raises:
            BenchBrokenError: the process has exited, its core is not compiled, or requests are missing.
        """
        result = self.ask(f"{load} {num_requests}")
        if result["core"] != Core.COMPILED:
            raise BenchBrokenError(f"{COMPILED} has no compiled core; run make compiled")
        if result["num_finished"] != num_requests:
            raise BenchBrokenError(f"{load}: {result['num_finished']} of {num_requests} requests finished, compiled")
        seconds: float = result["cpu_seconds"]
        return seconds


def simulate(scenario: Scenario) -> Times:
    """Run a load through the engine: from its columns to the columns of its times."""
    with garbage_collected_seldom():  # includes building the parts, as `SimulatedRun.run` does
        return _simulate(scenario)


def _simulate(scenario: Scenario) -> Times:
    workers = build_workers(
        scenario.num_workers,
        scenario.replica,
        scenario.step_time,
        lambda settings: build_replica(settings, make_queue=scenario.make_queue, load_ps=scenario.adapter_load_ps),
        pace=pace_of(scenario.step_time),
    )
    simulation = Simulation(workers, PLACEMENTS[scenario.placement](np.random.default_rng(1)))
    columns = scenario.columns
    with_prompts = columns.hash_ids is not None
    requests = build_requests(
        columns.requests(), scenario.model, scenario.adapters, with_prompts=with_prompts, by_ids=with_prompts
    )
    first_token_ps, finished_ps = (array("q", [-1]) * len(columns) for _ in range(2))
    num_finished = output_tokens = 0
    for request in simulation.run(requests):
        if request.outcome == "finished":
            assert request.first_token_ps is not None
            assert request.finished_ps is not None
            first_token_ps[request.handle] = request.first_token_ps
            finished_ps[request.handle] = request.finished_ps
            output_tokens += request.output_tokens
            num_finished += 1
    return Times(num_finished, output_tokens, first_token_ps, finished_ps)


def simulate_bare(scenario: Scenario) -> bare_sim.BareTimes:
    """Run a load through the bare loop: from its columns to the columns of its times."""
    columns = scenario.columns
    arrived_ps = np.rint(columns.at_seconds * PS_PER_SECOND).astype(np.int64)
    return bare_sim.run(
        arrived_ps.tolist(), columns.prompt_tokens.tolist(), columns.output_tokens.tolist(), scenario.bare_cost
    )


def measure(sizes: Sizes, on_run: Callable[[str], None] = lambda what: None) -> SimSpeed:
    """Measure every load; `on_run` is called with a description of the next run."""
    vidur, multi_lora = sim_scenarios.vidur(sizes.vidur), sim_scenarios.multi_lora(sizes.multi_lora)
    small, large = sim_scenarios.uniform(sizes.small_uniform), sim_scenarios.uniform(sizes.uniform)
    doubled = sim_scenarios.uniform(sizes.small_uniform, 2)
    # The small loads take many turns, before each of the large loads' few turns.
    small_ones = {"vidur": vidur, "uniform small": small, "doubled": doubled}
    scenarios = small_ones | {
        "uniform": large,
        "multi-lora": multi_lora,
        "mooncake": sim_scenarios.mooncake(sizes.mooncake),
        "fleet": sim_scenarios.fleet(sizes.mooncake),
    }
    rows = {
        name: SpeedRow(name.split()[0], scenario.title, len(scenario.columns)) for name, scenario in scenarios.items()
    }
    with ExitStack() as stack:
        compiled = None
        if COMPILED.exists() and Core.here() is Core.INTERPRETED:
            compiled = CompiledCore()
            stack.enter_context(compiled)
        peers = Peers(scenarios, stack)
        for _ in range(sizes.few):
            for name in [*small_ones] * sizes.many + [name for name in scenarios if name not in small_ones]:
                on_run(f"{name}, {rows[name].num_requests:,} requests")
                _take_turns(rows[name], scenarios[name], compiled)
            for load in dict.fromkeys(row.peer.load for row in peers.rows):
                on_run(f"{load}, other simulators")
                peers.take_turns(load)
    on_run("peak memory of the uniform load")
    rows["uniform"].peak_rss_mb = _peak_rss_mb("uniform", sizes.uniform)
    return SimSpeed(rows, peers.rows)


def _take_turns(row: SpeedRow, scenario: Scenario, compiled: CompiledCore | None) -> None:
    seconds, times = _timed(lambda: simulate(scenario))
    if times.num_finished != row.num_requests:
        raise BenchBrokenError(f"{row.load}: {times.num_finished} of {row.num_requests} requests finished")
    row.num_finished, row.output_tokens = times.num_finished, times.output_tokens
    row.cpu_seconds.setdefault(Core.here(), []).append(seconds)
    if compiled is not None:
        row.cpu_seconds.setdefault(Core.COMPILED, []).append(compiled.run(row.load, row.num_requests))
    if row.load in BARE_TOO:
        row.bare_cpu_seconds.append(_timed(lambda: simulate_bare(scenario))[0])


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of a run, and its result."""
    gc.collect()
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


def _peak_rss_mb(load: str, num_requests: int) -> float:
    command = [sys.executable, "-m", "lab.bench.sim_speed", load, str(num_requests)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchBrokenError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    peak_rss_mb: float = json.loads(done.stdout)["peak_rss_mb"]
    return peak_rss_mb


def own_peak_rss_mb() -> float:
    """Return this process's peak memory since exec, in 1e6 bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6
    except (OSError, StopIteration):
        # On other systems this includes the parent process's memory up to the exec.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


@cache
def _scenario(load: str, num_requests: int) -> Scenario:
    return SCENARIOS[load](num_requests)


def run_once(scenario: Scenario) -> dict[str, Any]:
    """Run a load; return its figures and this process's peak memory."""
    num_requests = len(scenario.columns)
    seconds, times = _timed(lambda: simulate(scenario))
    return {
        "title": scenario.title,
        "core": Core.here(),
        "num_requests": num_requests,
        "num_finished": times.num_finished,
        "output_tokens": times.output_tokens,
        "cpu_seconds": seconds,
        "us_per_request": seconds / num_requests * 1e6,
        "peak_rss_mb": own_peak_rss_mb(),
    }


def main() -> None:
    """Run the load given by the arguments, or one load per line of standard input, one after another."""
    if len(sys.argv) > 1:
        print(json.dumps(run_once(_scenario(sys.argv[1], int(sys.argv[2]))), indent=1))
        return
    for line in sys.stdin:
        load, num_requests = line.split()
        print(json.dumps(run_once(_scenario(load, int(num_requests)))), flush=True)


if __name__ == "__main__":
    main()
