"""Cost of a decision with 100,000 requests waiting: CPU time of one plan, one commit, one enqueue and one cancel.

A replica is held at a batch of 256 under every policy, way to batch and memory rule of the catalogue, with block caches
and 200 adapters. It is driven like a live scheduler: every step is committed, and a plan is made when the last one is
used up or a sequence has ended. Sequences end at lengths hidden from the core, and each that ends is replaced. Two
kinds of pressure: `seats`, where the batch is full and the KV pool is not, and `memory`, where the pool is full, so
that the first waiting request is tested against the running sequences.

Plans that admit are shown separately, per admitted sequence: their cost grows with the work done, not with the queue.

The reference is a plain loop over one slotted object per sequence of the batch (`lab.bench.loaded_replica`), in the
same run. Times are the thread's CPU time minus the clock's own cost. If the compiled core has been built (`make
compiled`), a second process measures it.

    python -m lab.bench.decisions 500       one run of 500 steps each, as JSON
"""

import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.cluster import BenchBrokenError
from lab.bench.loaded_replica import (
    MAX_OUTPUT_TOKENS,
    PRESSURES,
    PROMPT_TOKENS,
    RANK,
    World,
    clock_us,
    pressed,
    profile,
    reference_us,
)
from lab.bench.marks import or_dash
from lab.bench.sim_scenarios import PROJECT
from lab.bench.sim_speed import COMPILED
from lorrery.scheduler.core.build import build_replica, why_excluded
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, QUEUES
from lorrery.scheduler.core.prefix_cache.base import of_runs
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.service.installed import core_is_compiled

AIM_US, AIM_BYTES = 100.0, 1000
BATCH, NUM_WAITING = 256, 100_000

_ADAPTERS = tuple(Adapter(f"lora-{number}", RANK) for number in range(200))
_NUM_TENANTS = 50
_RUN_TOKENS = 64
_SHARED_RUNS = 3  # of the four runs of a prompt, the first three belong to one of a few system prompts
_NUM_SYSTEM_PROMPTS = 20
_WITH_EVERY_MEMORY = ("continuous", "chunked")
_NUM_TRIED = 1000
_NUM_WEIGHED = 20_000


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """CPU microseconds under one combination.

    Attributes:
        plan_p50_us: of all plans, as is `plan_p99_us`.
        quiet_plan_p99_us: of plans that admit no sequence; None: there were none.
        admission_us: cost per admitted sequence of plans that admit, median; None: there were none.
        admission_p99_us: the same at p99.
        admission_growth: cost per sequence in the half of such plans that admit the most, over that in the half that
            admit the fewest; above 1 if the cost grows faster than the number admitted; None: all admit equally many.
        num_admitted: mean of such a plan.
        enqueue_us: to add one request, mean.
        cancel_us: to remove one waiting request, mean.
    """

    policy: str
    batching: str
    memory: str
    pressure: str
    num_running: float
    plan_p50_us: float
    plan_p99_us: float
    quiet_plan_p99_us: float | None
    admission_us: float | None
    admission_p99_us: float | None
    admission_growth: float | None
    num_admitted: float
    commit_p50_us: float
    commit_p99_us: float
    enqueue_us: float
    cancel_us: float
    reference_us: float


@dataclass(frozen=True, slots=True)
class DecisionCosts:
    """Cost of one core's decisions.

    Attributes:
        core: interpreted or compiled.
        rows: of each combination under each pressure.
        waiting_bytes: memory of a waiting request in the core's structures, its own fields included.
    """

    core: str
    rows: list[DecisionCost]
    waiting_bytes: dict[str, float]

    @property
    def num_met(self) -> int:
        """Number of rows whose 99th percentiles of plan and commit are within the aim."""
        return sum(max(row.plan_p99_us, row.commit_p99_us) <= AIM_US for row in self.rows)


def measure(num_steps: int, on_row: Callable[[DecisionCost], None] = lambda row: None) -> list[DecisionCosts]:
    """Measure every combination, and again with the compiled core if it has been built."""
    reference = reference_us(BATCH, num_steps)
    rows = []
    for settings in combinations():
        for pressure in PRESSURES:
            rows.append(_measure_one(pressed(settings, pressure, BATCH), pressure, num_steps, reference))
            on_row(rows[-1])
    waiting_bytes = {policy: _waiting_bytes(_of_policy(policy)) for policy in QUEUES}
    results = [DecisionCosts("compiled" if core_is_compiled() else "interpreted", rows, waiting_bytes)]
    if COMPILED.exists() and not core_is_compiled():
        results.append(_measure_compiled(num_steps))
    return results


