"""A dashboard: rows of panels laid out from left to right; variables, links and annotations that all share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from lab.dashboards.panels import PROMETHEUS, Panel

COLUMNS = 24
TAG = "lorrery"

VARIABLES = {
    "worker": "label_values(lorrery_worker_attached, worker)",
    "adapter": "label_values(lorrery_router_adapter_requests_total, adapter)",
    "tenant": "label_values(lorrery_router_tenant_requests_total, tenant)",
    "model_name": "label_values(vllm:num_requests_running, model_name)",
    "instance": "label_values(vllm:num_requests_running, instance)",
}
"""Variable and the query that lists its values."""

ANNOTATIONS = {
    "Alerts": ('ALERTS{alertname=~"Lorrery.+", alertstate="firing"}', "red"),
    "Workers lost": ("changes(lorrery_scheduler_workers_lost_total[$__interval]) > 0", "orange"),
}
"""Shown on every panel: name, query, colour."""


@dataclass(frozen=True)
class Row:
    """Panels under a title; what does not fit into one line goes on in the next."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Attributes:
        name: of its file; with `lorrery-` its uid.
        title: as Grafana shows it.
        question: what it answers.
        rows: from top to bottom.
        variables: of `VARIABLES`, those that its expressions use.
    """

    name: str
    title: str
    question: str
    rows: Sequence[Row]
    variables: Sequence[str] = ()

    def to_json(self) -> str:
        """Return the file."""
        made = json.loads(JSONEncoder(sort_keys=True).encode(self._builder().build()))
        return json.dumps(_without_nulls(made), indent=1, sort_keys=True) + "\n"

    def _builder(self) -> builders.Dashboard:
        board = (
            builders.Dashboard(f"Lorrery / {self.title}")
            .uid(f"lorrery-{self.name}")
            .description(self.question)
            .tags([TAG])
            .time("now-15m", "now")
            .refresh("5s")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                builders.DashboardLink("Lorrery")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .keep_time(True)
                .include_vars(True)
            )
        )
        for name in self.variables:
            board.with_variable(_variable(name))
        for name, (expr, colour) in ANNOTATIONS.items():
            board.annotation(
                builders.AnnotationQuery().name(name).datasource(PROMETHEUS).enable(True).icon_color(colour).expr(expr)
            )
        top = number = 0
        for row in self.rows:
            number += 1
            board.with_row(builders.Row(row.title).id(number).grid_pos(models.GridPos(h=1, w=COLUMNS, x=0, y=top)))
            top += 1
            left = height = 0
            for panel in row.panels:
                if left + panel.width > COLUMNS:
                    top, left, height = top + height, 0, 0
                height = max(height, panel.height)
                number += 1
                place = models.GridPos(h=panel.height, w=panel.width, x=left, y=top)
                board.with_panel(panel.builder.id(number).grid_pos(place))
                left += panel.width
            top += height
        return board


def _variable(name: str) -> builders.QueryVariable:
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        builders.QueryVariable(name)
        .label(name)
        .datasource(PROMETHEUS)
        .query({"query": VARIABLES[name], "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(everything)
    )


def _without_nulls(value: Any) -> Any:  # noqa: ANN401  JSON
    """Return JSON without members that are null, which say nothing; the first threshold's null is minus infinity."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None or key == "value"}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
