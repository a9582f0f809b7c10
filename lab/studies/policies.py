"""One comparison for each policy, cache and placement, by the simulator's engine: the tables of docs/policies.md.

    python -m lab.studies.policies [--out docs/figures]

Every table varies one thing and keeps the rest. The load is near what the GPU can serve, where policies differ. Times
are simulated; a run of the live cluster with the same settings gives the same batches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.studies import figure
from lorrery.loadgen.workload.arrivals import scale
from lorrery.loadgen.workload.popularity import assign, zipf_indices
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.slora import draw, generate_requests
from lorrery.loadgen.workload.traces import read_requests
from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.queues.pets import DeviceProfile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.files.reading import open_text
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import adapter_bytes, load_ps
from lorrery.worker.device.roofline import Roofline

CATALOGUE = read_catalogue()
TRACES = Path(__file__).parents[2] / "deploy" / "traces"
PS_PER_MS = 1e9
PCIE_GB_PER_SECOND, DISK_GB_PER_SECOND = 24.0, 2.0


@dataclass(frozen=True)
class Setup:
    """A cluster and its load."""

    gpu: str
    model: str
    num_workers: int
    workload: list[WorkloadRequest]
    adapters: dict[str, Adapter]
    with_prompts: bool = False

    @property
    def deployment(self) -> Deployment:
        """Device of each worker."""
        gpu, model = CATALOGUE.gpu(self.gpu), CATALOGUE.model(self.model)
        return Deployment(gpu, model, engine=CATALOGUE.engine("present-day", gpu))

    def replica_settings(self, **changes: object) -> ReplicaSettings:
        """Return the settings of each replica."""
        pool = self.deployment.kv_pool_tokens()
        base = ReplicaSettings("req_queue", pool, 9_216, max_num_batched_tokens=9_216, batch_max_tokens=9_216)
        return replace(base, **changes)  # type: ignore[arg-type]

    def run(self, settings: ReplicaSettings, placement: str = "least_loaded") -> "Result":
        """Run the whole load."""
        model = self.deployment.model

        def make(chosen: ReplicaSettings) -> Replica:
            return build_replica(
                chosen,
                load_ps=lambda adapter, tier: load_ps(
                    model,
                    adapter_bytes(model, adapter.rank, "qkvo"),
                    PCIE_GB_PER_SECOND,
                    DISK_GB_PER_SECOND if tier is Tier.DISK else None,
                ),
            )

        workers = build_workers(self.num_workers, settings, Roofline(self.deployment), make)
        simulation = Simulation(workers, PLACEMENTS[placement](np.random.default_rng(1)))
        requests = build_requests(self.workload, self.model, self.adapters, with_prompts=self.with_prompts)
        done = list(simulation.run(requests))
        return Result(done, sum(worker.replica.adapters.num_loads for worker in workers))


@dataclass(frozen=True)
class Result:
    """Outcome of a load."""

    requests: list[SimulatedRequest]
    num_loads: int

    @property
    def finished(self) -> list[SimulatedRequest]:
        """Requests that received all requested tokens."""
        return [request for request in self.requests if request.outcome == "finished"]

    def ttft_ms(self, quantile: float, of: Callable[[SimulatedRequest], bool] = lambda request: True) -> float:
        """Return a quantile of the times to first token."""
        times = [(r.first_token_ps or 0) - r.arrived_ps for r in self.finished if of(r)]
        return float(np.quantile(times, quantile)) / PS_PER_MS if times else float("nan")

    def tpot_ms(self, quantile: float) -> float:
        """Return a quantile of (E2E - TTFT) / (output tokens - 1)."""
        times = [
            ((r.finished_ps or 0) - (r.first_token_ps or 0)) / (r.output_tokens - 1)
            for r in self.finished
            if r.output_tokens > 1
        ]
        return float(np.quantile(times, quantile)) / PS_PER_MS

    def e2e_ms(self, quantile: float) -> float:
        """Return a quantile of the end-to-end times."""
        return float(np.quantile([(r.finished_ps or 0) - r.arrived_ps for r in self.finished], quantile)) / PS_PER_MS

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the time from the first arrival to the last end."""
        first = min(request.arrived_ps for request in self.requests)
        last = max(request.finished_ps or 0 for request in self.finished)
        return sum(request.output_tokens for request in self.finished) / (last - first) * PS_PER_SECOND

    @property
    def hit_ratio(self) -> float:
        """Cached prompt tokens / all prompt tokens."""
        return sum(r.sequence.cached_tokens for r in self.finished) / sum(r.prompt_tokens for r in self.finished)


