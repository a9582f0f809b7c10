"""docs/metrics.md lists what the services export, no more and no less; the dashboard names nothing else.

No process is started: each service's metrics are built on a fresh registry, made to show every series, and collected.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from lorrery.chassis.metrics import ServiceState, new_registry
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.workload.outcome import OK, RequestOutcome
from lorrery.router.metrics import RouterMetrics
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.metrics import SchedulerMetrics
from lorrery.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
SERVICES = ("router", "scheduler", "worker", "loadgen")
BOUNDED_LABELS = {"outcome", "reason", "status", "kind", "state", "shard", "worker"}
GRID_COLUMNS = 24

UNITS = {
    "_wall_seconds": {"wall seconds"},
    "_cpu_seconds": {"CPU seconds"},
    "_seconds": {"device seconds", "wall seconds", "CPU seconds", "Unix seconds"},
    "_tokens": {"tokens"},
    "_bytes": {"bytes"},
    "_requests": {"requests"},
    "_sequences": {"sequences"},
    "_adapters": {"adapters"},
    "_batch_size": {"sequences"},
}
"""What the unit column may say of a name that ends so (before `_total`); the longest ending decides."""


class Entry(NamedTuple):
    """What a line of the page says of a metric."""

    type: str
    labels: frozenset[str]


def router_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    RouterMetrics(registry).shard_connected("127.0.0.1:1", True)
    return registry


def scheduler_metrics() -> CollectorRegistry:
    replica = build_replica(ReplicaSettings("fcfs", memory="paged", max_total_token_num=1000, max_req_total_len=100))
    worker: Any = SimpleNamespace(worker_id="one", replica=replica, max_total_token_num=1000, draining=False)
    registry = CollectorRegistry()
    SchedulerMetrics(registry, lambda: [worker], lambda: 0, lambda: 0, lambda: 1.0, lambda: 0, lambda: 0)
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


EXPORTED = {
    "router": router_metrics,
    "scheduler": scheduler_metrics,
    "worker": worker_metrics,
    "loadgen": loadgen_metrics,
    "process": process_metrics,
}


def families(part: str) -> list[Metric]:
    return list(EXPORTED[part]().collect())


def shown_name(family: Metric) -> str:
    """The name on the page: as Prometheus shows it, without a histogram's endings."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def exported(part: str) -> dict[str, Entry]:
    return {
        shown_name(family): Entry(
            family.type, frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        )
        for family in families(part)
    }


def page_rows() -> Iterator[list[str]]:
    """Yield the cells of each line of docs/metrics.md that has a metric."""
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            yield cells


def documented() -> dict[str, Entry]:
    rows = list(page_rows())
    entries = {
        name.strip("`"): Entry(kind, frozenset(labels.replace(" ", "").split(",")) - {""})
        for name, kind, labels, _, _ in rows
    }
    assert len(entries) == len(rows), "a metric has two lines"
    return entries


def every_exported() -> dict[str, Entry]:
    return {name: entry for part in EXPORTED for name, entry in exported(part).items()}


def test_page_lists_exactly_what_is_exported():
    assert documented() == every_exported()


def test_every_line_of_the_page_has_a_unit_that_fits_the_name_and_a_meaning():
    for name, _, _, unit, meaning in page_rows():
        base = name.strip("`").removesuffix("_total")
        endings = [ending for ending in UNITS if base.endswith(ending)]
        if endings:
            assert unit in UNITS[max(endings, key=len)], name
        assert unit, name
        assert meaning, name


@pytest.mark.parametrize("part", EXPORTED)
def test_every_metric_has_a_help_text_and_shows_something_from_the_start(part: str):
    for family in families(part):
        assert family.documentation.strip(), family.name
        assert family.samples, f"{family.name} is empty until something happens"


@pytest.mark.parametrize("service", SERVICES)
def test_names_say_service_and_unit(service: str):
    for family in families(service):
        name = shown_name(family)
        assert re.fullmatch(rf"lorrery_{service}_[a-z0-9_]+", name)
        assert family.type in {"counter", "gauge", "histogram"}, name
        assert name.endswith("_total") == (family.type == "counter"), name
        assert not re.search(r"_(ms|us|ns|ps|milli\w+|micro\w+|pico\w+|minutes|percent|kb|mb|gb|count|sum)(_|$)", name)
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_batch_size")), name


@pytest.mark.parametrize("service", SERVICES)
def test_labels_are_bounded(service: str):
    for name, entry in exported(service).items():
        assert entry.labels <= BOUNDED_LABELS, name


# ---- the dashboard --------------------------------------------------------------------------------------------------


def board_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (where, PromQL) of everything that asks Prometheus."""
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']!r}", target["expr"]
    for note in board["annotations"]["list"]:
        yield f"annotation {note['name']!r}", note["expr"]
    for variable in board["templating"]["list"]:
        yield f"variable {variable['name']!r}", variable["query"]["query"]


def sample_names() -> dict[str, frozenset[str]]:
    """Return each name that an expression may use, with its labels; `_created` is of no use in one."""
    names: dict[str, frozenset[str]] = {}
    for name, entry in every_exported().items():
        if entry.type == "histogram":
            names[f"{name}_sum"] = names[f"{name}_count"] = entry.labels
            names[f"{name}_bucket"] = entry.labels | {"le"}
        else:
            names[name] = entry.labels
    return names


def test_there_is_a_dashboard():
    assert DASHBOARDS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboard_asks_only_for_metrics_that_exist(path: Path):
    names = sample_names()
    for where, expression in expressions(board_of(path)):
        asked = re.findall(r"\b(?:lorrery|process|python)_\w+", expression)
        assert asked, where
        assert set(asked) <= names.keys(), where


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboard_selects_by_labels_and_values_that_exist(path: Path):
    samples = [sample for part in EXPORTED for family in families(part) for sample in family.samples]
    values: dict[tuple[str, str], set[str]] = {}
    for sample in samples:
        for label, value in sample.labels.items():
            values.setdefault((sample.name, label), set()).add(value)
    for where, expression in expressions(board_of(path)):
        for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
            for label, operator, wanted in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                if label in {"job", "instance"}:  # Prometheus adds them
                    continue
                assert (name, label) in values, where
                if not wanted.startswith("$"):
                    choices = wanted.split("|") if "~" in operator else [wanted]
                    assert set(choices) <= values[name, label], where


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboard_defines_the_variables_it_uses_and_uses_those_it_defines(path: Path):
    board = board_of(path)
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = {name for _, expression in expressions(board) for name in re.findall(r"\$\{?(\w+)", expression)}
    assert {name for name in used if not name.startswith("__")} == defined


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_are_explained_and_do_not_overlap(path: Path):
    panels = board_of(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: dict[tuple[int, int], str] = {}
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["targets"], panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= GRID_COLUMNS, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in cells, f"{panel['title']!r} lies on {cells[x, y]!r}"
                cells[x, y] = panel["title"]


def test_containers_open_a_dashboard_that_is_there():
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    (home,) = re.findall(r"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /etc/grafana/dashboards/(\S+)", compose)
    assert home in {path.name for path in DASHBOARDS}
