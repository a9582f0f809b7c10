"""`lorrery report` as a function: reads folders and renders one page of runs, sweeps and comparisons with `page.html`.

With the page comes the table of the differences of two runs, with sentences on how they were obtained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import write_whole
from lorrery.view.reports import chart, run_charts, tables
from lorrery.view.reports.arena import arena_section
from lorrery.view.reports.compare import Comparison, Difference, Short, compare
from lorrery.view.reports.frame import page
from lorrery.view.reports.read import Arena, Run, read_folders
from lorrery.view.reports.spread import LEAST_LIVES, LEFT_OUT_LIVES, Steady
from lorrery.view.reports.sweep import Sweep
from lorrery.view.reports.sweep_section import sweep_section
from lorrery.view.reports.tables import Column, Table, cut, differing, facts, headline, options_of
from lorrery.vocabulary.files import REPORT_FILE

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


__all__ = ["report", "write_page"]


def report(*folders: str | Path, file: str | Path | None = None) -> Path:
    """Make one page of runs and sweeps, as `lorrery report` does; return its path.

    Args:
        folders: written by `lorrery load --out`, `lorrery simulate --out` or `SimulationResult.write`. The first run is
            the baseline for comparisons.
        file: of the page; None: `report.html`, in the folder if there is one only, else in the current folder.

    Raises:
        LorreryError: no such run, or files that cannot be read or written; says what to do.
    """
    for given in folders if file is None else (*folders, file):
        if not isinstance(given, str | Path) or "\0" in str(given):
            raise SettingsError(f"{given!r} is not a path: give text or a Path")
    paths = [Path(folder) for folder in folders]
    for path in paths if file is None else (*paths, Path(file)):
        try:
            path.exists()
        except OSError as error:  # a name that no file can have
            raise SettingsError(f"{path}: {error.strerror}") from None
    if not paths:
        raise SettingsError("name a folder that `lorrery load --out` or `lorrery simulate --out` has written")
    if file is not None:
        target = Path(file)
    elif len(paths) == 1:
        target = (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE
    else:
        target = Path(REPORT_FILE)
    write_page(paths, target)
    return target


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write the page of some folders.

    Raises:
        LorreryError: as `report`.
    """
    if target.is_dir():
        raise SettingsError(f"{target} is a folder; name the page's file, such as {target / REPORT_FILE}")
    content = render(*read_folders(list(folders)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content.encode(errors="replace"))
    except OSError as error:
        raise LorreryError(f"{target}: {error.strerror}") from None


def render(runs: Sequence[Run], sweeps: Sequence[Sweep], arenas: Sequence[Arena] = ()) -> str:
    """Render the page."""
    told = {run.name: list(run.warnings) for run in runs}
    timeline = [*run_charts.scaling_charts(runs, told), *run_charts.timeline_charts(runs, told)] if runs else []
    names = [*(run.name for run in runs), *(sweep.name for sweep in sweeps), *(arena.name for arena in arenas)]
    shown = {run.name: cut(run.name) if len(names) > 1 else "" for run in runs}
    warnings = [(shown[name], cut(text, 600)) for name, texts in told.items() for text in texts]
    for run in runs:
        if num_failed := int(run.requests.failed.sum()):
            share = f"{num_failed:,} of {len(run.requests):,} requests failed ({num_failed / len(run.requests):.1%})"
            warnings.append((shown[run.name], f"{share}: latencies are of the others alone"))
    empty = "the run has no request: nothing was sent, or it was ended before"
    warnings += [(shown[run.name], empty) for run in runs if not len(run.requests)]
    return page(
        "page.html",
        kind="report",
        beside_it="The same figures for programs: summary.json and the CSV files beside it.",
        title=" against ".join(cut(name, 40) for name in names[:3])
        + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        beside=headline(runs[0]) if len(names) == 1 and runs else "",
        warnings=warnings,
        runs=runs,
        legend=[chart.swatch(cut(run.name), style) for style, run in enumerate(runs)] if len(runs) > 1 else [],
        facts=[(cut(run.name), facts(run), tables.tiles(run)) for run in runs],
        differing=_differing(runs),
        comparisons=[compared(runs[0], other) for other in runs[1:]],
        latency=run_charts.latency_charts(runs),
        latency_table=tables.latency_table(runs),
        lengths=run_charts.length_charts(runs),
        phases=run_charts.phase_blocks(runs),
        timeline=timeline,
        groups=[(cut(run.name), tables.group_tables(run, len(runs))) for run in runs],
        failures=[(cut(run.name), tables.failure_table(run)) for run in runs],
        options=_all_options(runs),
        formulas=next((list(run.part("formulas").items()) for run in runs if run.part("formulas")), []),
        sweeps=[sweep_section(sweep) for sweep in sweeps],
        arenas=[arena_section(arena) for arena in arenas],
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