Columns = dict[str, Callable[[Result], str]]
COMMON: Columns = {
    "done": lambda r: f"{len(r.finished)}/{len(r.requests)}",
    "tokens/s": lambda r: f"{r.tokens_per_second:,.0f}",
    "TTFT p50": lambda r: f"{r.ttft_ms(0.5):,.0f}",
    "TTFT p99": lambda r: f"{r.ttft_ms(0.99):,.0f}",
    "TPOT p50": lambda r: f"{r.tpot_ms(0.5):,.1f}",
    "TPOT p99": lambda r: f"{r.tpot_ms(0.99):,.1f}",
    "E2E p99": lambda r: f"{r.e2e_ms(0.99):,.0f}",
}


def slora_setup(rate: float, num_workers: int = 1, *, alpha: float = 0.3) -> Setup:
    """Return S-LoRA's workload on A10Gs: Llama-2-7B, 32 adapters of ranks 64, 32, 16 and 8, few of them popular."""
    ranks = {"r64": 64, "r32": 32, "r16": 16, "r8": 8}
    draws = draw(
        num_adapters=32, alpha=alpha, req_rate=rate, cv=1.0, duration=300, input_range=(8, 512), output_range=(8, 512)
    )
    workload = list(generate_requests(draws, adapter_dirs=list(ranks)))
    names = {request.adapter_id for request in workload if request.adapter_id is not None}
    adapters = {name: Adapter(name, ranks[name.rsplit("-", 1)[0]]) for name in sorted(names)}
    return Setup("A10G", "Llama-2-7B", num_workers, workload, adapters)


def azure_setup(speed_up: float) -> Setup:
    """Return the first minute of Azure's conversation trace, sped up, on one H100 with Llama-3-8B."""
    with open_text(TRACES / "azure_llm_2023_conv_excerpt.csv.gz") as file:
        requests = read_requests(file, 190)
    return Setup("H100-SXM", "Llama-3-8B", 1, list(scale(requests, speed_up)), {})


def mooncake_setup(num_workers: int) -> Setup:
    """Return the committed excerpt of Mooncake's conversation trace: long prompts with shared prefixes."""
    with (TRACES / "mooncake_conversation_excerpt.jsonl").open(encoding="utf-8") as file:
        workload = [request for request in read_requests(file) if request.prompt_tokens <= 8_192]
    return Setup("H100-SXM", "Llama-3-8B", num_workers, workload, {}, with_prompts=True)


def skewed_setup() -> Setup:
    """Return a load on four A10Gs, 64 adapters of rank 32 with power-law popularity."""
    base = slora_setup(4.0, 4)
    names = [f"lora-{n}" for n in range(64)]
    rng = np.random.default_rng(3)
    workload = list(assign(base.workload, names, zipf_indices(len(names), len(base.workload), 1.0, rng)))
    return replace(base, workload=workload, adapters={name: Adapter(name, 32) for name in names})


