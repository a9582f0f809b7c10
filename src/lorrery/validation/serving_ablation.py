"""The effect of each cause: the errors of served runs with it and without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lorrery.validation.errors import Errors, percent
from lorrery.validation.serving import ServingComparison, ServingGroup, Watch, grouped, predict_all
from lorrery.validation.serving_causes import CAUSES, without
from lorrery.validation.serving_rows import DOUBTFUL, OK
from lorrery.validation.serving_run import Options
from lorrery.view.terminal import FigureTable


@dataclass(frozen=True, slots=True)
class Ablated:
    """Rows without a cause.

    Attributes:
        cause: its name.
        before: a group's errors with it.
        after: its errors without it.
        num_changed: rows with a different prediction.
    """

    cause: str
    before: ServingGroup
    after: ServingGroup
    num_changed: int


def ablate(
    comparison: ServingComparison, causes: Sequence[str], group_by: Sequence[str], options: Options, *, jobs: int,
    watch: Watch = lambda found, total: found,
) -> list[Ablated]:  # fmt: skip
    """Simulate the rows of a comparison again without each cause.

    Args:
        comparison: with all causes.
        causes: names.
        group_by: columns.
        options: as for the comparison.
        jobs: processes.
        watch: as for `serving.compare`.

    Returns:
        For each cause each group in which it changes anything, and then all rows that count. Rows that cannot be
        simulated without it, or with it, are left out on both sides.
    """
    file, before = comparison.file, comparison.predictions
    rows = [i for i, one in enumerate(before) if not one.why and not file.rows[i].quality.startswith(DOUBTFUL)]
    with TemporaryDirectory() as folder:
        runs = [
            (file.rows[index], chosen)
            for cause in causes
            for chosen in [without(cause, options, Path(folder))]
            for index in rows
        ]
        found = predict_all(runs, jobs=jobs, watch=watch)
    ablated: list[Ablated] = []
    for number, cause in enumerate(causes):
        after = dict(zip(rows, found[number * len(rows) : (number + 1) * len(rows)], strict=True))
        both = [index for index, one in after.items() if not one.why]
        changed = {index for index in both if after[index] != before[index]}
        for columns in (group_by, ()):
            for members in grouped(file, both, columns):
                num_changed = len(changed.intersection(members.indices))
                if num_changed or (not columns and members.quality == OK):
                    ablated.append(Ablated(cause, members.errors(before), members.errors(after), num_changed))
    return ablated


def render(ablated: Sequence[Ablated], *, groups: bool) -> FigureTable:
    """Return them as a table; `groups`: include each group, not just all rows of a quality."""
    shown = [one for one in ablated if groups or not one.before.key]
    keys = list(dict.fromkeys(name for one in shown for name in one.before.key))
    table = FigureTable(first_to_go=("changed",))
    table.add_column("without", justify="left", wraps_at=12)
    for name in keys:
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "changed", "TPOT MAPE %", "without it", "TTFT MAPE %", "without it "):
        table.add_column(name)
    table.add_column("", justify="left", wraps_at=8)
    for one in shown:
        names = [one.before.key.get(name, "") for name in keys]
        if keys and not one.before.key:
            names[0] = "all"
        table.add_row(
            one.cause, *names, f"{one.before.num_rows:,}", f"{one.num_changed:,}",
            *_figures(one.before.tpot, one.after.tpot), *_figures(one.before.ttft, one.after.ttft),
            "" if one.before.quality == OK else one.before.quality,
        )  # fmt: skip
    return table


def legend(causes: Sequence[str]) -> list[str]:
    """Describe what is left out under each name."""
    width = max(map(len, causes))
    return [f"{name:<{width}}  {CAUSES[name].left_out}" for name in causes]


def to_json(ablated: Sequence[Ablated]) -> list[dict[str, object]]:
    """Return them for JSON."""
    return [
        {
            "without": one.cause,
            "group": dict(one.before.key),
            "quality": one.before.quality,
            "rows": one.before.num_rows,
            "rows_changed": one.num_changed,
            "tpot_mape": one.before.tpot.mape,
            "tpot_mape_without": one.after.tpot.mape,
            "ttft_rows": one.before.ttft.num_rows,
            "ttft_mape": one.before.ttft.mape,
            "ttft_mape_without": one.after.ttft.mape,
        }
        for one in ablated
    ]


def _figures(before: Errors, after: Errors) -> tuple[str, str]:
    return percent(before.mape), percent(after.mape)
