"""`lorrery validate lora`: published runs with adapters, each simulated with its command, against what it measured.

A row says how its server was started (engine and version, GPU, flags) and loaded: a closed loop of `c` clients, `rate`
requests per second, or all requests at once. Lengths are `fixed`, `uniform` up to a largest, or ShareGPT's
(lognormal, as fitted to its conversations). Requests are spread evenly over the adapters. A row measures any of the
output tokens per second, and mean and percentiles of TTFT, TPOT and E2E. Rows of one `pair` differ in their adapters
alone: what each measured over what the one with the fewest adapters did is compared as well.

Arrivals and lengths of a row with a rate are drawn anew eight times, and its figures are means over these runs: of 200
requests one run alone says little.
"""

import ast
import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import FormatError, LorreryError
from lorrery.service.files.reading import open_csv
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.presets import nearest
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.validation.figures import Errors, NotPredicted, percent, reasons, reasons_json, sum_up
from lorrery.validation.serving import in_processes
from lorrery.validation.serving_plot import Points, draw_panels
from lorrery.validation.serving_rows import ADAPTER_PROJECTIONS, Cells
from lorrery.validation.serving_run import ADAPTER, AS_IT_IS, OTHER, PS_PER_MS, Options, played, reason
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.files import repeated
from lorrery.vocabulary.units import PS_PER_SECOND

Watch = Callable[[Iterable["LoraPrediction"], int], Iterable["LoraPrediction"]]

_NEEDED = ("engine", "model", "gpu", "weight", "tp", "n", "in_dist", "in_mean", "out_mean", "adapters", "rank")
_DISTRIBUTIONS: Final = ("fixed", "uniform", "sharegpt_in")
_NO_GRAPHS = {"--enforce-eager", "--disable-cuda-graph"}
_MOST, _MOST_TOKENS, _MOST_ADAPTERS, _MOST_RANK = 1_000_000, 10_000_000, 4096, 1024
_DRAWS = 8
RATIO: Final = "ratio"
"""Kind under which a pair's ratio is shown."""
QUANTITIES: Final = {"out_tps": "tokens/s", "ttft": "TTFT (ms)", "tpot": "TPOT (ms)", "e2e": "E2E (ms)"}
"""Measured quantities; a column is `m_` and one of these, with `_pN` for a percentile in place of the mean. Others are
not read."""
_MEASURED: Final = re.compile(rf"m_((?:{'|'.join(QUANTITIES)})(?:_p(?:100|\d\d?(?:\.\d+)?))?)")
# Of ShareGPT's prompts and answers: sigma, least and most tokens.
_SHAREGPT: Final = ((1.3, 4, 1024), (1.05, 4, 1400))


@dataclass(frozen=True, slots=True)
class LoraRow:
    """One run.

    Attributes:
        line: in the file.
        cells: the columns unchanged.
        kind: what it shows: `base`, `lora`, `thrash`, `load`.
        pair: of rows that differ in their adapters alone; empty: none.
        version: of the engine; empty: the newest.
        clients: of a closed loop; None: none.
        rate: requests per second; None, without clients either: all at once.
        lengths: mean and most prompt tokens, and of output tokens; 0: the distribution's own.
        flags: settings that its command implies.
        measured: by quantity and percentile, `e2e_p90`.
    """

    line: int
    cells: Mapping[str, str]
    kind: str
    pair: str
    engine: str
    version: str
    num_requests: int
    clients: int | None
    rate: float | None
    distribution: str
    lengths: tuple[tuple[float, int], tuple[float, int]]
    adapters: int
    flags: Mapping[str, Any]
    measured: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, str]:
        """Its group: engine, GPU and kind."""
        return self.cells["engine"].strip(), self.cells["gpu"].strip(), self.kind


@dataclass(frozen=True, slots=True)
class LoraPrediction:
    """The simulator's figures for a row, by the names of `LoraRow.measured`; or why there are none."""

    figures: Mapping[str, float]
    why: str = ""


@dataclass(frozen=True, slots=True)
class LoraComparison:
    """Result for a file.

    Attributes:
        errors: by engine, GPU, kind and figure, in percent; above 0 the simulator's figure is the larger.
    """

    columns: Sequence[str]
    rows: Sequence[LoraRow]
    predictions: Sequence[LoraPrediction]
    errors: Mapping[tuple[str, str, str, str], Errors]
    not_predicted: Sequence[NotPredicted]


