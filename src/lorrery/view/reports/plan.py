"""The page of `lorrery plan --rate --page FILE`: the answer, its proof, what surrounds it, and how to deploy it.

Everything on it is in what `--json` writes (`cli.plan_search.search_json`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lorrery.view.reports import chart
from lorrery.view.reports.chart import Axis, Line
from lorrery.view.reports.frame import page
from lorrery.view.reports.tables import Column, Table

__all__ = ["plan_page"]

_LIMIT_STYLE = 7


def plan_page(told: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        told: the part `search` of what `--json` writes.
    """
    names, limits = list(told["limits"]), told["limits"]
    found = told["shape"] is not None
    offers = told.get("offers", [])
    kinds = list(dict.fromkeys(one["replica"] for one in offers))
    return page(
        "plan.html",
        kind="plan",
        title=f"{told['replicas']} x {told['shape']}" if found else "No cluster keeps the level",
        beside=f"for {told['question']}; service level: {told['service_level']}",
        beside_it="The same figures for programs: --json.",
        tiles=told["tiles"],
        says=told["says"],
        proofs=_proofs(told, names),
        legend=[chart.swatch(kind, style) for style, kind in enumerate(kinds)],
        charts=[_against_cost(name, limits[name], offers, kinds) for name in names] if offers else [],
        offers=_clusters(offers, names),
        variations=_variations(told.get("variations", []), names),
        rejected=_clusters(told["rejected"], names),
        not_shapes=told["not_shapes"],
        deploy=[(title, text) for title, text in told["deploy"].items() if text],
        trust=told["trust"],
    )


def _is_time(name: str) -> bool:
    return name.partition("_")[0] in ("ttft", "tpot", "e2e")


def _shown(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if _is_time(name):
        return chart.seconds(value)
    return f"{value:.2%}" if name == "goodput" else chart.number(value)


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _proofs(told: Mapping[str, Any], names: Sequence[str]) -> Table:
    columns = [Column("replicas"), *(Column(name) for name in names), Column("", text=True)]
    rows = []
    for proof in reversed(told["proofs"]):
        cells = []
        for name in names:
            margin = proof["margins"][name]
            known = margin is not None and math.isfinite(margin)
            cells.append(_shown(name, proof["means"][name]) + (f" ± {_shown(name, margin)}" if known else ""))
        clear = "" if proof["is_clear"] else ", not clearly"
        rows.append([str(proof["num_replicas"]), *cells, ("met" if proof["met"] else "missed") + clear])
    seeds = len(told["proofs"][0]["seeds"]) if told["proofs"] else 0
    return Table("", columns, rows, notes=[f"means over {seeds} seeds, ± half the 95 % interval (Student's t)"])


def _clusters(clusters: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    titles = [Column("deployment", text=True), Column("replicas"), Column("GPUs"), Column("cost", "$/h")]
    columns = [*titles, *(Column(name) for name in names), Column("", text=True)]
    rows = []
    for one in clusters:
        figures = one["figures"]
        cells = [_shown(name, None if figures is None else figures[name]) for name in names]
        if figures is None:
            why = "costs no less"
        else:
            why = "met" if one["met"] else "missed"
            if one["failure"]:
                why += f": {one['failure']}"
        rows.append([one["shape"], str(one["num_replicas"]), str(one["gpus"]), _usd(one["usd_per_hour"]), *cells, why])
    return Table("", columns, rows)


def _variations(variations: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    columns = [Column("load", text=True), *(Column(name) for name in names), Column("", text=True)]
    rows = [
        [one["what"], *(_shown(name, one["figures"][name]) for name in names), "met" if one["met"] else "missed"]
        for one in variations
    ]
    return Table("", columns, rows)


def _against_cost(name: str, limit: float, offers: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Any:  # noqa: ANN401  markup
    """Draw a figure over the cost, a line for each kind of replica, and the limit."""
    priced = all(one["usd_per_hour"] is not None for one in offers)
    cost = "usd_per_hour" if priced else "gpus"
    lines = []
    for style, kind in enumerate(kinds):
        points = sorted((one[cost], one["figures"][name]) for one in offers if one["replica"] == kind)
        x, y = (np.array(values, np.float64) for values in zip(*points, strict=True))
        lines.append(Line(kind, x, np.where(np.isfinite(y), y, np.nan), style, marks=True))
    all_costs = [one[cost] for one in offers]
    ends = np.array([min(all_costs), max(all_costs)], np.float64)
    lines.append(Line(f"limit {_shown(name, limit)}", ends, np.full(2, limit), _LIMIT_STYLE, hollow=True))
    axis = Axis(name, "s" if _is_time(name) else "", log=_is_time(name))
    return chart.lines(f"{name} over cost", Axis("$/h" if priced else "GPUs"), axis, lines, note="dashed: the limit")
