"""A simulation's metrics: the series that a live scheduler shows at `/metrics`, counted from the same facts.

0 is what a simulation does not have, or its report says: CPU time, gaps, late interrupts, routers, faults by kind.
Several schedulers are counted as one.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Handler
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.gauges import Gauges
from lorrery.scheduler.subscribers.metrics import SchedulerMetrics
from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole
from lorrery.service.settings.sections import MetricsSettings
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.worker import StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND


class SchedulerSeries:
    """Counts a simulation as its scheduler would; a subscriber of it.

    Args:
        simulation: to count from now on.
        adapters: ids of the registry.
        limits: how many adapters and tenants have series of their own.
    """

    def __init__(self, simulation: Simulation, adapters: Collection[str], limits: MetricsSettings) -> None:
        self._simulation = simulation
        self._registry = CollectorRegistry()
        self._metrics = SchedulerMetrics(self._registry, {}, limits)
        self._metrics.adapters.foresee(adapters)
        self._gave_back_live = self._metrics.handlers[GaveBack]
        Gauges(self._metrics, self)

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {**self._metrics.handlers, StepSpan: self._ran, GaveBack: self._gave_back}

    def _ran(self, span: StepSpan, at_ps: int, member: Member | None) -> None:
        """Count these steps; only the first has the plan's prefills, and it is then the only one."""
        plan, metrics, step_ps = span.plan, self._metrics, span.first_ps
        num_tokens = span.num_decodes + sum([chunk.samples for chunk in plan.prefills])
        for left in range(span.num_steps, 0, -1):
            metrics.ran(plan, step_ps, num_tokens if left > 1 else num_tokens - len(span.silent), member)
            step_ps += span.slope_ps

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        if fact.lost and not fact.member.draining:
            self._metrics.workers_lost.inc()
        self._gave_back_live(fact, at_ps, member)

    def write(self, path: Path, num_plans: int) -> None:
        """Write the series as Prometheus text; the driver counts plans, which are no facts of a simulation.

        Raises:
            LorreryError: it cannot be written.
        """
        self._metrics.plans.value = num_plans
        try:
            write_whole(path, generate_latest(self._registry))
        except OSError as error:
            raise LorreryError(f"{path}: {error.strerror}") from None

    # --- the state that gauges show -----------------------------------------------------------------------------------

    @property
    def cores(self) -> list[ClusterCore]:
        """That of each scheduler."""
        return self._simulation.cores

    @property
    def members(self) -> list[Member]:
        """The attached workers, as the cores see them."""
        return [member for core in self.cores for member in core.members.values()]

    @property
    def open_sequences(self) -> list[Sequence]:
        """Sequences of the requests that have not ended."""
        placed = [sequence for member in self.members for sequence in member.sequences.values()]
        return placed + [sequence for core in self.cores for sequence in core.unplaced()]

    @property
    def num_routers(self) -> int:
        """None is simulated."""
        return 0

    @property
    def fairness(self) -> float:
        """Jain's index of the service that tenants got."""
        return self._metrics.served.jain_index(self._simulation.now_ps / PS_PER_SECOND)
