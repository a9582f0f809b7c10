"""The fuzz corpus: whole simulations, drawn by number, in which jumping must equal planning before every step.

A case is a function of its number: cluster (policy, way to batch, memory, cache, adapters, step-time model, placement,
workers, schedulers), workload (open or closed loop) and what goes wrong (cancels, deadlines, lost and slow workers,
loads that fail). Compared are every step's times and contents, every request's times and counts, and what workers,
adapters and caches counted.

    python -m tests.simulator.fuzz [--cases N] [--first N] [--jobs N]         (make fuzz)
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np

from lorrery.chassis.fault_rules import LoadRules, RuleBook
from lorrery.chassis.faults import FREEZE_WORKER, LOAD_FAILURE, LOAD_KINDS, SLOW_LOAD, SLOW_WORKER, WORKER_LOSS, Fault
from lorrery.loadgen.workload.progressions import spelt_out
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.adapter_loads import LoadFault, Tier
from lorrery.scheduler.core.batchings import BATCHINGS
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.combinations import why_excluded
from lorrery.scheduler.core.door import ClusterRules
from lorrery.scheduler.core.many_workers import FEW
from lorrery.scheduler.core.memories import MEMORIES
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import QUEUES, batching_name
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.queues.early_drop import PREFILL_ALLOWANCE_PS
from lorrery.scheduler.core.queues.profile import DeviceProfile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.build import build_requests, hash_ids_suffice
from lorrery.simulator.engine import Simulation
from lorrery.simulator.faults import schedule_faults
from lorrery.simulator.gaps import GapRecorder
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.step_span import Observer
from lorrery.simulator.steps import COLUMNS, StepWriter
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.output import LlmMockLength
from lorrery.worker.device.profile import ProfileRow, read_profile
from lorrery.worker.device.steps import read_steps
from lorrery.worker.device.steptime import STEP_TIME_MODELS, StepTimeModel
from tests.seeds import check_all
from tests.worker.device.known import deployment

PS = 10**12
IN_PIECES = ("chunked", "prefill_first")
LAST_PS = 500 * PS
"""No case lasts so long."""
MANY_SHARE = 0.05
"""Of cases with so many workers that placements ask what is kept of all (`core.many_workers`)."""
ADAPTERS = {f"a{n}": Adapter(f"a{n}", 4 << n) for n in range(4)}
MODEL = "Llama-2-7B"

_PROFILE = """phase,batch_size,kv_len,prefill_chunk,prefill_kv_prefix,step_ms
decode,1,0,,,9
decode,1,800,,,10
decode,8,0,,,11
decode,8,800,,,17
prefill,1,,16,0,12
prefill,1,,400,0,55
prefill,1,,16,200,13
prefill,1,,400,200,60
"""
_STEPS = """step_ms,prefill_tokens,decode_seqs,decode_kv_tokens,prefill_attn_pairs
9.5,0,1,100,0
11,0,4,900,0
12.5,0,8,3000,0
15,40,0,0,800
60,400,0,0,80000
"""


@cache
def step_time_model(name: str) -> StepTimeModel:
    """Build a model on an A10G; with a `launch` engine its first steps are bound by the CPU, and have a kink."""
    kind, _, engine = name.partition(" ")
    more: dict[str, Any] = {}
    if kind == "table":
        rows: list[ProfileRow] = read_profile(_PROFILE.splitlines())
        more["profile"] = rows
    elif kind == "fitted":
        more["steps"] = read_steps(_STEPS.splitlines())
    made = deployment("A10G", MODEL, engine="present-day", **more)
    if engine == "launch":
        made = replace(made, engine=replace(made.engine, launch_ms=0.9))
    return STEP_TIME_MODELS[kind](made)


MODELS = (*STEP_TIME_MODELS, "roofline launch")


@dataclass(frozen=True)
class Case:
    """One case of the corpus."""

    number: int
    replica: ReplicaSettings
    model: str
    placement: str
    num_workers: int
    num_shards: int
    loads: bool
    trie: bool
    workload: list[WorkloadRequest]
    num_clients: int | None
    cancels: list[tuple[int, int]]
    timeout_ps: int | None
    faults: list[Fault]
    rules: ClusterRules

    @property
    def title(self) -> str:
        """What it is about."""
        own = self.replica
        words = [own.policy, batching_name(own), own.memory, self.model, self.placement]
        words += ["strict"] * own.strict + ["blocks"] * (own.prefix_cache == "blocks") + ["trie"] * self.trie
        words += ["prefetch"] * own.prefetch + ["loads"] * self.loads + [fault.kind for fault in self.faults]
        words += ["deadlines"] * self.rules.deadline_admission
        return f"case {self.number}: {' '.join(words)}"


def draw_case(number: int) -> Case:
    """Draw a case; numbers that follow each other walk through policies, ways to batch and models evenly."""
    rng = np.random.default_rng([2026, number])

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    policies, batchings = sorted(QUEUES), sorted(BATCHINGS)
    while True:
        policy, batching = policies[number % len(policies)], batchings[number // len(policies) % len(batchings)]
        if policy != "fcfs" and batching == "llm_mock":
            policy = "fcfs"
        if policy == "pets" and batching in IN_PIECES:
            batching = "mixed"
        strict = policy != "fcfs" and batching == "slora_loop" and rng.random() < 0.3
        settings = {
            "policy": policy,
            "batching": batching,
            "strict": strict,
            "memory": "peak" if strict else one_of(*MEMORIES),
            "prefetch": bool(rng.random() < 0.2),
            "batch_num_adapters": 2 if policy == "cluster" else None,
            "fair_weights": {"a1": 1.5} if policy == "vtc_fair" else {},
            "fair_by": None,
            "fair_max_running": None,
        }
        if why_excluded(settings) is None:
            break
    cached = one_of("none", "blocks", "trie") if settings["memory"] != "none" else one_of("none", "trie")
    loads = bool(rng.random() < 0.5)
    num_shards = int(one_of(1, 1, 1, 2))
    num_workers = num_shards * int(one_of(1, 1, 2, 3))
    if (own := np.random.default_rng([2027, number])).random() < MANY_SHARE:
        num_shards, num_workers = 1, int(own.integers(FEW + 1, FEW + 6))
    model = MODELS[number % len(MODELS)]
    seqs = int(rng.integers(2, 9))
    paged = settings["memory"] in ("paged", "no_evict")
    # Strict S-LoRA takes in what never fits, and then waits for good; with 450 everything fits.
    pool = int(rng.integers(300, 500) if paged else rng.integers(450 if strict else 330, 900))
    replica = ReplicaSettings(
        policy=policy,
        batching=batching,
        strict=strict,
        memory=str(settings["memory"]),
        prefetch=bool(settings["prefetch"]),
        max_total_token_num=pool,
        max_req_total_len=240,
        block_size=int(one_of(4, 16)),
        watermark=float(one_of(0.0, 0.05)),
        prefix_cache="blocks" if cached == "blocks" else "none",
        share_within_plan=bool(rng.random() < 0.5),
        running_max_req_size=seqs,
        batch_max_tokens=int(rng.integers(240, 500)),
        max_num_seqs=seqs,
        max_num_batched_tokens=int(rng.integers(seqs + 8, 80))
        if batching in IN_PIECES
        else int(rng.integers(250, 500)),
        fair_weights={"a1": Fraction(3, 2)} if policy == "vtc_fair" else {},
        batch_num_adapters=2 if policy == "cluster" else 1,
        first_token_slo_ps=PREFILL_ALLOWANCE_PS + int(rng.integers(1, 20)) * PS // 10,
        profile=_profile() if policy == "pets" else None,
        max_loras=(int(rng.integers(1, 4)) if loads and not strict else None, None)[number % 4 == 3],
        max_overtakes=(30, 2, 0)[number % 3],
        look_ahead=(16, 3, 0)[number // 3 % 3],
        max_cpu_loras=int(rng.integers(1, 4)) if loads else None,
        max_concurrent_loads=int(rng.integers(1, 3)),
        blocking_loads=bool(rng.random() < 0.3),
        min_computed_tokens=0 if model == "llm-mock" else 1,
    )
    return _with_load(number, rng, replica, model, num_workers, num_shards, loads, cached == "trie")


@cache
def _profile() -> DeviceProfile:
    made = deployment("A10G", MODEL, engine="present-day")
    return DeviceProfile(step_time_model("roofline"), made.gpu, made.model, 1)


def _with_load(
    number: int,
    rng: np.random.Generator,
    replica: ReplicaSettings,
    model: str,
    num_workers: int,
    num_shards: int,
    loads: bool,
    trie: bool,
) -> Case:
    num_requests = int(rng.integers(4, 22)) * (3 if num_workers > FEW else 1)
    gaps = rng.choice([0.0, 0.0, 0.004, 0.03, 0.25, 1.5], num_requests)
    names = [None, *ADAPTERS]
    workload = []
    for index, at in enumerate(np.cumsum(gaps).tolist()):
        prompt = int(rng.integers(1, 120))
        # Prompts of one hash id begin alike.
        hash_ids = (int(rng.integers(0, 3)),) if rng.random() < 0.8 else None
        output = int(rng.integers(1, 50)) if rng.random() < 0.8 else 1
        adapter = names[int(rng.integers(len(names)))]
        workload.append(WorkloadRequest(index, at, prompt, output, adapter, "", hash_ids))
    end = float(gaps.sum()) + 1.0
    # In strict peft a cancelled request at the head stays there, and all that use other adapters wait for good.
    patient = replica.strict and replica.policy == "peft"
    cancels = (
        []
        if patient
        else [(int(rng.random() * end * PS), int(rng.integers(num_requests))) for _ in range(int(rng.integers(0, 4)))]
    )
    faults: list[Fault] = []
    if rng.random() < 0.25:
        until = int(rng.random() * 2 * end * PS)
        at = min(int(rng.random() * end * PS), until)
        worker = f"worker-{int(rng.integers(num_workers))}"
        kind = (WORKER_LOSS, SLOW_WORKER, FREEZE_WORKER, LOAD_FAILURE, SLOW_LOAD)[int(rng.integers(5))]
        factor = (Fraction(2), Fraction(3, 2), Fraction(1, 3))[int(rng.integers(3))]
        more = {"first": 2} if number % 2 else {"share": Fraction(2, 3)}
        on = "" if kind in LOAD_KINDS and number % 3 else worker
        faults.append(Fault(kind, kind, at, until, on, factor=factor, **(more if kind in LOAD_KINDS else {})))
    return Case(
        number=number,
        replica=replica,
        model=model,
        placement=sorted(PLACEMENTS)[int(rng.integers(len(PLACEMENTS)))],
        num_workers=num_workers,
        num_shards=num_shards,
        loads=loads,
        trie=trie,
        workload=workload,
        num_clients=int(rng.integers(1, 6)) if rng.random() < 0.2 else None,
        cancels=cancels,
        timeout_ps=int(rng.integers(1, 60)) * PS // 10 if rng.random() < 0.3 and not patient else None,
        faults=faults,
        rules=_rules(number, patient=patient),
    )


def _rules(number: int, *, patient: bool) -> ClusterRules:
    has_deadlines = number % 3 == 1 and not patient
    return ClusterRules(
        worker_wait_seconds=1,
        max_waiting_requests_per_tenant=3 if number % 10 == 7 else NEVER,
        deadline_admission=has_deadlines,
        start_within_seconds=(None, 0.1, 0.6)[number // 3 % 3] if has_deadlines else None,
    )


def run_case(case: Case, *, one_step: bool, with_steps: bool = True) -> dict[str, Any]:
    """Simulate a case; return everything that must not depend on how it was driven.

    Where nobody writes steps, pieces of one prompt run in one go.
    """
    steps, gaps = io.StringIO(), GapRecorder()
    writers = [StepWriter(steps)] if with_steps else []
    simulation = build_case(case, [*writers, gaps], one_step=one_step)
    ended = list(play_case(case, simulation))
    still_open = simulation.close()
    for request in ended:
        if request.outcome == "failed":  # what the core would have raised
            raise RuntimeError(f"{case.title}: request {request.handle}: {request.detail}")
    workers = simulation.workers
    return {
        "requests": sorted(map(_told, [*ended, *still_open])),
        **({"steps": _steps(steps.getvalue())} if with_steps else {}),
        "workers": [(w.name, w.totals.num_steps, w.totals.busy_ps, w.totals.end_ps) for w in workers],
        "adapters": [(w.replica.adapters.num_loads, w.replica.adapters.num_failed_loads) for w in workers],
        "caches": [_cache_told(w.replica) for w in workers],
        "gaps": gaps_of(gaps),
    }


def simulate(case: Case) -> tuple[list[SimulatedRequest], GapRecorder]:
    """Simulate a case by jumping; return its requests and the gaps between tokens."""
    gaps = GapRecorder()
    simulation = build_case(case, [gaps], one_step=False)
    return [*play_case(case, simulation), *simulation.close()], gaps


def build_case(case: Case, observers: Sequence[Observer], *, one_step: bool) -> Simulation:
    """Build a case's cluster."""
    book = RuleBook()
    book.plan(case.faults, 0)

    def load_ps(adapter: Adapter, tier: Tier) -> int:
        if case.loads:
            return 10**9 * adapter.rank * (1 if tier is Tier.HOST else 7)
        return 10**9 if case.faults else 0  # what fails takes time, or it would fail for ever at once

    def make_replica(name: str) -> Replica:
        rules = LoadRules(book, name)

        def load_fault(adapter: Adapter, attempt: int, at_ps: int) -> LoadFault:
            met = rules.choose(adapter.adapter_id, at_ps)
            fails = (case.loads and adapter.rank == 8 and attempt == 0) or any(f.kind == LOAD_FAILURE for f in met)
            return LoadFault(fails, math.prod((fault.factor for fault in met), start=Fraction(1)))

        cache = StaticTrie.build([_tokens(n, 60) for n in range(3)], 90) if case.trie else None
        return build_replica(
            case.replica,
            cache,
            load_ps=load_ps,
            load_faults=load_fault,
        )

    workers = [
        SimulatedWorker(
            f"worker-{n}", partial(make_replica, f"worker-{n}"), step_time_model(case.model), n % case.num_shards
        )
        for n in range(case.num_workers)
    ]
    placements = [PLACEMENTS[case.placement](np.random.default_rng(shard)) for shard in range(case.num_shards)]
    simulation = Simulation(
        workers,
        placements,
        one_step=one_step,
        choose_shard=(lambda request: request.prompt_tokens % case.num_shards) if case.num_shards > 1 else None,
        timeout_ps=case.timeout_ps,
        worker_timeout_ps=PS // 2,
        rules=case.rules,
        observers=observers,
    )
    simulation.at(LAST_PS, lambda: _check_ended(simulation, case))
    schedule_faults(case.faults, simulation)
    return simulation


