"""The dashboards are what the generator makes, ask for what is exported, and explain themselves."""

import re
from pathlib import Path
from typing import Any

import pytest

from lab.dashboards.boards import BOARDS, FOLDER, rendered
from lab.dashboards.overview import FAILED
from lab.dashboards.panels import LINKS
from lab.dashboards.services import GRPC_CODES
from lorrery.router.metrics import OUTCOMES
from tests.deploy.asked import asked_by_board, board_of, check_series, check_values, rules
from tests.deploy.files import DASHBOARDS, ROOT

GRID_COLUMNS = 24
each_board = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)


def shown(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_generator_makes() -> None:
    in_tree = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert in_tree == rendered(), "stale: run `make dashboards`"
    assert set(FOLDER.glob("*.json")) == set(DASHBOARDS)


@each_board
def test_a_dashboard_asks_only_for_series_and_values_that_exist(path: Path) -> None:
    for where, expression in asked_by_board(board_of(path)):
        check_series(where, expression)
        check_values(where, expression)


@each_board
def test_a_dashboard_defines_the_variables_it_uses_and_uses_those_it_defines(path: Path) -> None:
    board = board_of(path)
    defined = {variable["name"] for variable in board["templating"].get("list", [])}
    used = {name for _, expression in asked_by_board(board) for name in re.findall(r"\$\{?(\w+)", expression)}
    assert {name for name in used if not name.startswith("__")} == defined


@each_board
def test_panels_are_explained_have_units_and_do_not_overlap(path: Path) -> None:
    board = board_of(path)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells: dict[tuple[int, int], str] = {}
    for panel in shown(board):
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= GRID_COLUMNS, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in cells, f"{panel['title']!r} lies on {cells[x, y]!r}"
                cells[x, y] = panel["title"]


@each_board
def test_every_line_of_panels_is_full(path: Path) -> None:
    width: dict[int, int] = {}
    for panel in board_of(path)["panels"]:
        width[panel["gridPos"]["y"]] = width.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(width.values()) == {GRID_COLUMNS}


@each_board
def test_dashboards_are_linked_and_a_link_from_a_series_sets_a_variable_there(path: Path) -> None:
    board = board_of(path)
    (link,) = board["links"]
    assert set(link["tags"]) <= set(board["tags"])
    assert link["keepTime"]
    for panel in shown(board):
        for one in panel["fieldConfig"]["defaults"].get("links", []):
            uid, label = re.findall(r"^/d/([\w-]+)\?var-(\w+)=", one["url"])[0]
            target = board_of(FOLDER / f"{uid.removeprefix('lorrery-')}.json")
            assert target["uid"] == uid
            assert label in {variable["name"] for variable in target["templating"]["list"]}
            assert all(label in query["expr"] for query in panel["targets"]), panel["title"]


def test_titles_and_uids_are_unique() -> None:
    boards = [board_of(path) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == len(BOARDS)
    assert {f"lorrery-{name}" for name in LINKS.values()} <= {board["uid"] for board in boards}


def test_status_codes_and_failures_name_every_outcome() -> None:
    named = [outcome for outcomes in GRPC_CODES.values() for outcome in outcomes.split("|")]
    assert sorted(named) == sorted(OUTCOMES)
    served = next(rule for rule in rules() if rule.get("labels") == {"slo": "served"} and "rate(" in rule["expr"])
    failed, counted = re.findall(r'outcome=~"([^"]+)"', served["expr"])
    assert set(counted.split("|")) == {"ok", *failed.split("|")}
    spared = re.findall(r'outcome!~"([^"]+)"', FAILED)[0].split("|")
    assert {*failed.split("|"), *spared} == set(OUTCOMES)


def test_containers_open_a_dashboard_that_is_there() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    (home,) = re.findall(r"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /etc/grafana/dashboards/(\S+)", compose)
    assert home in {path.name for path in DASHBOARDS}