def read_file(path: Path) -> tuple[Sequence[str], Sequence[LoraRow]]:
    """Read a CSV file of runs; return its columns and rows.

    Raises:
        FormatError: an unreadable file, a missing column, or an invalid cell; names line and column.
    """
    with open_csv(path, FormatError, FormatError) as file:
        reader = csv.DictReader(file, restval="", strict=True)
        columns = list(reader.fieldnames or ())
        if missing := [name for name in _NEEDED if name not in columns]:
            raise FormatError(
                f"line 1: no column {', '.join(missing)}; validate lora reads runs as docs/validation.md describes them"
            )
        if twice := repeated(columns):
            raise FormatError(f"line 1: column {twice} is there twice; keep one")
        rows = [_row(Cells(reader.line_num, cells)) for cells in reader]
    if not rows:
        raise FormatError(f"{path}: a header and no rows")
    return columns, rows


def _row(cells: Cells) -> LoraRow:
    engine, _, version = cells.name("engine").partition("-")
    adapters = cells.count_or("adapters", _MOST_ADAPTERS, 0)
    measured = {
        found[1]: cells.number(name)
        for name, text in cells.texts.items()
        if (found := _MEASURED.fullmatch(name)) and text.strip()
    }
    distribution = cells.one_of("in_dist", _DISTRIBUTIONS)
    prompts, outputs = (_mean_and_most(cells, side, distribution) for side in ("in", "out"))
    return LoraRow(
        line=cells.line,
        cells=cells.texts,
        kind=cells.text("kind", "lora" if adapters else "base"),
        pair=cells.text("pair"),
        engine=engine,
        version=version,
        num_requests=cells.count("n", _MOST),
        clients=cells.any_count("c", _MOST),
        rate=cells.number("rate") if cells.text("rate") else None,
        distribution=distribution,
        lengths=(prompts, outputs),
        adapters=adapters,
        flags=_flags(cells, adapters),
        measured=measured,
    )


def _mean_and_most(cells: Cells, side: str, distribution: str) -> tuple[float, int]:
    mean, most = cells.number(f"{side}_mean", _MOST_TOKENS), cells.count_or(f"{side}_max", _MOST_TOKENS, 0)
    if distribution == "uniform" and most < mean:
        raise FormatError(
            f"line {cells.line}: {side}_max is {cells.text(f'{side}_max')!r}; lengths that are uniform up to it have a"
            f" mean of at most that, and {side}_mean is {mean:g}"
        )
    return mean, most


def _flags(cells: Cells, adapters: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "model": cells.name("model"),
        "worker.gpu": cells.name("gpu"),
        "worker.tensor_parallel": cells.count("tp", 1024),
        "worker.weight_dtype": cells.name("weight"),
        **OTHER.flags,
    }
    if adapters:
        rank = cells.count("rank", _MOST_RANK)
        flags["adapters.max_lora_rank"] = cells.count_or("max_rank", _MOST_RANK, rank)
        for column, name in (("max_loras", "max_loras"), ("max_cpu", "max_cpu_loras")):
            if cells.text(column):
                flags[f"adapters.{name}"] = cells.count(column, _MOST_ADAPTERS)
        flags["adapters.registry"] = [{"id": ADAPTER, "rank": rank, "count": adapters}]
        flags["adapters.target_modules"] = cells.one_of("target_modules", ADAPTER_PROJECTIONS[::-1])
    if _NO_GRAPHS & set(cells.text("cmd").split()):
        flags["worker.enforce_eager"] = True
    return flags | _sets(cells)


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


def predict(row: LoraRow, options: Options) -> LoraPrediction:
    """Simulate a row."""
    runs = _DRAWS if row.rate is not None else 1
    found: list[dict[str, float]] = []
    try:
        settings = settings_of(row, options)
        for run in range(runs):
            ended = played(settings, requests_of(row, options.seed * _DRAWS + run), row.clients)
            found.append({name: _figure(ended, name) for name in row.measured})
    except LorreryError as error:
        return LoraPrediction({}, reason(error))
    return LoraPrediction({name: float(np.mean([one[name] for one in found])) for name in row.measured})


def settings_of(row: LoraRow, options: Options = AS_IT_IS) -> Settings:
    """Return the settings of the row's server.

    Raises:
        SettingsError: an unknown engine, GPU, model or type, or an invalid combination.
    """
    overrides = {"engine": nearest(row.engine, row.version).name, **row.flags}
    if options.catalogue:
        overrides["catalogue"] = options.catalogue
    return changed(changed({}, overrides), options.overrides)


