"""`lorrery validate serving` and `lora`: runs that people posted, each simulated with its command.

A row says how its server was started (engine and version, GPU, flags) and loaded: a closed loop of `c` clients, `rate`
requests per second, or all requests at once. Lengths are `fixed`, `uniform` up to a largest, ShareGPT's (lognormal, as
fitted to its conversations), or those of a `trace` beside the file. Requests are spread evenly over the adapters. A row
measures any of the output tokens per second, and mean and percentiles of TTFT, TPOT and E2E. Rows of one `pair` differ
in their adapters alone: what each measured over what the one with the fewest adapters did is compared as well. Rows
marked `fitted` were seen when constants were chosen, and are told from the others.

Arrivals and lengths of a row with a rate are drawn anew eight times, and its figures are means over these runs: of 200
requests one run alone says little.
"""

import ast
import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.service.files.reading import open_csv
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.presets import nearest
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.validation.figures import Errors, NotPredicted, percent, reasons, reasons_json, sum_up
from lorrery.validation.serving import in_processes
from lorrery.validation.serving_plot import Points, draw_panels
from lorrery.validation.serving_rows import ADAPTER_PROJECTIONS, OK, Cells
from lorrery.validation.serving_run import ADAPTER, AS_IT_IS, PS_PER_MS, Options, played, reason
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.files import repeated
from lorrery.vocabulary.units import PS_PER_SECOND

Watch = Callable[[Iterable["PostedPrediction"], int], Iterable["PostedPrediction"]]

_NEEDED = ("engine", "model", "gpu", "weight", "tp", "n", "in_dist", "in_mean", "out_mean")
GROUPED_BY: Final = ("engine", "gpu", "weight")
ADAPTERS_GROUPED_BY: Final = ("engine", "gpu", "kind")
_TRACE: Final = "trace"
_DISTRIBUTIONS: Final = ("fixed", "uniform", "sharegpt_in", "sharegpt_out", _TRACE)
_IMPLIED: Final[Sequence[tuple[set[str], str, object]]] = (
    ({"--enforce-eager", "--disable-cuda-graph"}, "worker.enforce_eager", True),
    ({"--no-enable-prefix-caching", "--disable-radix-cache"}, "scheduler.prefix_cache.kind", "none"),
    ({"trtllm-bench", "offline"}, "worker.api_server_count", 0),
)
"""Words of a command -> what they set."""
_MOST, _MOST_TOKENS, _MOST_ADAPTERS, _MOST_RANK = 1_000_000, 10_000_000, 4096, 1024
_DRAWS = 8
RATIO: Final = "ratio"
"""Kind under which a pair's ratio is shown."""
QUANTITIES: Final = {"out_tps": "tokens/s", "ttft": "TTFT (ms)", "tpot": "TPOT (ms)", "e2e": "E2E (ms)"}
"""Measured quantities; a column is `m_` and one of these, with `_pN` for a percentile in place of the mean. Others are
not read."""
_MEASURED: Final = re.compile(rf"m_((?:{'|'.join(QUANTITIES)})(?:_p(?:100|\d\d?(?:\.\d+)?))?)")
_SHAREGPT: Final = {"in": (1.3, 4, 1024), "out": (1.05, 4, 1400)}
"""Of ShareGPT's prompts and answers: sigma, least and most tokens."""


