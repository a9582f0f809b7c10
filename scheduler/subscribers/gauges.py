"""The current state of a scheduler, read when Prometheus scrapes, so that steps pay nothing for it.

Scrapes run in another thread: state that changes meanwhile is copied in one go, and the figures of one scrape may
belong to neighbouring moments.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers import series
from lorrery.scheduler.subscribers.metrics import LEVELS, AdapterUse, SchedulerMetrics, TenantUse
from lorrery.service.telemetry.series import Exporter, Sample, Series
from lorrery.service.telemetry.top_names import OTHER, TopNames


class State(Protocol):
    """What the gauges read of a scheduler."""

    @property
    def cores(self) -> Collection[ClusterCore]:
        """Its core; of a simulation, those of all its schedulers."""
        ...

    @property
    def members(self) -> Collection[Member]:
        """Its attached workers."""
        ...

    @property
    def open_sequences(self) -> Collection[Sequence]:
        """Sequences of the requests that have not ended."""
        ...

    @property
    def num_routers(self) -> int:
        """Connected routers."""
        ...

    @property
    def fairness(self) -> float:
        """Jain's index of the service that tenants got."""
        ...


class Gauges:
    """Shows the state of a scheduler.

    Args:
        metrics: of the scheduler; they have the names to show.
        state: the state to read.
    """

    def __init__(self, metrics: SchedulerMetrics, state: State) -> None:
        self._state = state
        self._adapters: TopNames[AdapterUse] = metrics.adapters
        self._tenants: TopNames[TenantUse] = metrics.tenants
        shown = metrics.shown
        self._requests(shown)
        self._workers(shown)

    def _requests(self, shown: Exporter) -> None:
        state = self._state
        shown.value(series.IN_FLIGHT, lambda: len(state.open_sequences))
        shown.value(series.UNPLACED, lambda: sum(core.num_unplaced for core in state.cores))
        shown.value(series.HELD, lambda: sum(core.num_held for core in state.cores))
        shown.value(series.FAIRNESS, lambda: state.fairness)
        shown.value(series.ROUTERS, lambda: state.num_routers)
        shown.value(series.WAITING, self._num_waiting)
        shown.value(series.RUNNING, lambda: sum(worker.replica.num_running for worker in state.members))
        shown.value(series.ADAPTER_PINS, lambda: sum(worker.replica.running.adapter_pins for worker in state.members))
        by_adapter = _Counted(state, self._adapters, _adapter_id)
        by_tenant = _Counted(state, self._tenants, _tenant_id)
        shown.read(series.ADAPTER_WAITING, by_adapter.count)
        shown.read(series.ADAPTER_RUNNING, by_adapter.running)
        shown.read(series.TENANT_WAITING, by_tenant.count)
        shown.read(series.TENANT_RUNNING, by_tenant.running)

    def _num_waiting(self) -> int:
        state = self._state
        return sum(worker.replica.num_waiting for worker in state.members) + sum(
            core.num_unplaced + core.num_held for core in state.cores
        )

    def _workers(self, shown: Exporter) -> None:
        shown.read(series.WORKERS, self._by_state)
        self._of_each(shown, series.WORKER_RUNNING, lambda worker: worker.replica.num_running)
        self._of_each(shown, series.WORKER_WAITING, lambda worker: worker.replica.num_waiting)
        self._of_each(shown, series.WORKER_KV, lambda worker: worker.replica.kv_tokens)
        self._of_each(shown, series.WORKER_KV_POOL, lambda worker: worker.pool_tokens)
        self._of_each(shown, series.WORKER_RESIDENT, lambda worker: len(worker.replica.resident_adapters))
        self._of_each(shown, series.WORKER_LOADING, lambda worker: len(worker.replica.adapters.loading))
        shown.read(series.WORKER_KV_BLOCKS, self._blocks)
        shown.read(series.WORKER_ADAPTER_RESIDENT, self._resident)

    def _of_each(self, shown: Exporter, of: Series, read: Callable[[Member], float]) -> None:
        shown.read(of, lambda: [((worker.name,), read(worker)) for worker in self._state.members])

    def _by_state(self) -> Iterable[Sample]:
        workers = self._state.members
        yield ("ready",), sum(not worker.draining for worker in workers)
        yield ("draining",), sum(worker.draining for worker in workers)

    def _blocks(self) -> Iterable[Sample]:
        for worker in self._state.members:
            use = worker.replica.memory.block_use(worker.replica.running)
            if use is not None:
                yield (worker.name, "used"), use.used
                yield (worker.name, "cached"), use.cached
                yield (worker.name, "free"), use.free

    def _resident(self) -> Iterable[Sample]:
        top = self._adapters
        labels = [label for label, _ in top.shown()][1:]  # the base model is no adapter
        for worker in self._state.members:
            residency = worker.replica.adapters
            for level, held in zip(LEVELS, (residency.gpu, residency.host), strict=True):
                numbers = dict.fromkeys(labels, 0)
                for adapter_id in {adapter.adapter_id for adapter in list(held.values())}:
                    label = top.label(adapter_id)
                    numbers[label if label in numbers else OTHER] += 1
                for label, number in numbers.items():
                    yield (worker.name, label, level), number


class _Counted:
    """Counts open requests by name, once for the two series of each scrape; `count` must be read first."""

    def __init__(
        self, state: State, top: TopNames[AdapterUse] | TopNames[TenantUse], name: Callable[[Sequence], str]
    ) -> None:
        self._state, self._top, self._name = state, top, name
        self._running: list[Sample] = []

    def count(self) -> Iterable[Sample]:
        """Return the number of waiting requests by name."""
        name = self._name
        waiting: dict[str, int] = {}
        running: dict[str, int] = {}
        for sequence in self._state.open_sequences:
            one, numbers = name(sequence), waiting if sequence.admitted_ps is None else running
            numbers[one] = numbers.get(one, 0) + 1
        self._running = self._labelled(running)
        return self._labelled(waiting)

    def running(self) -> Iterable[Sample]:
        """Return the number of running requests by name."""
        return self._running

    def _labelled(self, numbers: dict[str, int]) -> list[Sample]:
        top = self._top
        labelled = {label: 0 for label, _ in top.shown()}
        for name, number in numbers.items():
            label = top.label(name)
            labelled[label if label in labelled else OTHER] += number
        return [((label,), number) for label, number in labelled.items()]


def _adapter_id(sequence: Sequence) -> str:
    return "" if sequence.adapter is None else sequence.adapter.adapter_id


def _tenant_id(sequence: Sequence) -> str:
    return sequence.tenant_id