def requests_of(row: LoraRow, seed: int) -> Requests:
    """Return the row's requests."""
    rng, number = np.random.default_rng(seed), row.num_requests
    prompts, outputs = (
        _lengths(row.distribution, mean, most, sharegpt, number, rng)
        for (mean, most), sharegpt in zip(row.lengths, _SHAREGPT, strict=True)
    )
    gaps = np.zeros(number) if row.rate is None else rng.exponential(1 / row.rate, number)
    names = [f"{ADAPTER}-{one}" for one in rng.permutation(number) % row.adapters] if row.adapters else None
    return Requests(np.cumsum(gaps), prompts, outputs, names)


def _lengths(
    distribution: str, mean: float, most: int, sharegpt: tuple[float, int, int], number: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    if distribution == "fixed":
        return np.full(number, round(mean))
    if distribution == "uniform":
        return rng.integers(max(round(2 * mean) - most, 1), most, number, endpoint=True)
    sigma, least, largest = sharegpt
    drawn, scale = rng.lognormal(0, sigma, number), mean
    lengths = drawn
    for _ in range(20):  # of what is cut off the mean is that of the file
        lengths = np.clip(drawn * scale, least, largest)
        scale *= mean / lengths.mean()
    return lengths.astype(np.int64)


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
    rows: Sequence[LoraRow],
    options: Options = AS_IT_IS,
    *,
    jobs: int = 1,
    watch: Watch = lambda found, total: found,
) -> LoraComparison:
    """Compare the simulator with measured runs.

    Args:
        columns: of the file.
        rows: measured runs.
        options: of every simulation.
        jobs: processes.
        watch: as for `serving.compare`.
    """
    found = in_processes(
        predict, [(row, options) for row in rows], [row.num_requests for row in rows], jobs=jobs, watch=watch
    )
    errors: dict[tuple[str, str, str, str], list[float]] = {}
    for row, one in zip(rows, found, strict=True):
        for name, value in one.figures.items():
            errors.setdefault((*row.key, name), []).append((value / row.measured[name] - 1) * 100)
    for row, name, measured, predicted in ratios(rows, found):
        errors.setdefault((*row.key[:2], RATIO, name), []).append((predicted / measured - 1) * 100)
    left_out = reasons((row.line, one.why) for row, one in zip(rows, found, strict=True))
    summed = {key: sum_up(values) for key, values in errors.items()}
    return LoraComparison(columns, rows, found, summed, left_out)


def ratios(rows: Sequence[LoraRow], found: Sequence[LoraPrediction]) -> Iterable[tuple[LoraRow, str, float, float]]:
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


def render(comparison: LoraComparison) -> FigureTable:
    """Return the errors as a table."""
    table = FigureTable()
    for name in ("engine", "GPU", "kind", "figure"):
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "mean error %", "median %"):
        table.add_column(name)
    for key, errors in sorted(comparison.errors.items(), key=lambda one: (one[0][0], one[0][1], one[0][2] == RATIO)):
        table.add_row(*key, f"{errors.num_rows:,}", percent(errors.mape), percent(errors.median, "+"))
    return table


def to_json(comparison: LoraComparison) -> str:
    """Return `{"rows": [the row's columns + predicted: {figure: value}], "groups": [...], "not_predicted": [...]}`."""
    content = {
        "rows": [
            {**{name: row.cells[name] for name in comparison.columns}, "predicted": _rounded(one.figures)}
            for row, one in zip(comparison.rows, comparison.predictions, strict=True)
        ],
        "groups": [
            {**dict(zip(("engine", "gpu", "kind", "figure"), key, strict=True)), "rows": errors.num_rows}
            | {"mape": errors.mape, "signed_median": errors.median}
            for key, errors in comparison.errors.items()
        ],
        "not_predicted": reasons_json(comparison.not_predicted),
    }
    return json.dumps(content, allow_nan=False, indent=1) + "\n"


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in figures.items()}


def draw(path: Path, comparison: LoraComparison) -> None:
    """Write a figure of predicted against measured, a panel per engine, GPU and kind.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    shown = {
        name: label
        for name, label in QUANTITIES.items()
        if any(key[3].partition("_p")[0] == name for key in comparison.errors)
    }
    panels: dict[tuple[str, str, str], Points] = {}
    for row, one in zip(comparison.rows, comparison.predictions, strict=True):
        for name, value in one.figures.items():
            points = panels.setdefault(row.key, {label: [] for label in shown.values()})
            points[shown[name.partition("_p")[0]]].append((row.measured[name], value))
    titled = [(f"{kind}\n{engine}, {gpu}", points) for (engine, gpu, kind), points in panels.items()]
    caption = "Each mark is a figure of a run: a mean or a percentile. Solid: equal; dashed: 20 % off."
    draw_panels(path, titled, "", caption)
