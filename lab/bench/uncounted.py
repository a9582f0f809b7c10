"""A fork server whose services count nothing: `python lab/bench/uncounted.py FD`, for `lab.bench.metrics_cost`.

Counting code is replaced before the services are created: every method that a service calls to count does nothing, and
clocks read only for a metric are not read. The calls themselves remain, as does one reading of the loop's delay per
frame, which the router's flushing also needs.
"""

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from lorrery.chassis.histogram import Histogram
from lorrery.chassis.series import Number
from lorrery.local import fork_server
from lorrery.router.metrics import RouterMetrics
from lorrery.router.streams import Fanout
from lorrery.router.timing import Timing
from lorrery.scheduler import workers
from lorrery.scheduler.engine_counts import EngineTally
from lorrery.scheduler.metrics import SchedulerMetrics
from lorrery.worker.metrics import WorkerMetrics


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def silence(kind: type, names: Iterable[str]) -> None:
    """Replace these methods of a class by ones that do nothing."""
    for name in names:
        assert callable(getattr(kind, name))
        setattr(kind, name, nothing)


def counters(kind: type) -> list[str]:
    """Return the names of the public methods of a class of metrics, which are those that count."""
    return [name for name, what in vars(kind).items() if callable(what) and not name.startswith("_")]


def count_nothing() -> None:
    """Replace the counting code of all services."""
    silence(Histogram, ["observe", "observe_many", "observe_each"])
    silence(Number, ["inc", "set"])
    silence(Timing, ["message", "finish", "ended"])
    silence(Fanout, ["_written"])
    silence(RouterMetrics, ["request_ended", "tokens_written", "flush"])
    silence(SchedulerMetrics, counters(SchedulerMetrics))
    silence(EngineTally, counters(EngineTally))
    silence(WorkerMetrics, counters(WorkerMetrics))
    clocks: Any = SimpleNamespace(monotonic=time.monotonic, thread_time=float)
    workers.time = clocks  # type: ignore[attr-defined]


if __name__ == "__main__":
    count_nothing()
    fork_server.main()