def play_case(case: Case, simulation: Simulation) -> Iterable[SimulatedRequest]:
    """Run a case's workload."""
    requests = build_requests(
        case.workload,
        MODEL,
        ADAPTERS,
        natural_length=LlmMockLength() if case.model == "llm-mock" and case.number % 2 else None,
        with_prompts=case.replica.prefix_cache == "blocks" or case.trie,
        by_hash_ids=case.number % 2 == 1 and hash_ids_suffice(case.replica.prefix_cache, case.replica.block_size),
    )
    return _play(simulation, requests, case)


def _check_ended(simulation: Simulation, case: Case) -> None:
    if simulation.num_open:
        raise RuntimeError(f"{case.title}: {simulation.num_open} requests do not end")


def _play(
    simulation: Simulation, requests: Iterable[tuple[int, SimulatedRequest]], case: Case
) -> Iterable[SimulatedRequest]:
    if case.num_clients is None:
        return simulation.run(requests, case.cancels)
    built = iter(requests)

    def follow(_ended: SimulatedRequest, now_ps: int) -> tuple[int, SimulatedRequest] | None:
        following = next(built, None)
        if following is None:
            return None
        following[1].arrived_ps = now_ps
        return now_ps, following[1]

    first = [following for _ in range(case.num_clients) if (following := next(built, None)) is not None]
    for _, request in first:
        request.arrived_ps = 0
    return simulation.run([(0, request) for _, request in first], case.cancels, follow=follow)


