"""The fuzz corpus: whole simulations, drawn by number, in which jumping must equal planning before every step.

`fuzz_cases` draws them. Compared are every step's times and contents, every request's times and counts, and what
workers, adapters and caches counted.

    python -m tests.simulator.fuzz [--cases N] [--first N] [--jobs N]         (make fuzz)
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from lorrery.loadgen.workload.distribution import spelt_out
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.adapters.loads import LoadFault, Tier
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Subscriber
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import batching_name
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.faults.kinds import LOAD_FAILURE
from lorrery.service.faults.rules import LoadRules, RuleBook
from lorrery.simulator.cluster import schedule_faults
from lorrery.simulator.loop.build import build_requests, ids_suffice
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.outcomes import GapRecorder
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.simulator.subscribers.step_files import COLUMNS, StepWriter
from lorrery.worker.device.output import LlmMockLength
from tests.seeds import check_all
from tests.simulator.fuzz_cases import ADAPTERS, IN_PIECES, LAST_PS, MODEL, PS, Case, draw_case, step_time_model


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


def build_case(case: Case, subscribers: Sequence[Subscriber], *, one_step: bool) -> Simulation:
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
        subscribers=subscribers,
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
        with_prompts=case.replica.prefix_cache in ("blocks", "radix") or case.trie,
        by_ids=case.number % 2 == 1 and ids_suffice(case.replica.prefix_cache, case.replica.block_size),
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
