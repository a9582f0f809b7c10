"""Applies the autoscaler's rules to a simulation: each reads its group at fixed times, decides and scales."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter

from lorrery.loadgen.report import Scaling, ScalingRow, ScalingSummary
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.scheduler.core.autoscaling import Autoscaler, Decision, Reading, Sample, Window
from lorrery.service.settings.autoscaler import AutoscalerSettings
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.fleet import Fleet, Numbers, start_up_seconds
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.simulator.subscribers.scrape import Scraper
from lorrery.vocabulary.units import LAST_SECONDS, PS_PER_SECOND
from lorrery.worker.build import Device

__all__ = ["AutoscalerLoop", "Scaled", "fleets_of", "good_ratio", "scaling_row"]


def fleets_of(
    simulation: Simulation,
    kinds: Sequence[tuple[Settings, Device, int]],
    make: Callable[[Settings, Device, int, int], Sequence[SimulatedWorker]],
    num_shards: int,
) -> list[Fleet]:
    """Return the fleets of a simulation, one per group; all their workers are attached.

    Args:
        simulation: that has the workers.
        kinds: settings, device and number of workers of each group.
        make: makes the workers of a further process of a group from its number and its scheduler's index.
        num_shards: schedulers.
    """
    numbers = Numbers(num_shards, sum(num_workers // kind.worker.gpus for kind, _, num_workers in kinds))
    labels = _labels([device.deployment.gpu.name for _, device, _ in kinds])
    fleets: list[Fleet] = []
    attached, number = iter(simulation.workers), 0
    for (kind, device, num_workers), label in zip(kinds, labels, strict=True):
        gpus = kind.worker.gpus
        processes = range(number, number + num_workers // gpus)
        number = processes.stop
        fleets.append(
            Fleet(
                simulation,
                [(one, [next(attached) for _ in range(gpus)]) for one in processes],
                partial(make, kind, device),
                numbers=numbers,
                gpus_per_worker=device.deployment.tensor_parallel,
                start_up_ps=round(start_up_seconds(kind, device.deployment) * PS_PER_SECOND),
                drain_ps=round(min(kind.worker.drain_seconds / kind.time_scale, LAST_SECONDS) * PS_PER_SECOND),
                name=label,
            )
        )
    return fleets


def _labels(gpus: Sequence[str]) -> list[str]:
    """Return the groups' names: their GPUs, with the group's number where two share a GPU; empty for a single group."""
    if len(gpus) == 1:
        return [""]
    return [f"{gpu} ({number})" if gpus.count(gpu) > 1 else gpu for number, gpu in enumerate(gpus)]


@dataclass(frozen=True, slots=True)
class _Usage:
    """Resources that fleets used until some time.

    Attributes:
        gpu_hours: of all processes that existed, serving or not.
        fewest: minimum number of serving processes.
        mean: number of serving processes, averaged over time.
        most: maximum number of serving processes.
    """

    gpu_hours: float
    fewest: int
    mean: float
    most: int


def _used(fleets: Sequence[Fleet], until_ps: int) -> _Usage:
    """Return the use from the start until a time; anything simulated after it does not count."""
    changes: list[tuple[int, int]] = []  # (time, change in the number of serving processes)
    gpu_ps = 0
    for fleet in fleets:
        levels = [level for level in fleet.levels if level.at_ps <= until_ps]
        ends_ps = [level.at_ps for level in levels[1:]] + [until_ps]
        there_ps = [(end_ps - one.at_ps) * one.there for one, end_ps in zip(levels, ends_ps, strict=True)]
        gpu_ps += sum(there_ps) * fleet.gpus_per_process
        changes += [(after.at_ps, after.ready - before.ready) for before, after in pairwise(levels)]
    start_ps = fleets[0].levels[0].at_ps
    num_ready = fewest = most = sum(fleet.levels[0].ready for fleet in fleets)
    ready_ps, at_ps = 0, start_ps
    for change_ps, change in sorted(changes, key=itemgetter(0)):
        ready_ps += (change_ps - at_ps) * num_ready
        at_ps, num_ready = change_ps, num_ready + change
        fewest, most = min(fewest, num_ready), max(most, num_ready)
    ready_ps += (until_ps - at_ps) * num_ready
    mean = ready_ps / (until_ps - start_ps) if until_ps > start_ps else float(num_ready)
    return _Usage(gpu_ps / (3600 * PS_PER_SECOND), fewest, mean, most)


def good_ratio(table: OutcomeTable, ttft_seconds: float, tpot_seconds: float) -> float:
    """Return the share of requests that completed within both limits, counted from their intended send time."""
    tokens = table.output_tokens
    took = table.last_token_seconds - table.first_token_seconds
    good = table.ok & (table.first_token_seconds - table.intended_seconds <= ttft_seconds)
    good &= (tokens < 2) | (took <= tpot_seconds * (tokens - 1))
    return float(good.mean()) if len(table) else 1.0


def scaling_row(
    sample: Sample, decision: Decision, metrics: Sequence[str], readings: Mapping[str, Reading], group: str = ""
) -> ScalingRow:
    """Build a row of the timeline from a sample, the decision, and the readings that the rule used.

    Totals are divided by the number of replicas that reported.
    """
    num_ready = sample.num_ready
    shares = {
        metric: reading.value / max(num_ready if reading.replicas is None else reading.replicas, 1)
        if reading.is_total
        else reading.value
        for metric, reading in readings.items()
    }
    return ScalingRow(
        seconds=sample.at_seconds,
        ready=sample.num_ready,
        starting=sample.num_starting,
        draining=sample.num_draining,
        desired=decision.replicas,
        recommended=decision.recommended,
        num_requests_waiting=sample.num_requests_waiting,
        num_requests_running=sample.num_requests_running,
        kv_cache_usage_perc=sample.kv_cache_usage_perc / max(sample.num_ready, 1),
        values=tuple(shares.get(metric) for metric in metrics),
        group=group,
    )


class Scaled:
    """Scalable workers of a simulation, and their metrics.

    Args:
        settings: the service level that is reported.
        simulation: that has the workers.
        fleets: the workers, group by group.
        start_ps: origin of times.

    Attributes:
        scrapers: metrics of each group; subscribers of the run.
        timeline: observations and decisions.
    """

    metrics: tuple[str, ...] = ()

    def __init__(
        self, settings: AutoscalerSettings, simulation: Simulation, fleets: Sequence[Fleet], start_ps: int
    ) -> None:
        self.settings, self.fleets = settings, fleets
        self._start_ps = start_ps
        self.scrapers = [Scraper(simulation, fleet, start_ps) for fleet in fleets]
        self.timeline: list[ScalingRow] = []

    def ended(self, request: SimulatedRequest) -> None:
        """Record an ended request."""
        for scraper in self.scrapers:
            scraper.ended(request)

    def outcome(self, table: OutcomeTable) -> Scaling:
        """Return the scaling result of the run, until the end of its last request.

        Args:
            table: outcomes of the requests.
        """
        own, fleets = self.settings, self.fleets
        used = _used(fleets, self._start_ps + round(float(table.end_seconds.max(initial=0.0)) * PS_PER_SECOND))
        summary = ScalingSummary(
            gpu_hours=used.gpu_hours,
            replicas_min=used.fewest,
            replicas_mean=used.mean,
            replicas_max=used.most,
            num_scale_ups=sum(fleet.num_scale_ups for fleet in fleets),
            num_scale_downs=sum(fleet.num_scale_downs for fleet in fleets),
            start_up_seconds=max(fleet.start_up_ps for fleet in fleets) / PS_PER_SECOND,
            ttft_seconds=own.ttft_seconds,
            tpot_seconds=own.tpot_seconds,
            good_ratio=good_ratio(table, own.ttft_seconds, own.tpot_seconds),
        )
        return Scaling(summary, self.metrics, self.timeline)


class AutoscalerLoop(Scaled):
    """Scales each group by its rule: at fixed times it reads metrics, decides and scales, first at the start.

    Args:
        settings: as `Scaled`.
        simulation: as `Scaled`.
        fleets: as `Scaled`.
        start_ps: as `Scaled`.
        rules: one per group; a group whose rule is not enabled keeps its size.
    """

    def __init__(
        self,
        settings: AutoscalerSettings,
        simulation: Simulation,
        fleets: Sequence[Fleet],
        start_ps: int,
        rules: Sequence[AutoscalerSettings],
    ) -> None:
        super().__init__(settings, simulation, fleets, start_ps)
        enabled = [
            (rule, fleet, scraper)
            for rule, fleet, scraper in zip(rules, fleets, self.scrapers, strict=True)
            if rule.enabled
        ]
        self.metrics = tuple(dict.fromkeys(name for rule, _, _ in enabled for name in rule.targets))
        for rule, fleet, scraper in enabled:
            loop = _GroupLoop(rule, fleet, scraper, self.metrics, self.timeline)
            if loop.scrape_ps:
                simulation.tick(start_ps + loop.scrape_ps // 2, loop.scrape)
            simulation.tick(start_ps, loop.sync)


class _GroupLoop:
    """Applies a rule to a group of workers.

    Args:
        settings: of the rule.
        fleet: the workers.
        scraper: their metrics.
        metrics: columns of a row of the timeline.
        timeline: receives observations and decisions.

    Attributes:
        scrape_ps: interval between scrapes; 0: it scrapes at each decision.
    """

    def __init__(
        self,
        settings: AutoscalerSettings,
        fleet: Fleet,
        scraper: Scraper,
        metrics: Sequence[str],
        timeline: list[ScalingRow],
    ) -> None:
        self._fleet, self._scraper, self._metrics, self._timeline = fleet, scraper, metrics, timeline
        self._autoscaler = Autoscaler(settings.rule(fleet.workers_per_process))
        self._window = Window(settings.window_seconds, settings.metrics_delay_seconds)
        self._period_ps = round(settings.sync_period_seconds * PS_PER_SECOND)
        self.scrape_ps = round(settings.scrape_interval_seconds * PS_PER_SECOND)

    def scrape(self, at_ps: int) -> int:
        """Scrape the workers; return the time of the next scrape."""
        self._window.add(self._scraper.sample(at_ps))
        return at_ps + self.scrape_ps

    def sync(self, at_ps: int) -> int:
        """Read the metrics, decide and scale; return the time of the next decision."""
        now = self._scraper.sample(at_ps)
        if self.scrape_ps:
            self._window.pass_until(now.at_seconds)
        else:
            self._window.add(now)
        readings = self._window.read_all(self._autoscaler.rule.targets)
        decision = self._autoscaler.decide(now.at_seconds, now.num_replicas, now.num_ready, readings)
        self._timeline.append(scaling_row(now, decision, self._metrics, readings, self._fleet.name))
        if decision.replicas != now.num_replicas:
            self._fleet.scale(decision.replicas)
        return at_ps + self._period_ps
