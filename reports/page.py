"""One HTML page of some runs and sweeps. `page.html`, `page.css` and `page.js` beside it are what it looks like."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lorrery.chassis.version import VERSION
from lorrery.reports import chart, run_charts, run_tables
from lorrery.reports.compare import Comparison, Difference, compare
from lorrery.reports.facts import differing, facts, headline, options_of
from lorrery.reports.read import Run
from lorrery.reports.scaling_charts import scaling_charts
from lorrery.reports.steady import LEAST_E2E, LEFT_OUT_E2E, Steady
from lorrery.reports.sweep import Sweep
from lorrery.reports.sweep_section import sweep_section
from lorrery.reports.table import Column, Table, cut

__all__ = ["render"]

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The other run of a comparison, how its requests were drawn, and a row for each metric."""

    name: str
    method: str
    rows: list[dict[str, object]]
    notes: list[str]


def render(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    """Make the page."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    told = {run.name: list(run.warnings) for run in runs}
    timeline = [*scaling_charts(runs, told), *run_charts.timeline_charts(runs, told)] if runs else []
    names = [*(run.name for run in runs), *(sweep.name for sweep in sweeps)]
    shown = {run.name: cut(run.name) if len(names) > 1 else "" for run in runs}
    warnings = [(shown[name], cut(text, 600)) for name, texts in told.items() for text in texts]
    for run in runs:
        if num_failed := int(run.requests.failed.sum()):
            share = f"{num_failed:,} of {len(run.requests):,} requests failed ({num_failed / len(run.requests):.1%})"
            warnings.append((shown[run.name], f"{share}: latencies are of the others alone"))
    empty = "the run has no request: nothing was sent, or it was ended before"
    warnings += [(shown[run.name], empty) for run in runs if not len(run.requests)]
    return environment.get_template(
        "page.html"
    ).render(
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704  our own
        js=Markup((_HERE / "page.js").read_text(encoding="utf-8")),  # noqa: S704  our own
        version=VERSION,
        title=" against ".join(cut(name, 40) for name in names[:3])
        + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        beside=headline(runs[0]) if len(names) == 1 and runs else "",
        warnings=warnings,
        runs=runs,
        legend=[chart.swatch(cut(run.name), style) for style, run in enumerate(runs)] if len(runs) > 1 else [],
        facts=[(cut(run.name), facts(run), run_tables.tiles(run)) for run in runs],
        differing=_differing(runs),
        comparisons=[_comparison(runs[0], other) for other in runs[1:]],
        latency=run_charts.latency_charts(runs),
        latency_table=run_tables.latency_table(runs),
        lengths=run_charts.length_charts(runs),
        phases=run_charts.phase_blocks(runs),
        timeline=timeline,
        groups=[(cut(run.name), run_tables.group_tables(run, len(runs))) for run in runs],
        failures=[(cut(run.name), run_tables.failure_table(run)) for run in runs],
        options=_all_options(runs),
        formulas=next((list(run.part("formulas").items()) for run in runs if run.part("formulas")), []),
        sweeps=[sweep_section(sweep) for sweep in sweeps],
    )


def _differing(runs: Sequence[Run]) -> Table | None:
    if len(runs) < 2:
        return None
    columns = [Column("setting", text=True), *(Column(cut(run.name), text=True) for run in runs)]
    return Table("", columns, [[key, *values] for key, values in differing(runs)])


def _all_options(runs: Sequence[Run]) -> Table:
    each = [options_of(run) for run in runs]
    keys = dict.fromkeys(key for one in each for key in one)
    columns = [Column("option or setting", text=True), *(Column(cut(run.name), text=True) for run in runs)]
    return Table("", columns, [[key, *(cut(one.get(key, ""), 120) for one in each)] for key in keys])


def _comparison(base: Run, other: Run) -> _Comparison:
    compared = compare(base.requests, other.requests)
    differences = compared.differences
    shares = [_relative(one, bound) for one in differences for bound in (one.low, one.high)]
    limit = min(1.0, max((abs(one) for one in shares if math.isfinite(one)), default=0.0))
    rows = [_row(one, limit) for one in differences]
    notes = []
    if any(one.doubt == "drifts" for one in differences):
        notes.append(
            "+ drifts over the whole steady part, as with a queue that only grows, or a closed loop whose first wave is"
            " still felt: a longer run would have another figure. The interval takes the drift for chance, and is wide."
            " Run longer, or at a rate that the cluster keeps up with."
        )
    return _Comparison(cut(other.name), _method(compared), rows, notes)


def _method(compared: Comparison) -> str:
    """Say what was compared, and how."""
    if compared.same_requests:
        when = "at the same times" if compared.same_times else "at other times"
        how = f"the same requests {when}, compared in pairs"
    else:
        how = "different requests, compared as independent runs"
    if compared.parts is None:
        needed = LEAST_E2E + 2 * LEFT_OUT_E2E
        return (
            f"{how}; figures are of the whole runs, and there is no interval: one of them sends for less than"
            f" {needed:g} mean E2E times, of which ramp-up and drain take {2 * LEFT_OUT_E2E:g}. Run longer"
        )
    first, second = (_span(one) for one in compared.parts)
    spans = first if first == second else f"{first}, in the other run from {second}"
    return (
        f"{how}; figures are of requests sent from {spans}: {LEFT_OUT_E2E:g} mean E2E times at either end are left out,"
        " as ramp-up and drain. Failures are counted in the whole runs"
    )


def _span(part: Steady) -> str:
    return f"{chart.seconds(part.first)} to {chart.seconds(part.last)}"


def _relative(one: Difference, value: float) -> float:
    return value / one.base if one.base else math.nan


def _row(one: Difference, limit: float) -> dict[str, object]:
    change = one.other - one.base
    shown = _relative(one, change)
    better = (
        ""
        if one.verdict not in ("lower", "higher")
        else "better"
        if (one.verdict == "lower") == one.less_is_better
        else "worse"
    )
    known = math.isfinite(one.low)
    return {
        "name": one.name,
        "base": _value(one, one.base),
        "other": _value(one, one.other),
        "change": _signed(one, change),
        "share": f"{shown:+.1%}" if math.isfinite(shown) else "",
        "interval": f"{_signed(one, one.low)} to {_signed(one, one.high)}" if known else "",
        "drawing": chart.interval(_relative(one, one.low), shown, _relative(one, one.high), limit)
        if known and math.isfinite(shown)
        else "",
        "verdict": one.verdict or one.doubt,
        "drifts": one.doubt == "drifts",
        "class": better or ("noise" if one.verdict in ("within noise", "equal") else "untold"),
        "better": better,
    }


def _value(one: Difference, value: float) -> str:
    if one.unit == "s":
        return chart.seconds(value)
    return f"{chart.number(value)} %" if one.unit == "%" and math.isfinite(value) else chart.number(value)


def _signed(one: Difference, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{'+' if value > 0 else ''}{_value(one, value)}"