def _tokens(hash_id: int, num_tokens: int) -> list[int]:
    request = WorkloadRequest(0, 0.0, num_tokens, 1, hash_ids=(hash_id,))
    return list(next(build_requests([request], MODEL, {}, with_prompts=True))[1].sequence.prompt_token_ids)


def _told(request: SimulatedRequest) -> tuple[Any, ...]:
    return (
        request.handle,
        request.outcome or "",
        request.worker,
        request.arrived_ps,
        _or_never(request.first_admitted_ps),
        _or_never(request.first_token_ps),
        _or_never(request.finished_ps),
        _or_never(request.last_token_ps),
        request.output_tokens,
        request.first_cached_tokens,
        request.num_requeues,
        "" if request.reason is None else request.reason.word,
        *_phases(request),
    )


def _phases(request: SimulatedRequest) -> tuple[int, ...]:
    sequence, end_ps = request.sequence, request.finished_ps
    if end_ps is None:
        return ()
    phases = sequence.phases(end_ps)
    assert sum(phases) == max(0, end_ps - sequence.arrived_ps)
    assert min(phases) >= 0
    return phases


def _or_never(at_ps: int | None) -> int:
    return -1 if at_ps is None else at_ps


def _steps(text: str) -> list[tuple[str, ...]]:
    """Return the steps without who waits: a span tells that of its first step only."""
    kept = [index for index, name in enumerate(COLUMNS) if name != "waiting_sequences"]
    rows = [tuple(row[index] for index in kept) for row in csv.reader(io.StringIO(text))]
    return sorted(rows)


