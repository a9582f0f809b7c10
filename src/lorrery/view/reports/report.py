"""`lorrery report` as a function: reads folders and renders one HTML page of runs and sweeps with `page.html`."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import write_whole
from lorrery.service.installed import VERSION
from lorrery.view.reports import chart, run_charts, tables
from lorrery.view.reports.difference_table import compared
from lorrery.view.reports.read import Run, read_folders
from lorrery.view.reports.sweep import Sweep
from lorrery.view.reports.sweep_section import sweep_section
from lorrery.view.reports.tables import Column, Table, cut, differing, facts, headline, options_of
from lorrery.vocabulary.files import REPORT_FILE

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
    runs, sweeps = read_folders(list(folders))
    content = render(runs, sweeps)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content.encode(errors="replace"))
    except OSError as error:
        raise LorreryError(f"{target}: {error.strerror}") from None


_HERE = Path(__file__).parent


def render(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    """Render the page."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    told = {run.name: list(run.warnings) for run in runs}
    timeline = [*run_charts.scaling_charts(runs, told), *run_charts.timeline_charts(runs, told)] if runs else []
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
