"""Runs of a plan: one replica with its streams in a closed loop, or a cluster under a rate, held against a level."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lorrery.loadgen.options import GIVEN, LoadOptions
from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.sections import LONGEST_SECONDS, MAX_ADAPTERS
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.options import Observers, SimulationOptions
from lorrery.simulator.plan.level import Judge, Level
from lorrery.simulator.run import SimulatedRun
from lorrery.vocabulary.units import LAST_SECONDS
from lorrery.worker.device.capacity import Workload

__all__ = ["LoopTimes", "Trial", "adapter_names", "load_of", "plan_registry", "registry_override", "serve", "stream"]

SEED = 42
"""Of the first run; further ones count on."""
ROUNDS, LEAST_REQUESTS = 3, 100
"""Measured requests of a closed loop: per stream, and in total at least."""
_LETS_ALL_WAIT: Mapping[str, object] = {
    "scheduler.max_waiting_requests": 1_000_000,
    "scheduler.max_waiting_requests_per_tenant": None,
    "scheduler.deadline_admission": False,
    "scheduler.start_within_seconds": None,
    "scheduler.first_token_slo_seconds": LONGEST_SECONDS,
}
"""For a closed loop, whose streams begin at once: no request may be refused or dropped."""
REGISTRY, _FAMILY = "adapters.registry", "plan-r"
_OF_LOAD = {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
"""Statuses with which even the first request of an idle cluster may fail because of those that follow."""


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Streams in a closed loop, in their steady state; mean seconds.

    Attributes:
        ttft: from a request to its first token.
        tpot: per further token, stalls included.
        e2e: from a request to its last token.
        met: whether they kept the level.
    """

    ttft: float
    tpot: float
    e2e: float
    met: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run of a cluster.

    Attributes:
        num_replicas: that served it.
        seed: of its arrivals and lengths.
        figures: what was measured, by bound; of a run that was given up, up to then.
        met: whether it kept the level.
        num_ended: requests that had ended.
        num_failed: of them, requests that were refused, dropped or timed out.
        failure: the first message; empty if none failed.
        in_vain: whether the first request failed, and so would every one on any number of replicas.
        seconds: by name, the means of TTFT, TPOT and E2E.
    """

    num_replicas: int
    seed: int
    figures: Mapping[str, float]
    met: bool
    num_ended: int
    num_failed: int
    failure: str = ""
    in_vain: bool = False
    means: Mapping[str, float] = field(default_factory=dict)


def stream(settings: Settings, work: Workload, streams: int, level: Level, names: list[str]) -> LoopTimes:
    """Simulate streams on one replica, each of which sends a request when its last one is answered.

    The first request of each begins in the middle, so that they are spread from the start; it is not measured, nor are
    the next, which follow that start, and the last ones.

    Args:
        settings: of the cluster, with one worker per process.
        work: the requests.
        streams: at once.
        level: to hold them against.
        names: of the adapters.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    measured = max(ROUNDS * streams, LEAST_REQUESTS)
    total, rng = measured + 3 * streams, np.random.default_rng(SEED)
    prompts, outputs = (rng.integers(low, high + 1, total) for low, high in (work.prompt, work.output))
    left = (rng.permutation(streams) + 0.5) / streams
    outputs[:streams] = np.maximum(outputs[:streams] * left, 1).astype(np.int64)
    adapters = [names[place] for place in rng.choice(len(names), total, p=work.shares)] if names else None
    judge = Judge(level, measured)

    def ended(request: SimulatedRequest) -> None:
        if 2 * streams <= request.handle < 2 * streams + measured and judge.num_ended < measured:
            judge.add(request)
            if judge.num_ended == measured:
                run.stop()

    load = LoadOptions(workload=GIVEN, num_requests=total, concurrency=streams, timeout=LAST_SECONDS)
    given = Requests(np.zeros(total), prompts, outputs, adapters)
    alone = SimulationOptions(workers=1, shards=1)
    run = SimulatedRun(changed(settings, _LETS_ALL_WAIT), load, alone, given, Observers(on_end=ended))
    run.run()
    figures = judge.figures()
    met = all(bound.holds(figures[bound.name]) for bound in level.bounds if bound.time)
    return LoopTimes(judge.mean("ttft"), judge.mean("tpot"), judge.mean("e2e"), met)


def load_of(work: Workload, rate: float, num_requests: int, seed: int = SEED, drift: str | None = None) -> LoadOptions:
    """Return the options of a run of Poisson arrivals, as the command line has them."""
    return LoadOptions(
        rate=rate,
        num_requests=num_requests,
        input_range=work.prompt,
        output_range=work.output,
        num_adapters=work.num_adapters or None,
        adapter_exponent=work.exponent if work.num_adapters else None,
        drift=drift if work.num_adapters else None,
        seed=seed,
    )


def serve(settings: Settings, load: LoadOptions, level: Level, num_replicas: int, *, gives_up: bool) -> Trial:
    """Simulate a cluster.

    Args:
        settings: of the cluster.
        load: its requests.
        level: to hold them against.
        num_replicas: worker processes.
        gives_up: whether the run ends as soon as it cannot keep the level any more.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    assert load.num_requests is not None
    judge = Judge(level, load.num_requests)
    lost = False

    def ended(request: SimulatedRequest) -> None:
        nonlocal lost
        if lost:
            return
        if not judge.add(request) and gives_up:
            lost = True
            run.stop()

    run = SimulatedRun(settings, load, SimulationOptions(workers=num_replicas), observers=Observers(on_end=ended))
    statuses = run.run().summary.by_status
    figures = judge.figures()
    met = not lost and all(bound.holds(figures[bound.name]) for bound in level.bounds)
    return Trial(
        num_replicas,
        load.seed,
        figures,
        met,
        judge.num_ended,
        judge.num_failed,
        judge.failure,
        in_vain=judge.lost_first and _OF_LOAD.isdisjoint(statuses),
        means={name: judge.mean(name) for name in ("ttft", "tpot", "e2e")},
    )


def plan_registry(work: Workload) -> list[dict[str, str | int]]:
    """Return the adapters of a plan as the settings' registry, one family for each rank.

    Raises:
        SettingsError: too many.
    """
    if work.num_adapters > MAX_ADAPTERS:
        raise SettingsError(f"--adapters is {work.num_adapters}; at most {MAX_ADAPTERS} can be planned for")
    return [{"id": f"{_FAMILY}{rank}", "rank": rank, "count": count} for rank, count in work.adapters_of_rank.items()]


def adapter_names(work: Workload) -> list[str]:
    """Return the ids of the registry's adapters, in its order."""
    return [f"{_FAMILY}{rank}-{index}" for rank, count in work.adapters_of_rank.items() for index in range(count)]


def registry_override(work: Workload) -> str:
    """Return the adapters of a plan as an argument of --set, in place of the settings' own.

    Settings are read with it: other options may not suit the adapters that it replaces.

    Raises:
        SettingsError: too many.
    """
    families = (
        f'{{ id = "{family["id"]}", rank = {family["rank"]}, count = {family["count"]} }}'
        for family in plan_registry(work)
    )
    return f"{REGISTRY}=[{', '.join(families)}]"