@dataclass(frozen=True, slots=True)
class PostedRow:
    """One run.

    Attributes:
        line: in the file.
        cells: the columns unchanged, `kind` filled in.
        quality: `ok`, or why it does not count.
        fitted: whether constants were chosen on it.
        pair: of rows that differ in their adapters alone; empty: none.
        version: of the engine; empty: the newest.
        clients: of a closed loop; None: none.
        rate: requests per second; None, without clients either: all at once.
        lengths: distribution, mean and most prompt tokens, and of output tokens; a most of 0: the distribution's own.
        trace: arrivals and lengths; None: drawn.
        flags: settings that its command implies.
        measured: by quantity and percentile, `e2e_p90`.
    """

    line: int
    cells: Mapping[str, str]
    quality: str
    fitted: bool
    pair: str
    engine: str
    version: str
    num_requests: int
    clients: int | None
    rate: float | None
    lengths: tuple[tuple[str, float, int], tuple[str, float, int]]
    trace: Path | None
    adapters: int
    flags: Mapping[str, Any]
    measured: Mapping[str, float]

    def key(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return its group: its cells in some columns."""
        return tuple(self.cells.get(name, "").strip() for name in columns)


@dataclass(frozen=True, slots=True)
class PostedPrediction:
    """The simulator's figures for a row, by the names of `PostedRow.measured`; or why there are none."""

    figures: Mapping[str, float]
    why: str = ""


@dataclass(frozen=True, slots=True)
class PostedGroup:
    """Errors of a group's figure, in percent; above 0 the simulator's figure is the larger.

    Attributes:
        key: column -> value; empty: of all rows that count.
        figure: by the names of `PostedRow.measured`.
        quality: of its rows.
        errors: of all its rows.
        fitted: of those that constants were chosen on.
        others: of the rest.
    """

    key: Mapping[str, str]
    figure: str
    quality: str
    errors: Errors
    fitted: Errors
    others: Errors


@dataclass(frozen=True, slots=True)
class PostedComparison:
    """Result for a file.

    Attributes:
        groups: those of quality ok first, and the figures of all of these last.
    """

    columns: Sequence[str]
    rows: Sequence[PostedRow]
    predictions: Sequence[PostedPrediction]
    groups: Sequence[PostedGroup]
    not_predicted: Sequence[NotPredicted]


def is_posted(path: Path) -> bool:
    """Return whether a file has runs of this kind, to judge by its header.

    Raises:
        FormatError: an unreadable file.
    """
    with open_csv(path, FormatError, FormatError) as file:
        return "engine" in next(csv.reader(file), ())


def read_file(path: Path) -> tuple[Sequence[str], Sequence[PostedRow]]:
    """Read a CSV file of runs; return its columns and rows.

    Raises:
        FormatError: an unreadable file, a missing column, or an invalid cell; names line and column.
    """
    with open_csv(path, FormatError, FormatError) as file:
        reader = csv.DictReader(file, restval="", strict=True)
        columns = list(reader.fieldnames or ())
        if missing := [name for name in _NEEDED if name not in columns]:
            raise FormatError(
                f"line 1: no column {', '.join(missing)}; posted runs are read as docs/validation.md describes them"
            )
        if twice := repeated(columns):
            raise FormatError(f"line 1: column {twice} is there twice; keep one")
        rows = [_row(Cells(reader.line_num, cells), path.parent) for cells in reader]
    if not rows:
        raise FormatError(f"{path}: a header and no rows")
    return columns, rows


def _row(cells: Cells, folder: Path) -> PostedRow:
    engine, _, version = cells.name("engine").partition("-")
    adapters = cells.count_or("adapters", _MOST_ADAPTERS, 0)
    measured = {
        found[1]: cells.number(name)
        for name, text in cells.texts.items()
        if (found := _MEASURED.fullmatch(name)) and text.strip()
    }
    prompts = _lengths_of(cells, "in", cells.one_of("in_dist", _DISTRIBUTIONS))
    outputs = _lengths_of(
        cells, "out", cells.one_of("out_dist", _DISTRIBUTIONS) if cells.text("out_dist") else prompts[0]
    )
    trace = None
    if _TRACE in (prompts[0], outputs[0]):
        name = "_".join(cells.text(column) for column in ("source", "gpu", "model"))
        trace = folder / f"served_{name}_tp{cells.text('tp')}.jsonl"
    return PostedRow(
        line=cells.line,
        cells={**cells.texts, "kind": cells.text("kind", "lora" if adapters else "base")},
        quality=cells.text("quality", OK),
        fitted=bool(cells.text("fitted")),
        pair=cells.text("pair"),
        engine=engine,
        version=version,
        num_requests=cells.count("n", _MOST),
        clients=cells.any_count("c", _MOST),
        rate=cells.number("rate") if cells.text("rate") else None,
        lengths=(prompts, outputs),
        trace=trace,
        adapters=adapters,
        flags=_flags(cells, adapters),
        measured=measured,
    )


def _lengths_of(cells: Cells, side: str, distribution: str) -> tuple[str, float, int]:
    mean, most = cells.number(f"{side}_mean", _MOST_TOKENS), cells.count_or(f"{side}_max", _MOST_TOKENS, 0)
    if distribution == "uniform" and most < mean:
        raise FormatError(
            f"line {cells.line}: {side}_max is {cells.text(f'{side}_max')!r}; lengths that are uniform up to it have a"
            f" mean of at most that, and {side}_mean is {mean:g}"
        )
    return distribution, mean, most


def _flags(cells: Cells, adapters: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "model": cells.name("model"),
        "worker.gpu": cells.name("gpu"),
        "worker.tensor_parallel": cells.count("tp", 1024),
        "worker.expert_parallel": cells.count_or("ep", 1024, 1),
        "worker.weight_dtype": cells.name("weight"),
    }
    if cells.text("kv"):
        flags["worker.kv_dtype"] = cells.text("kv")
    if adapters:
        rank = cells.count("rank", _MOST_RANK)
        flags["adapters.max_lora_rank"] = cells.count_or("max_rank", _MOST_RANK, rank)
        for column, name in (("max_loras", "max_loras"), ("max_cpu", "max_cpu_loras")):
            if cells.text(column):
                flags[f"adapters.{name}"] = cells.count(column, _MOST_ADAPTERS)
        flags["adapters.registry"] = [{"id": ADAPTER, "rank": rank, "count": adapters}]
        flags["adapters.target_modules"] = cells.one_of("target_modules", ADAPTER_PROJECTIONS[::-1])
    words = set(cells.text("cmd").split())
    return flags | {name: value for said, name, value in _IMPLIED if said & words} | _sets(cells)


def _sets(cells: Cells) -> dict[str, Any]:
    try:
        sets = ast.literal_eval(cells.text("sets", "{}"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # what it may raise, by its manual
        sets = None
    if not isinstance(sets, dict) or not all(isinstance(name, str) for name in sets):
        raise FormatError(
            f"line {cells.line}: sets is {cells.text('sets')!r}; it must be settings such as"
            " {'worker.gpu_memory_utilization': 0.92}"
        )
    return sets


def predict(row: PostedRow, options: Options) -> PostedPrediction:
    """Simulate a row."""
    runs = _DRAWS if row.rate is not None else 1
    found: list[dict[str, float]] = []
    try:
        settings = settings_of(row, options)
        for run in range(runs):
            ended = played(settings, requests_of(row, options.seed * _DRAWS + run), row.clients)
            found.append({name: _figure(ended, name) for name in row.measured})
    except LorreryError as error:
        return PostedPrediction({}, reason(error))
    return PostedPrediction({name: float(np.mean([one[name] for one in found])) for name in row.measured})


def settings_of(row: PostedRow, options: Options = AS_IT_IS) -> Settings:
    """Return the settings of the row's server.

    Raises:
        SettingsError: an unknown engine, GPU, model or type, or an invalid combination.
    """
    overrides = {"engine": nearest(row.engine, row.version).name, **row.flags}
    if options.catalogue:
        overrides["catalogue"] = options.catalogue
    return changed(changed({}, overrides), options.overrides)


def requests_of(row: PostedRow, seed: int) -> Requests:
    """Return the row's requests.

    Raises:
        FormatError: the row's trace cannot be read.
    """
    if row.trace is not None:
        return _traced(row.trace)
    rng, number = np.random.default_rng(seed), row.num_requests
    prompts, outputs = (
        _lengths(lengths, sharegpt, number, rng) for lengths, sharegpt in zip(row.lengths, ("in", "out"), strict=True)
    )
    gaps = np.zeros(number) if row.rate is None else rng.exponential(1 / row.rate, number)
    names = [f"{ADAPTER}-{one}" for one in rng.permutation(number) % row.adapters] if row.adapters else None
    return Requests(np.cumsum(gaps), prompts, outputs, names)


def _traced(path: Path) -> Requests:
    """Read arrivals and lengths, in Mooncake's form; nothing is shared between its prompts."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        columns = [[line[name] for line in lines] for name in ("timestamp", "input_length", "output_length")]
        return Requests(np.array(columns[0], np.float64) / 1000, columns[1], columns[2])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: {error}; expected the run's arrivals and lengths, in Mooncake's form") from None


def _lengths(lengths: tuple[str, float, int], side: str, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    distribution, mean, most = lengths
    if distribution == "fixed":
        return np.full(number, round(mean))
    if distribution == "uniform":
        return rng.integers(max(round(2 * mean) - most, 1), most, number, endpoint=True)
    sigma, least, largest = _SHAREGPT[side]
    drawn, scale = rng.lognormal(0, sigma, number), mean
    found = drawn
    for _ in range(20):  # of what is cut off the mean is that of the file
        found = np.clip(drawn * scale, least, largest)
        scale *= mean / found.mean()
    return found.astype(np.int64)


def _figure(ended: Sequence[SimulatedRequest], name: str) -> float:
    """Return a run's figure by the name of its column."""
    quantity, _, percentile = name.partition("_p")
    arrived, first, finished, tokens = (
        np.array(column, dtype=np.float64)
        for column in zip(
            *((one.arrived_ps, one.first_token_ps or 0, one.finished_ps or 0, one.output_tokens) for one in ended),
            strict=True,
        )
    )
    if quantity == "out_tps":
        return float(tokens.sum() * PS_PER_SECOND / (finished.max() - arrived.min()))
    times_ps = {
        "ttft": first - arrived,
        "tpot": (finished - first) / np.maximum(tokens - 1, 1),
        "e2e": finished - arrived,
    }[quantity]
    return float((np.percentile(times_ps, float(percentile)) if percentile else times_ps.mean()) / PS_PER_MS)


def compare(
    columns: Sequence[str],
    rows: Sequence[PostedRow],
    group_by: Sequence[str] = GROUPED_BY,
    options: Options = AS_IT_IS,
    *,
    jobs: int = 1,
    watch: Watch = lambda found, total: found,
) -> PostedComparison:
    """Compare the simulator with measured runs.

    Args:
        columns: of the file.
        rows: measured runs.
        group_by: columns, or `kind`.
        options: of every simulation.
        jobs: processes.
        watch: as for `serving.compare`.

    Raises:
        SettingsError: grouping by a column that the file does not have.
    """
    if unknown := [name for name in group_by if name not in (*columns, "kind")]:
        raise SettingsError(f"--group {', '.join(unknown)}: no such column; there are {', '.join(columns)}")
    found = in_processes(
        predict, [(row, options) for row in rows], [row.num_requests for row in rows], jobs=jobs, watch=watch
    )
    errors = [
        _Error(row.quality, row.key(group_by), name, row.fitted, (value / row.measured[name] - 1) * 100)
        for row, one in zip(rows, found, strict=True)
        for name, value in one.figures.items()
    ]
    overall = [error._replace(key=()) for error in errors if error.quality == OK] if group_by else []
    for row, name, measured, predicted in ratios(rows, found) if "kind" in group_by else ():
        key = [RATIO if column == "kind" else row.cells[column] for column in group_by]
        errors.append(_Error(row.quality, tuple(key), name, row.fitted, (predicted / measured - 1) * 100))
    groups = [
        _group(dict(zip(group_by, key, strict=bool(key))), figure, quality, list(members))
        for listed in (errors, overall)
        for (quality, key, figure), members in groupby(sorted(listed, key=_in_order), key=lambda one: one[:3])
    ]
    left_out = reasons((row.line, one.why) for row, one in zip(rows, found, strict=True))
    return PostedComparison(columns, rows, found, groups, left_out)


class _Error(NamedTuple):
    """Of one figure of a row, in percent."""

    quality: str
    key: tuple[str, ...]
    figure: str
    fitted: bool
    percent: float


def _in_order(error: _Error) -> tuple[bool, str, tuple[str, ...], int, str]:
    quantity = list(QUANTITIES).index(error.figure.partition("_p")[0])
    return error.quality != OK, error.quality, error.key, quantity, error.figure


def _group(key: Mapping[str, str], figure: str, quality: str, members: Sequence[_Error]) -> PostedGroup:
    every, fitted, others = (
        sum_up([error.percent for error in members if error.fitted in which])
        for which in ((True, False), (True,), (False,))
    )
    return PostedGroup(key, figure, quality, every, fitted, others)


def ratios(
    rows: Sequence[PostedRow], found: Sequence[PostedPrediction]
) -> Iterable[tuple[PostedRow, str, float, float]]:
    """Yield row, figure, and the measured and predicted figure over the mean of those of its pair's fewest adapters."""
    for pair in dict.fromkeys(row.pair for row in rows if row.pair):
        members = [(row, one) for row, one in zip(rows, found, strict=True) if row.pair == pair and not one.why]
        fewest = min((row.adapters for row, _ in members), default=0)
        bases = [(row, one) for row, one in members if row.adapters == fewest]
        for row, one in members:
            for name in one.figures:
                shared = [(base.measured[name], other.figures[name]) for base, other in bases if name in base.measured]
                if row.adapters > fewest and shared:
                    measured, predicted = np.mean(shared, axis=0)
                    yield row, name, row.measured[name] / measured, one.figures[name] / predicted


def render(comparison: PostedComparison, group_by: Sequence[str]) -> FigureTable:
    """Return the errors as a table."""
    table = FigureTable()
    for name in (*group_by, "figure"):
        table.add_column(name, justify="left", wraps_at=12)
    for name in ("rows", "mean error %", "median %"):
        table.add_column(name)
    apart = any(group.fitted.num_rows for group in comparison.groups)
    for name in ("fitted", "others") if apart else ():
        table.add_column(name)
    table.add_column("", justify="left", wraps_at=12)
    for group in comparison.groups:
        cells = [group.key.get(name, "") for name in group_by]
        if cells and not group.key:
            cells[0] = "all"
        errors = group.errors
        table.add_row(
            *cells, group.figure, f"{errors.num_rows:,}", percent(errors.mape), percent(errors.median, "+"),
            *((percent(group.fitted.mape), percent(group.others.mape)) if apart else ()),
            "" if group.quality == OK else group.quality.partition(":")[0],
        )  # fmt: skip
    return table


def to_json(comparison: PostedComparison) -> dict[str, object]:
    """Return `{"rows": [the row's columns + predicted: {figure: value}], "groups": [...], "not_predicted": [...]}`."""
    return {
        "rows": [
            {**{name: row.cells[name] for name in comparison.columns}, "predicted": _rounded(one.figures)}
            for row, one in zip(comparison.rows, comparison.predictions, strict=True)
        ],
        "groups": [
            {
                **group.key,
                "figure": group.figure,
                "quality": group.quality,
                "rows": group.errors.num_rows,
                "mape": group.errors.mape,
                "signed_median": group.errors.median,
                "fitted_rows": group.fitted.num_rows,
                "fitted_mape": group.fitted.mape,
                "others_mape": group.others.mape,
            }
            for group in comparison.groups
        ],
        "not_predicted": reasons_json(comparison.not_predicted),
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in figures.items()}


def draw(path: Path, comparison: PostedComparison, group_by: Sequence[str]) -> None:
    """Write a figure of predicted against measured, a panel per group.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    shown = {
        name: label
        for name, label in QUANTITIES.items()
        if any(group.figure.partition("_p")[0] == name for group in comparison.groups)
    }
    panels: dict[tuple[str, ...], Points] = {}
    for row, one in zip(comparison.rows, comparison.predictions, strict=True):
        for name, value in one.figures.items() if row.quality == OK else ():
            points = panels.setdefault(row.key(group_by), {label: [] for label in shown.values()})
            points[shown[name.partition("_p")[0]]].append((row.measured[name], value))
    titled = [(f"{last}\n{', '.join(others)}", points) for (*others, last), points in panels.items()]
    caption = "Each mark is a figure of a run: a mean or a percentile. Solid: equal; dashed: 20 % off."
    draw_panels(path, titled, "", caption)