def _cache_told(replica: Replica) -> Any:
    cache = replica.prefix_cache
    return (cache.num_evictions, cache.paths()) if isinstance(cache, BlockCache) else None


def gaps_of(gaps: GapRecorder) -> dict[int, int]:
    """Return how often there was each gap, in ps."""
    found: dict[int, int] = {}
    for rows in gaps.chunks():
        for gap_ps, count in zip(*(column.tolist() for column in spelt_out(rows)), strict=True):
            found[gap_ps] = found.get(gap_ps, 0) + count
    return found


def difference(case: Case) -> str | None:
    """Return where jumping and stepping part, or None."""
    with_steps = batching_name(case.replica) not in IN_PIECES or case.number % 3 == 0
    stepped, jumped = run_case(case, one_step=True), run_case(case, one_step=False, with_steps=with_steps)
    for what, expected in stepped.items():
        if what not in jumped or jumped[what] == expected:
            continue
        if isinstance(expected, list):
            pairs = zip(expected, jumped[what], strict=False)
            first = next(((one, other) for one, other in pairs if one != other), None)
            return f"{case.title}: {what}: {len(expected)} against {len(jumped[what])}; first: {first}"
        return f"{case.title}: {what}: {expected} against {jumped[what]}"
    return None


def check(number: int) -> str | None:
    """Return what is wrong with a case, or None; an exception is wrong too."""
    try:
        return difference(draw_case(number))
    except Exception as error:
        return f"case {number}: {type(error).__name__}: {error}"


def main() -> int:
    """Run a part of the corpus on all cores; 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=None, help="processes; unset: one a core")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases)
    return check_all(check, numbers, jobs=options.jobs, chunk=50, noun="cases")


if __name__ == "__main__":
    sys.exit(main())
