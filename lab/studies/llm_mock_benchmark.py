"""llm-mock's benchmark, simulated: 50 prompts at once through its engine, with a cache built from other prompts.

All parts of its engine are in this repository: batching `llm_mock`, step time `llm-mock`, the static trie, and its rule
for output lengths. Prompts: `lab.studies.corpus`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.studies.corpus import draw_prompts
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.by_load import RoundRobin
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.output import LlmMockLength

NUM_PROMPTS, CORPUS_PROMPTS = 50, 5_000
CACHE_SIZES = (0, 500, 1_000, 5_000)
BATCH_SIZES = (10, 20)
SYSTEM_TOKENS = (0, 16, 64, 128, 256)
GPT2_TOKENS_PER_TOKEN = 2
DRAWS = 40
_NO_LIMIT = 1 << 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run of the benchmark; percentiles interpolate, as in the original."""

    throughput: float
    hit_tokens: float
    ttft_p99_s: float
    tpot_gpt2_p99_ms: float
    tpot_p99_ms: float


def play(prompts: Sequence[Sequence[int]], cache: StaticTrie, batch_size: int) -> Metrics:
    """Run the benchmark: all prompts at once, until the last has ended."""
    settings = ReplicaSettings(
        "fcfs",
        max_total_token_num=_NO_LIMIT,
        max_req_total_len=_NO_LIMIT,
        batching="llm_mock",
        memory="none",
        max_num_seqs=batch_size,
        min_computed_tokens=0,
    )
    workers = build_workers(1, settings, LlmMock(), lambda chosen: build_replica(chosen, cache))
    # The engine ends an output by its own rule; the requested length only has to be larger.
    workload = [WorkloadRequest(index, 0.0, len(prompt), 1_024) for index, prompt in enumerate(prompts)]
    arrivals = []
    for at_ps, request in build_requests(workload, "llm-mock", {}, natural_length=LlmMockLength()):
        request.sequence.prompt_token_ids = prompts[request.handle]
        arrivals.append((at_ps, request))
    done = list(Simulation(workers, RoundRobin()).run(arrivals))
    ttft = np.array([request.first_token_ps or 0 for request in done]) / PS_PER_SECOND
    e2e = np.array([request.finished_ps or 0 for request in done]) / PS_PER_SECOND
    tokens = np.array([request.output_tokens for request in done])
    return Metrics(
        throughput=len(done) / float(e2e.max()),
        hit_tokens=float(np.mean([request.first_cached_tokens for request in done])),
        ttft_p99_s=_p99(ttft),
        tpot_gpt2_p99_ms=_p99(e2e / (GPT2_TOKENS_PER_TOKEN * tokens)) * 1e3,
        tpot_p99_ms=_p99((e2e - ttft) / (tokens - 1)) * 1e3,
    )


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99))


@dataclass(frozen=True, slots=True)
class Point:
    """One setting over all draws; `runs` and `uncached` (the same draws without a cache) correspond by index."""

    system_tokens: int
    batch_size: int
    cache_size: int
    runs: Sequence[Metrics]
    uncached: Sequence[Metrics]

    def values(self, of: Callable[[Metrics], float]) -> Floats:
        """Return a figure for each draw."""
        return np.array([of(run) for run in self.runs])

    def gains(self, of: Callable[[Metrics], float]) -> Floats:
        """Return by which share each draw's figure is below that without a cache."""
        before = np.array([of(run) for run in self.uncached])
        gains: Floats = (before - self.values(of)) / before
        return gains


def ttft(run: Metrics) -> float:
    """Return the P99 TTFT in seconds."""
    return run.ttft_p99_s


def tpot_gpt2(run: Metrics) -> float:
    """Return the P99 TPOT as the original defines it, in milliseconds."""
    return run.tpot_gpt2_p99_ms


def tpot(run: Metrics) -> float:
    """Return the P99 TPOT in milliseconds."""
    return run.tpot_p99_ms


def study(draws: int = DRAWS, corpus_prompts: int = CORPUS_PROMPTS) -> list[Point]:
    """Run every setting of the two charts, and the first's largest cache with increasingly long system prompts."""
    rngs = np.random.SeedSequence(1).spawn(draws + 1)
    points: list[Point] = []
    for system_tokens in SYSTEM_TOKENS:
        corpus = draw_prompts(corpus_prompts, np.random.default_rng(rngs[0]), system_tokens)
        drawn = [draw_prompts(NUM_PROMPTS, np.random.default_rng(rng), system_tokens) for rng in rngs[1:]]
        cache_sizes = CACHE_SIZES if not system_tokens else (CACHE_SIZES[0], CACHE_SIZES[-1])
        caches = {size: StaticTrie.build(corpus, size) for size in cache_sizes}
        for batch_size in BATCH_SIZES if not system_tokens else BATCH_SIZES[:1]:
            runs = {size: [play(prompts, cache, batch_size) for prompts in drawn] for size, cache in caches.items()}
            points += [Point(system_tokens, batch_size, size, of, runs[0]) for size, of in runs.items()]
    return points
