"""Applies the autoscaler's rule to a simulation: at fixed times it looks, decides and scales."""

from collections.abc import Callable, Sequence

from lorrery.autoscaler.figures import Window
from lorrery.autoscaler.rule import Autoscaler, Reading
from lorrery.autoscaler.summary import Scaling, ScalingRow, ScalingSummary
from lorrery.loadgen.workload.outcome_table import OutcomeTable
from lorrery.settings import Settings
from lorrery.settings.autoscaler import AutoscalerSettings
from lorrery.simulator.engine import Simulation
from lorrery.simulator.fleet import Fleet
from lorrery.simulator.scrape import Scraper
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import Device
from lorrery.worker.device.memory import weight_bytes

__all__ = ["AutoscalerLoop", "fleet_of", "good_ratio", "start_up_seconds"]


def start_up_seconds(settings: Settings, device: Device) -> float:
    """Return device seconds from a worker process's start to its first plan: each of its workers reads the weights."""
    own = device.deployment
    weights = weight_bytes(own.model, own.precision, own.expert_parallel)
    return settings.autoscaler.start_up_seconds(weights * settings.worker.gpus)


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
        start_up_ps=round(start_up_seconds(settings, device) * PS_PER_SECOND),
        drain_ps=round(settings.worker.drain_seconds / settings.time_scale * PS_PER_SECOND),
    )


def good_ratio(table: OutcomeTable, ttft_seconds: float, tpot_seconds: float) -> float:
    """Return the share of requests that completed with both times, from their intended send."""
    tokens = table.output_tokens
    took = table.last_token_seconds - table.first_token_seconds
    good = table.ok & (table.first_token_seconds - table.intended_seconds <= ttft_seconds)
    good &= (tokens < 2) | (took <= tpot_seconds * (tokens - 1))
    return float(good.mean()) if len(table) else 1.0


class AutoscalerLoop:
    """See the module; its first look is at once.

    Args:
        settings: the rule.
        simulation: that it looks at.
        fleet: that it scales.
        start_ps: from which times count.

    Attributes:
        scraper: what it sees; told of what runs and of requests that end.
        timeline: its decisions.
    """

    def __init__(self, settings: AutoscalerSettings, simulation: Simulation, fleet: Fleet, start_ps: int) -> None:
        self._settings, self._simulation, self._fleet, self._start_ps = settings, simulation, fleet, start_ps
        self.scraper = Scraper(simulation, fleet, start_ps)
        rule = settings.rule(fleet.workers_per_process)
        self._autoscaler = Autoscaler(rule)
        self._window = Window(settings.window_seconds)
        self._period_ps = round(settings.sync_period_seconds * PS_PER_SECOND)
        self.metrics = tuple(rule.targets)
        self.timeline: list[ScalingRow] = []
        simulation.tick(start_ps, self._sync)

    def _sync(self, at_ps: int) -> int:
        """Look, decide and scale; return when to look again."""
        sample = self.scraper.sample(at_ps)
        self._window.add(sample)
        readings: dict[str, Reading] = {}
        for metric in self.metrics:
            reading = self._window.read(metric)
            if reading is not None:
                readings[metric] = reading
        decision = self._autoscaler.decide(sample.at_seconds, sample.num_replicas, sample.num_ready, readings)
        self.timeline.append(ScalingRow.of(sample, decision, self.metrics, readings))
        if decision.replicas != sample.num_replicas:
            self._fleet.scale(decision.replicas)
        return at_ps + self._period_ps

    def outcome(self, table: OutcomeTable) -> Scaling:
        """Return what the run came to, up to the end of its last request.

        Args:
            table: what became of the requests.
        """
        own, fleet = self._settings, self._fleet
        gpu_hours, mean = fleet.used(self._simulation.now_ps)
        summary = ScalingSummary(
            gpu_hours=gpu_hours,
            replicas_min=fleet.fewest,
            replicas_mean=mean,
            replicas_max=fleet.most,
            num_scale_ups=fleet.num_scale_ups,
            num_scale_downs=fleet.num_scale_downs,
            start_up_seconds=fleet.start_up_ps / PS_PER_SECOND,
            ttft_seconds=own.ttft_seconds,
            tpot_seconds=own.tpot_seconds,
            good_ratio=good_ratio(table, own.ttft_seconds, own.tpot_seconds),
        )
        return Scaling(summary, self.metrics, self.timeline)
