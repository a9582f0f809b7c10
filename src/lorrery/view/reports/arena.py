"""A comparison's part of the page, from `compare.json`: what can be said, figures, differences by seed, tenants."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorrery.view.reports import chart
from lorrery.view.reports.read import Arena
from lorrery.view.reports.tables import Column, Table, cut
from lorrery.vocabulary.intervals import mean_and_margin

__all__ = ["ArenaSection", "arena_section"]

_MOST_TENANTS = 40
_MOST_REACH = 4.0
"""Times the median end of an interval: drawings of longer ones end there, or one would flatten all others."""


@dataclass(frozen=True, slots=True)
class Block:
    """The differences of one figure: its title, and a row of texts for each candidate."""

    title: str
    rows: list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class ArenaSection:
    """The template's view of a comparison."""

    name: str
    facts: list[tuple[str, str]]
    warnings: list[str]
    said: list[str]
    base: str
    figures: Table
    differences: list[Block]
    tenants: Table | None
    parts: Table


@dataclass(frozen=True, slots=True)
class _Figures:
    """The figures of one candidate: its name, and a figure's values by seed."""

    name: str
    rounds: Sequence[Mapping[str, float | None]]

    def values(self, figure: str) -> list[float]:
        return [math.nan if (value := one.get(figure)) is None else value for one in self.rounds]


def arena_section(arena: Arena) -> ArenaSection:
    """Make the tables of a comparison."""
    content = arena.content
    ran = [
        _Figures(cut(one["name"]), [one["rounds"][seed] for seed in sorted(one["rounds"], key=int)])
        for one in content["contestants"]
        if not one["error"]
    ]
    measures = content["measures"]
    left_out = [f"{one['name']} is left out: {one['error']}" for one in content["contestants"] if one["error"]]
    return ArenaSection(
        arena.name,
        [(label, cut(text, 120)) for label, text in content["about"].items()],
        [cut(text, 600) for text in (*left_out, *content["notes"])],
        [cut(text, 1200) for text in (*content["verdicts"], *content["equal"])],
        ran[0].name if ran else "",
        _figures_table(ran, measures),
        [_block(ran, measure) for measure in measures if measure["ranks"]] if len(ran) > 1 else [],
        _tenants_table(ran, content["tenants"]),
        _parts_table(content["contestants"]),
    )


def _figures_table(ran: Iterable[_Figures], measures: Sequence[Mapping[str, Any]]) -> Table:
    columns = [Column("candidate", text=True), *(Column(one["title"], one["unit"]) for one in measures)]
    rows = [[one.name, *(_with_margin(measure, one.values(measure["name"])) for measure in measures)] for one in ran]
    return Table("", columns, rows, notes=["Means over the seeds ± half of their 95 % interval."])


def _block(ran: Sequence[_Figures], measure: Mapping[str, Any]) -> Block:
    """Compare all candidates with the first by one figure."""
    base = ran[0].values(measure["name"])
    changes = [
        mean_and_margin(b - a for a, b in zip(base, one.values(measure["name"]), strict=True)) for one in ran[1:]
    ]
    reaches = sorted(abs(mean) + margin for mean, margin in changes if math.isfinite(mean + margin))
    limit = min(reaches[-1], _MOST_REACH * reaches[len(reaches) // 2]) if reaches else 0.0
    rows = [_row(one.name, measure, *change, limit) for one, change in zip(ran[1:], changes, strict=True)]
    unit = f" ({measure['unit']})" if measure["unit"] else ""
    return Block(f"{measure['title']}{unit}", rows)


def _row(name: str, measure: Mapping[str, Any], mean: float, margin: float, limit: float) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(("drawing", "interval", "verdict"), "")
    row |= {"name": name, "class": "noise", "change": _signed(measure, mean) if math.isfinite(mean) else "-"}
    if mean == margin == 0:
        row["verdict"] = "equal"
    elif math.isfinite(margin):
        row["drawing"] = chart.interval(mean - margin, mean, mean + margin, limit)
        row["interval"] = f"{_signed(measure, mean - margin)} to {_signed(measure, mean + margin)}"
        row["verdict"] = "not separable"
        if abs(mean) > margin:
            row["verdict"] = row["class"] = "better" if (mean < 0) == measure["less_is_better"] else "worse"
    return row


def _tenants_table(ran: Sequence[_Figures], tenants: Sequence[str]) -> Table | None:
    if len(tenants) < 2:
        return None
    columns = [Column("tenant, or adapter", text=True), *(Column(one.name, "%") for one in ran)]
    rows = []
    for tenant in tenants[:_MOST_TENANTS]:
        means = (mean_and_margin(one.values(f"goodput_ratio:{tenant}"))[0] for one in ran)
        rows.append([cut(tenant) or "(none)", *("-" if math.isnan(mean) else f"{100 * mean:.1f}" for mean in means)])
    notes = [f"The first {_MOST_TENANTS} of {len(tenants):,}."] if len(tenants) > _MOST_TENANTS else []
    return Table("", columns, rows, notes=["Means over the seeds, those with most requests first.", *notes])


def _parts_table(contestants: Sequence[Mapping[str, Any]]) -> Table:
    parts = next((list(one["parts"]) for one in contestants if one["parts"]), [])
    columns = [Column("candidate", text=True), *(Column(part, text=True) for part in parts)]
    rows = [[cut(one["name"]), *(cut(one["parts"].get(part, "")) for part in parts)] for one in contestants]
    return Table("", columns, rows)


def _with_margin(measure: Mapping[str, Any], values: Sequence[float]) -> str:
    mean, margin = mean_and_margin(values)
    shown = _number(measure, mean)
    return f"{shown} ± {_number(measure, margin)}" if math.isfinite(margin) else shown


def _signed(measure: Mapping[str, Any], value: float) -> str:
    return f"{'+' if value > 0 else ''}{_number(measure, value)}"


def _number(measure: Mapping[str, Any], value: float) -> str:
    return chart.number(100 * value if measure["unit"] == "%" else value)
