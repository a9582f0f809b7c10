"""Runs every candidate with the same seeds.

Candidates of one seed have the same requests: the same arrivals, lengths and adapters.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Annotated

import numpy as np

from lorrery.loadgen.report import LoadReport
from lorrery.scheduler.core.policies import batching_of, limits_of
from lorrery.service.errors import SettingsError
from lorrery.service.linux import num_cores
from lorrery.service.options import Option, arguments_of, part_of
from lorrery.service.settings.reading import read_override
from lorrery.simulator.arena.candidates import candidates_of
from lorrery.simulator.arena.comparison import TENANT, Comparison, Contestant
from lorrery.simulator.arena.equal import notes_on, why_equal
from lorrery.simulator.arena.fairness import jain_of_shares, service_gap
from lorrery.simulator.arena.watch import Watch
from lorrery.simulator.arguments import read_overrides, read_table
from lorrery.simulator.interface import prepare
from lorrery.simulator.options import Observers, Overrides, Scenario
from lorrery.simulator.plan.level import DEFAULT, Level, level_of
from lorrery.simulator.plan.options import SLO
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.sweep.outcome import Figure, Outcome, attempt, figures_of
from lorrery.simulator.sweep.processes import run_in_processes

__all__ = ["ArenaOptions", "compare", "compare_all"]


@dataclass(frozen=True)
class ArenaOptions(Scenario):
    """A cluster, what it has to serve, and the candidates to compare."""

    _: KW_ONLY
    candidates: Annotated[
        Sequence[str],
        "Names of policies, ways to batch or placements, `module:Class` of a policy of your own, or"
        " `KEY=VALUE[,KEY=VALUE]`; one alone is compared with all shipped ones of its kind, none: all queue policies.",
    ] = ()
    slo: Annotated[Mapping[str, float] | tuple[tuple[str, float], ...], SLO] = DEFAULT
    seeds: Annotated[
        int,
        Option(
            "Runs of each candidate, with seeds from --seed on; recorded requests without draws have one.",
            metavar="N",
            least=1,
            most_typed=100,
        ),
    ] = 5
    jobs: Annotated[
        int | None,
        Option("Number of runs at a time; unset: all cores.", metavar="N", names=("--jobs", "-j"), least=1),
    ] = None

    @property
    def level(self) -> Level:
        """The service level."""
        assert isinstance(self.slo, tuple)
        return level_of(self.slo)


Watcher = Callable[[int, int], None]
"""Called with the number of runs that have ended, and of all."""


@arguments_of(ArenaOptions)
def compare(asked: ArenaOptions) -> Comparison:
    """Compare policies on the same requests, with several seeds.

    Raises:
        SettingsError: invalid settings or options, or a candidate that is not known or cannot be.
    """
    return compare_all(asked)


def compare_all(asked: ArenaOptions, watch: Watcher = lambda _done, _all: None) -> Comparison:
    """Do the same, with progress.

    Raises:
        SettingsError: as `compare`.
    """
    checked = read_table(asked)
    overrides = read_overrides(checked.overrides)
    scenario = part_of(Scenario, checked)
    runs: dict[int, SimulatedRun] = {}
    found = Comparison(checked.level, (), [])
    for place, candidate in enumerate(candidates_of(checked.candidates, list(overrides))):
        contestant = Contestant(candidate)
        found.contestants.append(contestant)
        own: Overrides = (
            {**overrides, **dict(map(read_override, candidate.overrides))}
            if isinstance(overrides, Mapping)
            else [*overrides, *candidate.overrides]
        )
        try:
            runs[place] = prepare(replace(scenario, overrides=own))
        except SettingsError as error:
            if candidate.is_asked:
                raise SettingsError(f"{candidate.name}: {error}") from None
            contestant.error = str(error).removesuffix(" (--set)")
            continue
        contestant.parts = _parts_of(runs[place])
    if not runs:
        raise SettingsError(f"{found.contestants[0].name}: {found.contestants[0].error}")
    base = next(iter(runs.values()))
    found.seeds = range(base.options.seed, base.options.seed + (checked.seeds if base.options.is_drawn else 1))
    rounds = [
        _Round(f"{place} {seed}", replace(run, options=replace(run.options, seed=seed)))
        for seed in found.seeds
        for place, run in runs.items()
    ]
    _run_all(rounds, found, min(checked.jobs or num_cores(), num_cores()), watch)
    _conclude(found, base)
    return found


@dataclass(frozen=True, slots=True)
class _Round:
    """One run of one candidate.

    Attributes:
        key: place of the candidate and seed.
    """

    key: str
    run: SimulatedRun

    @property
    def has_plug_in(self) -> bool:
        own = self.run.settings.scheduler
        return any(":" in (name or "") for name in (own.policy, own.batching, own.placement))


def _run_all(rounds: Sequence[_Round], found: Comparison, num_processes: int, watch: Watcher) -> None:
    run = partial(_run, level=found.level)
    ended: dict[tuple[int, int], Outcome] = {}
    with closing(run_in_processes(rounds, num_processes, run)) as outcomes:
        for outcome in outcomes:
            place, seed = map(int, outcome.key.split())
            ended[place, seed] = outcome
            watch(len(ended), len(rounds))
    for (place, seed), outcome in sorted(ended.items(), key=itemgetter(0)):  # whichever ended first
        contestant = found.contestants[place]
        contestant.warnings |= dict.fromkeys(outcome.warnings)
        if outcome.figures is None:
            contestant.error = contestant.error or f"seed {seed}: {outcome.error}"
        else:
            contestant.rounds[seed] = {
                name: np.nan if value is None else value for name, value in outcome.figures.items()
            }


def _run(one: _Round, level: Level) -> Outcome:
    def simulate() -> Outcome:
        watch = Watch(level)
        one.run.observers = Observers(subscribers=(watch,), on_end=watch.ended)
        report = one.run.run()
        watch.close()
        return Outcome(
            one.key, figures_of_round(report, watch, warmup=one.run.options.warmup), warnings=report.warnings
        )

    return attempt(one.key, simulate)


def figures_of_round(report: LoadReport, watch: Watch, *, warmup: int) -> dict[str, Figure]:
    """Return the figures of one run: those of `MEASURES`, of each tenant, and what says why runs are equal."""
    found = figures_of(report)
    tenants = watch.tenants
    good = {name: sum(one.is_good for one in own) / len(own) for name, own in tenants.items()}
    num_requests = sum(map(len, tenants.values()))
    found["goodput_ratio"] = sum(good[name] * len(own) for name, own in tenants.items()) / max(num_requests, 1)
    if len(tenants) > 1:
        found["worst_tenant_ratio"] = min(good.values())
        found["jain_index"] = jain_of_shares(tenants)
        found["service_gap_tokens"] = service_gap(tenants)
        found |= {f"{TENANT}{name}": share for name, share in good.items()}
    if watch.num_loads and not warmup:
        here, anywhere = (watch.fewest_loads(anywhere=where) for where in (False, True))
        found["adapter_loads"] = watch.num_loads
        found["eviction_regret_loads"] = watch.num_loads - here
        if watch.num_workers > 1:
            found["placement_regret_loads"] = here - anywhere
    for name in _EVIDENCE:
        found[name] = getattr(watch, name)
    return found


_EVIDENCE = (
    "digest",
    "workload_digest",
    "num_admissions",
    "num_choices",
    "num_out_of_order",
    "most_waiting",
    "most_running",
    "num_workers",
    "num_owners",
    "num_priorities",
)


def _parts_of(run: SimulatedRun) -> dict[str, str]:
    """Return the parts of a run's scheduler by setting, as they are in force."""
    own = run.settings.scheduler
    limits = limits_of(own.policy, own.limits)
    return {
        "policy": own.policy,
        "batching": batching_of(own.policy, own.batching),
        "limits": f"{limits}, {own.max_running_setting} = {own.max_running}",
        "memory": own.memory,
        "prefix cache": own.prefix_cache.kind,
        "placement": own.placement,
    }


def _conclude(found: Comparison, base: SimulatedRun) -> None:
    """Say which candidates are equal and why, and what to know."""
    options, own = base.options, base.settings
    workers = base.simulation_options.workers
    bounds = ", ".join(f"{one.time.upper()} {one.limit:g} s" for one in found.level.bounds if one.time)
    found.about = {
        "model": own.model,
        "GPU": own.worker.gpu,
        "workers": str(own.num_worker_processes(workers)),
        "workload": options.workload,
        "seeds": f"{found.seeds[0]} to {found.seeds[-1]}" if len(found.seeds) > 1 else str(found.seeds[0]),
        "goodput": f"requests that {f'have {bounds} at most' if bounds else 'finish'}",
    }
    groups: dict[tuple[float, ...], list[Contestant]] = {}
    for one in found.ran:
        groups.setdefault((*one.values("digest"), *one.values("workload_digest")), []).append(one)
    found.equal = [why_equal(group) for group in groups.values() if len(group) > 1]
    found.notes = list(notes_on(found))
