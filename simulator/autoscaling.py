"""Applies the autoscaler's rule to a simulation: at fixed times it looks, decides and scales."""

from collections.abc import Callable, Sequence

from lorrery.autoscaler.figures import Window
from lorrery.autoscaler.rule import Autoscaler
from lorrery.autoscaler.summary import Scaling, ScalingRow, ScalingSummary
from lorrery.loadgen.workload.outcome_table import OutcomeTable
from lorrery.settings import Settings
from lorrery.settings.autoscaler import AutoscalerSettings
from lorrery.simulator.engine import Simulation
from lorrery.simulator.first_workers import start_up_seconds
from lorrery.simulator.fleet import Fleet
from lorrery.simulator.scrape import Scraper
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import LAST_SECONDS, PS_PER_SECOND
from lorrery.worker.build import Device

__all__ = ["AutoscalerLoop", "Scaled", "fleet_of", "good_ratio"]


def fleet_of(
    settings: Settings,
    simulation: Simulation,
    device: Device,
    make: Callable[[int, int], Sequence[SimulatedWorker]],
    num_shards: int,
) -> Fleet:
    """Return the worker processes of a simulation, which are all attached.

    Args:
        settings: of the cluster.
        simulation: that has them.
        device: of each worker.
        make: see `Fleet`.
        num_shards: schedulers.
    """
    gpus = settings.worker.gpus
    workers = simulation.workers
    return Fleet(
        simulation,
        [workers[first : first + gpus] for first in range(0, len(workers), gpus)],
        make,
        num_shards=num_shards,
        gpus_per_worker=device.deployment.tensor_parallel,
        start_up_ps=round(start_up_seconds(settings, device.deployment) * PS_PER_SECOND),
        drain_ps=round(min(settings.worker.drain_seconds / settings.time_scale, LAST_SECONDS) * PS_PER_SECOND),
    )


def good_ratio(table: OutcomeTable, ttft_seconds: float, tpot_seconds: float) -> float:
    """Return the share of requests that completed with both times, from their intended send."""
    tokens = table.output_tokens
    took = table.last_token_seconds - table.first_token_seconds
    good = table.ok & (table.first_token_seconds - table.intended_seconds <= ttft_seconds)
    good &= (tokens < 2) | (took <= tpot_seconds * (tokens - 1))
    return float(good.mean()) if len(table) else 1.0


class Scaled:
    """Workers of a simulation that come and go, and what one sees of them.

    Args:
        settings: of the autoscaler.
        simulation: that has them.
        fleet: the workers.
        start_ps: from which times count.

    Attributes:
        scraper: what one sees; told of what runs and of requests that end.
        timeline: what was seen and decided.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, settings: AutoscalerSettings, simulation: Simulation, fleet: Fleet, start_ps: int) -> None:
        self.settings, self.fleet = settings, fleet
        self._start_ps = start_ps
        self.scraper = Scraper(simulation, fleet, start_ps)
        self.timeline: list[ScalingRow] = []

    def outcome(self, table: OutcomeTable) -> Scaling:
        """Return what the run came to, until the end of its last request.

        Args:
            table: what became of the requests.
        """
        own, fleet = self.settings, self.fleet
        used = fleet.used(self._start_ps + round(float(table.end_seconds.max(initial=0.0)) * PS_PER_SECOND))
        summary = ScalingSummary(
            gpu_hours=used.gpu_hours,
            replicas_min=used.fewest,
            replicas_mean=used.mean,
            replicas_max=used.most,
            num_scale_ups=fleet.num_scale_ups,
            num_scale_downs=fleet.num_scale_downs,
            start_up_seconds=fleet.start_up_ps / PS_PER_SECOND,
            ttft_seconds=own.ttft_seconds,
            tpot_seconds=own.tpot_seconds,
            good_ratio=good_ratio(table, own.ttft_seconds, own.tpot_seconds),
        )
        return Scaling(summary, self.metrics, self.timeline)


class AutoscalerLoop(Scaled):
    """Scales workers by a rule: at fixed times it looks, decides and scales; its first look is at once."""

    def __init__(self, settings: AutoscalerSettings, simulation: Simulation, fleet: Fleet, start_ps: int) -> None:
        super().__init__(settings, simulation, fleet, start_ps)
        rule = settings.rule(fleet.workers_per_process)
        self._autoscaler = Autoscaler(rule)
        self._window = Window(settings.window_seconds)
        self._period_ps = round(settings.sync_period_seconds * PS_PER_SECOND)
        self.metrics = tuple(rule.targets)
        simulation.tick(start_ps, self._sync)

    def _sync(self, at_ps: int) -> int:
        """Look, decide and scale; return when to look again."""
        sample = self.scraper.sample(at_ps)
        self._window.add(sample)
        readings = self._window.read_all(self.metrics)
        decision = self._autoscaler.decide(sample.at_seconds, sample.num_replicas, sample.num_ready, readings)
        self.timeline.append(ScalingRow.of(sample, decision, self.metrics, readings))
        if decision.replicas != sample.num_replicas:
            self.fleet.scale(decision.replicas)
        return at_ps + self._period_ps