def tables() -> Iterable[tuple[str, Columns, list[tuple[str, Result]]]]:
    """Run everything; yield (title, columns, rows)."""
    hot = slora_setup(1.6)
    counts: dict[str | None, int] = {}
    for request in hot.workload:
        counts[request.adapter_id] = counts.get(request.adapter_id, 0) + 1
    popular = sorted(counts, key=lambda name: -counts[name])[:3]
    fairness: Columns = COMMON | {
        "TTFT p99, 3 hottest adapters": lambda r: f"{r.ttft_ms(0.99, lambda q: _name(q) in popular):,.0f}",
        "TTFT p99, others": lambda r: f"{r.ttft_ms(0.99, lambda q: _name(q) not in popular):,.0f}",
    }
    device = hot.deployment
    profile = DeviceProfile(Roofline(device), device.gpu, device.model)
    queues = ("req_queue", "vtc_fair", "abort", "cluster", "peft", "pets")
    yield (
        "Queues (batching slora_loop)",
        fairness,
        [(q, hot.run(hot.replica_settings(policy=q, batch_num_adapters=4, profile=profile))) for q in queues],
    )
    azure = azure_setup(3.0)
    ways: dict[str, dict[str, object]] = {
        "slora_loop": {"policy": "req_queue", "batching": "slora_loop"},
        "static": {"policy": "fcfs", "batching": "static", "max_num_seqs": 32},
        "continuous": {"policy": "fcfs", "batching": "continuous"},
        "mixed": {"policy": "fcfs", "batching": "mixed"},
        "chunked, 2048": {"policy": "fcfs", "batching": "chunked", "max_num_batched_tokens": 2_048},
        "chunked, 512": {"policy": "fcfs", "batching": "chunked", "max_num_batched_tokens": 512},
    }
    yield "Ways to batch", COMMON, [(name, azure.run(azure.replica_settings(**way))) for name, way in ways.items()]
    memories: Columns = COMMON | {"preemptions": lambda r: f"{sum(request.num_requeues for request in r.requests)}"}
    yield (
        "Memory (fcfs, continuous)",
        memories,
        [(m, hot.run(hot.replica_settings(policy="fcfs", memory=m))) for m in ("peak", "paged")],
    )
    mooncake = mooncake_setup(1)
    caches: Columns = COMMON | {"prefix hits": lambda r: f"{100 * r.hit_ratio:.1f} %"}
    yield (
        "Prefix cache (fcfs, chunked, paged)",
        caches,
        [
            (
                name,
                mooncake.run(
                    mooncake.replica_settings(
                        policy="fcfs", batching="chunked", memory="paged", prefix_cache="blocks" if on else "none"
                    )
                ),
            )
            for name, on in (("none", False), ("blocks", True))
        ],
    )
    loads: Columns = COMMON | {"adapter loads": lambda r: f"{r.num_loads:,}"}
    residency: dict[str, dict[str, object]] = {
        "max_loras unset": {},
        "max_loras 16": {"max_loras": 16},
        "max_loras 4": {"max_loras": 4},
        "max_loras 4, no bound": {"max_loras": 4, "max_overtakes": 1_000_000},
        "max_loras 4, blocking": {"max_loras": 4, "blocking_loads": True},
        "strict S-LoRA": {"strict": True},
    }
    yield (
        "Adapters (req_queue)",
        loads,
        [(name, hot.run(hot.replica_settings(**changes))) for name, changes in residency.items()],
    )
    skewed = skewed_setup()
    yield (
        "Placement over four workers (req_queue, max_loras 16)",
        loads,
        [
            (name, skewed.run(skewed.replica_settings(max_loras=16), name))
            for name in PLACEMENTS
            if name != "prefix_match"
        ],
    )
    many = mooncake_setup(4)
    yield (
        "Placement over four workers with prefix caches",
        caches,
        [
            (
                name,
                many.run(
                    many.replica_settings(policy="fcfs", batching="chunked", memory="paged", prefix_cache="blocks"),
                    name,
                ),
            )
            for name in ("least_loaded", "round_robin", "prefix_match")
        ],
    )


def _name(request: SimulatedRequest) -> str | None:
    adapter = request.adapter
    return None if adapter is None else adapter.adapter_id


def main() -> None:
    """Run the study."""
    options = figure.parser(__doc__).parse_args()
    lines: list[dict[str, str]] = []
    for title, columns, rows in tables():
        print(f"\n### {title}\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for name, result in rows:
            cells = {column: show(result) for column, show in columns.items()}
            print(f"| {name} | {' | '.join(cells.values())} |", flush=True)
            lines += [{"table": title, "row": name, "figure": column, "value": cell} for column, cell in cells.items()]
    figure.write_table(options.out, "policies", lines)


if __name__ == "__main__":
    main()