def _measure_compiled(num_steps: int) -> DecisionCosts:
    environment = {**os.environ, "PYTHONPATH": f"{COMPILED}{os.pathsep}{PROJECT}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "lab.bench.decisions", str(num_steps)]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchBrokenError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    (result,) = json.loads(done.stdout)
    if result["core"] != "compiled":
        raise BenchBrokenError(f"{COMPILED} has no compiled core; run make compiled")
    return DecisionCosts(result["core"], [DecisionCost(**row) for row in result["rows"]], result["waiting_bytes"])


def combinations() -> Iterator[ReplicaSettings]:
    """Yield every policy with its own way to batch, then `fcfs` with every other, and two of them with every memory."""
    for policy in QUEUES:
        yield _of_policy(policy)
    base = _of_policy("fcfs")
    for batching in BATCHINGS:
        for memory in MEMORIES:
            settings = replace(base, batching=batching, memory=memory)
            if settings == base or (memory not in ("peak", "on_demand") and batching not in _WITH_EVERY_MEMORY):
                continue
            if why_excluded(_by_name(settings)) is None:
                yield settings


def _of_policy(policy: str) -> ReplicaSettings:
    of_sglang = QUEUES[policy].batching == "sglang"
    settings = ReplicaSettings(
        policy,
        1,
        1,
        batching=QUEUES[policy].batching,
        memory="estimated" if of_sglang else "peak",
        prefix_cache="radix" if of_sglang else "blocks",
        batch_num_adapters=8,
    )
    return replace(settings, profile=profile()) if QUEUES[policy].needs_profile else settings


def _by_name(settings: ReplicaSettings) -> dict[str, object]:
    chosen: dict[str, object] = {field.name: getattr(settings, field.name) for field in fields(settings)}
    # As in settings that do not configure other policies.
    return chosen | dict.fromkeys(("batch_num_adapters", "fair_by", "fair_weights"))


def _measure_one(settings: ReplicaSettings, pressure: str, num_steps: int, reference: float) -> DecisionCost:
    world = World(build_replica(settings), BATCH + NUM_WAITING, _sequence)
    _run(world, 4 * MAX_OUTPUT_TOKENS)  # until the sequences' ages are mixed
    costs = _run(world, num_steps)
    enqueue_us, cancel_us = _enqueue_and_cancel(world, _NUM_TRIED)
    own_us = clock_us() / 2

    def us(nanoseconds: list[int], quantile: float) -> float:
        return float(np.quantile(nanoseconds, quantile)) / 1e3 - own_us

    admissions = [nanoseconds // num for nanoseconds, num in costs.admitting]
    plans = [*costs.quiet_plans, *(nanoseconds for nanoseconds, _ in costs.admitting)]
    commits = [*costs.quiet_commits, *costs.ending]
    return DecisionCost(
        policy=settings.policy,
        batching=settings.batching or "",
        memory=settings.memory,
        pressure=pressure,
        num_running=world.replica.num_running,
        plan_p50_us=us(plans, 0.5),
        plan_p99_us=us(plans, 0.99),
        quiet_plan_p99_us=us(costs.quiet_plans, 0.99) if costs.quiet_plans else None,
        admission_us=us(admissions, 0.5) if admissions else None,
        admission_p99_us=us(admissions, 0.99) if admissions else None,
        admission_growth=_growth(costs.admitting),
        num_admitted=sum(num for _, num in costs.admitting) / max(1, len(costs.admitting)),
        commit_p50_us=us(commits, 0.5),
        commit_p99_us=us(commits, 0.99),
        enqueue_us=enqueue_us,
        cancel_us=cancel_us,
        reference_us=reference,
    )


@dataclass(slots=True)
class _Costs:
    """Nanoseconds of each plan and commit; plans that admit have the number admitted as well."""

    quiet_plans: list[int]
    admitting: list[tuple[int, int]]
    quiet_commits: list[int]
    ending: list[int]


def _run(world: World, num_steps: int) -> _Costs:
    """Run `num_steps` steps and return the cost of each plan and commit."""
    replica, clock = world.replica, time.thread_time_ns
    costs = _Costs([], [], [], [])
    steps_left = 0
    plan: Plan | Idle = Idle(None)
    for _ in range(num_steps):
        if not steps_left:
            started = clock()
            plan = replica.plan(world.at_ps)
            nanoseconds = clock() - started
            assert not isinstance(plan, Idle), "requests wait, so there is something to run"
            steps_left = plan.max_steps
            if plan.joins:
                costs.admitting.append((nanoseconds, len(plan.joins)))
            else:
                costs.quiet_plans.append(nanoseconds)
        assert not isinstance(plan, Idle)
        ran = world.step(plan)
        steps_left = 0 if ran.finished else steps_left - 1
        started = clock()
        events = replica.commit(plan, ran)
        nanoseconds = clock() - started
        (costs.ending if ran.finished else costs.quiet_commits).append(nanoseconds)
        world.replace_finished(events)
    return costs


def _growth(admitting: list[tuple[int, int]]) -> float | None:
    """Return the cost per sequence of plans that admit many over that of plans that admit few; None: all are alike."""
    middle = float(np.median([num for _, num in admitting])) if admitting else 0.0
    few = [nanoseconds / num for nanoseconds, num in admitting if num <= middle]
    many = [nanoseconds / num for nanoseconds, num in admitting if num > middle]
    return float(np.median(many) / np.median(few)) if many else None


def _enqueue_and_cancel(world: World, num: int) -> tuple[float, float]:
    """Return the mean microseconds to add a request to the queue, and to remove it again."""
    queue, clock = world.replica.queue, time.thread_time_ns
    sequences = [world.next_sequence() for _ in range(num)]
    started = clock()
    for sequence in sequences:
        queue.append(sequence, world.at_ps)
    appended = clock()
    for sequence in sequences:
        assert queue.cancel(sequence.handle) is sequence
    return (appended - started) / num / 1e3, (clock() - appended) / num / 1e3


def _sequence(handle: int, at_ps: int) -> Sequence:
    adapter = _ADAPTERS[handle % len(_ADAPTERS)]
    tenant_id = f"tenant-{handle % _NUM_TENANTS}"
    sequence = Sequence(handle, PROMPT_TOKENS, MAX_OUTPUT_TOKENS, at_ps, adapter, tenant_id)
    num_runs = PROMPT_TOKENS // _RUN_TOKENS
    system = -1 - handle % _NUM_SYSTEM_PROMPTS * num_runs
    own = [handle * num_runs + run for run in range(num_runs - _SHARED_RUNS)]
    shared = [2**63 + system - run for run in range(_SHARED_RUNS)]
    sequence.content = of_runs([*shared, *own], _RUN_TOKENS, PROMPT_TOKENS)
    return sequence


def _waiting_bytes(settings: ReplicaSettings) -> float:
    """Return the memory of one waiting request in the core's structures, its own fields and lengths included."""
    replica = build_replica(replace(settings, max_total_token_num=10**6, max_req_total_len=1000))
    gc.collect()
    tracemalloc.start()
    try:
        for handle in range(_NUM_WEIGHED):
            replica.submit(Sequence(handle, 256, 256, handle, _ADAPTERS[handle % len(_ADAPTERS)], "tenant"), handle)
        sized, _ = tracemalloc.get_traced_memory()
        replica.plan(_NUM_WEIGHED)
        gc.collect()
        queued, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return max(sized, queued) / _NUM_WEIGHED


def decision_table(results: Iterable[DecisionCosts]) -> Group:
    """Show the cost of each decision, one table for each core."""
    shown: list[Table | Text] = []
    for result in results:
        shown += [_table(result), _notes(result)]
    return Group(*shown)


def _table(result: DecisionCosts) -> Table:
    table = Table(
        title=f"Deep queues: CPU of a decision, {result.core} core, batch {BATCH}, {NUM_WAITING:,} waiting, us"
        f" (aim: plan and commit <= {AIM_US:g})"
    )
    for name in ("policy", "batching", "memory", "full"):
        table.add_column(name, no_wrap=True)
    names = ["plan p50", "p99", "no entry p99", "an entry", "p99", "many/few", "entries", "commit p50", "p99"]
    for name in [*names, "enqueue", "cancel"]:
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(row.policy, row.batching, row.memory, row.pressure, *_figures(row))
    return table


def _figures(row: DecisionCost) -> list[str]:
    return [
        f"{row.plan_p50_us:.0f}",
        f"{row.plan_p99_us:.0f}",
        or_dash(row.quiet_plan_p99_us, ".0f"),
        or_dash(row.admission_us, ".1f"),
        or_dash(row.admission_p99_us, ".0f"),
        or_dash(row.admission_growth, ".2f"),
        f"{row.num_admitted:.1f}",
        f"{row.commit_p50_us:.0f}",
        f"{row.commit_p99_us:.0f}",
        f"{row.enqueue_us:.1f}",
        f"{row.cancel_us:.1f}",
    ]


def _notes(result: DecisionCosts) -> Text:
    most = max(result.waiting_bytes, key=lambda policy: result.waiting_bytes[policy])
    return Text(
        f"{result.num_met} of {len(result.rows)} rows within the aim at p99; a plain loop over the batch:"
        f" {result.rows[0].reference_us:.0f} us; a request that waits takes at most"
        f" {result.waiting_bytes[most]:,.0f} bytes ({most}; aim <= {AIM_BYTES:,})"
    )


def main() -> None:
    """Measure with this process's core, and print the result."""
    print(json.dumps([asdict(result) for result in measure(int(sys.argv[1]))[:1]]))


if __name__ == "__main__":
    main()
