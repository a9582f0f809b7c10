"""What the services export, without a process: each one's metrics on a fresh registry, made to show every series."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from lorrery.loadgen.metrics import TABLE as LOADGEN
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.workload.outcome import OK, RequestOutcome
from lorrery.router.http.server import TABLE as HTTP
from lorrery.router.http.server import RequestsCounted
from lorrery.router.metrics import TABLE as ROUTER
from lorrery.router.metrics import RouterMetrics
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.subscribers.gauges import Gauges
from lorrery.scheduler.subscribers.metrics import SchedulerMetrics
from lorrery.scheduler.subscribers.series import TABLE as SCHEDULER
from lorrery.service.telemetry.metrics import TABLE, ServiceState, new_registry
from lorrery.service.telemetry.series import Series
from lorrery.worker.metrics import CONSTANT_LABELS, WorkerMetrics
from lorrery.worker.metrics import TABLE as WORKER


class Entry(NamedTuple):
    """What a metric is."""

    type: str
    labels: frozenset[str]
    help: str


def router_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.watch(open_handlers=lambda: 0, in_flight=lambda: 0, waiting=lambda: 0)
    metrics.shard_connected("127.0.0.1:1", True)
    return registry


def scheduler_metrics() -> CollectorRegistry:
    replica = build_replica(ReplicaSettings("fcfs", memory="paged", max_total_token_num=1000, max_req_total_len=100))
    member = SimpleNamespace(name="one", replica=replica, pool_tokens=1000, draining=False)
    core = SimpleNamespace(num_unplaced=0, num_held=0)
    state: Any = SimpleNamespace(cores=[core], members=[member], open_sequences=[], num_routers=0, fairness=1.0)
    registry = CollectorRegistry()
    Gauges(SchedulerMetrics(registry, {}), state)
    return registry


def worker_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    WorkerMetrics(registry, "one", 1000)
    return registry


def loadgen_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    outcome = RequestOutcome(
        index=0, prompt_tokens=1, intended_seconds=0.0, sent_seconds=0.0, end_seconds=0.0, status=OK
    )
    LoadMetrics(registry).request_ended(outcome, completed=False)
    return registry


def process_metrics() -> CollectorRegistry:
    registry = new_registry("test")
    ServiceState(registry)
    return registry


def http_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    RequestsCounted(registry)
    return registry


EXPORTED = {
    "router": router_metrics,
    "http": http_metrics,
    "scheduler": scheduler_metrics,
    "worker": worker_metrics,
    "loadgen": loadgen_metrics,
    "process": process_metrics,
}
TABLES: dict[str, tuple[tuple[Series, ...], tuple[str, ...]]] = {
    "router": (ROUTER, ()),
    "http": (HTTP, ()),
    "scheduler": (SCHEDULER, ()),
    "worker": (WORKER, CONSTANT_LABELS),
    "loadgen": (LOADGEN, ()),
    "process": (TABLE, ()),
}
"""The series of each part, and the labels that all of them have."""


def families(part: str) -> list[Metric]:
    return list(EXPORTED[part]().collect())


def shown_name(family: Metric) -> str:
    """The name on the page: as Prometheus shows it, without a histogram's endings."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def entry(family: Metric) -> Entry:
    labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
    return Entry(family.type, labels, family.documentation)


def exported(part: str) -> dict[str, Entry]:
    return {shown_name(family): entry(family) for family in families(part)}


def every_exported() -> dict[str, Entry]:
    return {name: one for part in EXPORTED for name, one in exported(part).items()}


def in_table(part: str) -> dict[str, Entry]:
    series, constant = TABLES[part]
    return {one.name: Entry(one.type, frozenset((*one.labels, *constant)), one.help) for one in series}
