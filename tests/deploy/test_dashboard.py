"""The dashboards ask for what the services export, and for nothing else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.exported import EXPORTED, every_exported, families
from tests.deploy.files import DASHBOARDS, ROOT

GRID_COLUMNS = 24


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
