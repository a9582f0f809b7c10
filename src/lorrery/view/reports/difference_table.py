"""The table of the differences of two runs, with sentences on how they were obtained."""

import math
from dataclasses import dataclass

from lorrery.view.reports import chart
from lorrery.view.reports.compare import Comparison, Difference, Short, compare
from lorrery.view.reports.read import Run
from lorrery.view.reports.spread import LEAST_LIVES, LEFT_OUT_LIVES, Steady
from lorrery.view.reports.tables import cut

__all__ = ["Differences", "compared"]

_MOSTLY = 0.5
"""Share of an E2E time in the queue above which longer runs would only have longer queues."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The other run of a comparison, how requests were matched, a row for each metric, and remarks."""

    name: str
    method: str
    rows: list[dict[str, object]]
    notes: list[str]


def compared(base: Run, other: Run) -> Differences:
    """Compare two runs."""
    found = compare(base.requests, other.requests)
    differences = found.differences
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
    if found.parts is not None and (with_faults := [one.name for one in (base, other) if _has_faults(one)]):
        notes.append(
            f"{cut(' and '.join(with_faults), 80)} had faults. Each came once, and one run does not say how far another"
            " would differ: intervals take what it did for chance that comes again, and may be too wide or too narrow."
            " The timeline shows what it did; seeds and other times of the fault show how that varies."
        )
    if found.short is not None:
        names = base.name, other.name
        notes.append(_why_short(found.short, names, rest=found.served is not None))
    return Differences(cut(other.name), _method(found), rows, notes)


def _has_faults(run: Run) -> bool:
    return bool(run.part("simulation").get("events"))


def _method(found: Comparison) -> str:
    """Describe what was compared, and how."""
    if found.same_requests:
        when = "at the same times" if found.same_times else "at other times"
        how = f"the same requests {when}, compared in pairs"
    else:
        how = "different requests, compared as independent runs"
    left_out = f"{LEFT_OUT_LIVES:g} mean E2E times at either end are left out, as ramp-up and drain"
    if found.parts is not None:
        return (
            f"{how}; figures are of requests sent from {_spans(found.parts)}: {left_out}. Failures are counted in the"
            " whole runs"
        )
    if found.served is not None:
        return (
            f"{how}; tokens/s and TPOT are of requests that had their first token from {_spans(found.served)}:"
            f" {left_out}, without the time in the queue. Other figures are of the whole runs"
        )
    return f"{how}; figures are of the whole runs"


def _spans(parts: tuple[Steady, Steady]) -> str:
    first, second = (f"{chart.seconds(one.first)} to {chart.seconds(one.last)}" for one in parts)
    return first if first == second else f"{first}, in the other run from {second}"


def _why_short(short: Short, names: tuple[str, str], *, rest: bool) -> str:
    """Describe why there is no interval, what length would suffice, and what can be said nevertheless."""
    needed = LEAST_LIVES + 2 * LEFT_OUT_LIVES
    text = (
        f"{'The other figures have' if rest else 'There is'} no interval: {cut(names[short.which])} sends for"
        f" {chart.seconds(short.sends_seconds)}, {short.sends_seconds / short.e2e:.1f} mean E2E times of"
        f" {chart.seconds(short.e2e)}; it takes {needed:g}, of which ramp-up and drain take {2 * LEFT_OUT_LIVES:g}. "
    )
    if short.queue_share > _MOSTLY:
        text += f"Requests wait for {short.queue_share:.0%} of that time: use a rate that the cluster keeps up with."
    else:
        text += f"Run for {chart.seconds(needed * short.e2e)} or more."
    if short.num_pairs:
        text += (
            f" Of {short.num_pairs:,} requests that both completed, {short.num_slower:,} took longer in"
            f" {cut(names[1])} and {short.num_faster:,} took less: of these requests, not of others."
        )
    return text


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
