"""Replays S-LoRA's published runs, and compares the simulator's predictions with the measurements.

A row of the file is one experiment: workload (S-LoRA's generator, seed 42), GPU, base model, ranks, policy, KV pool. It
is run through the same core under the policy's strict mode and the device of the engine `s-lora`, under the virtual
clock; the figures are those that S-LoRA's own benchmark computes (`loadgen.workload.slora_summary`).
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich import box

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.slora import draw, generate_requests, slora_summary
from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.by_load import RoundRobin
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.errors import FormatError
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import adapter_bytes
from lorrery.worker.device.roofline import Roofline

POLICIES = {"slora": "req_queue", "cluster": "cluster", "abort": "abort", "peft": "peft"}
"""Modelled policies of the file -> ours."""
FIGURES = ("throughput", "latency", "first_token")
_COLUMNS = {"throughput": "throughput", "latency": "avg_latency", "first_token": "avg_first_token_latency"}
_NEEDED = (
    "experiment", "policy", "gpu", "setting", "base_model", "lora_ranks", "num_adapters", "alpha", "req_rate", "cv",
    "duration", "input_lo", "input_hi", "output_lo", "output_hi", *_COLUMNS.values(), "source_line",
    "max_total_token_num", "flags",
)  # fmt: skip
_GPUS = {"a10g": "A10G", "a100-40": "A100-40-SXM", "a100-80": "A100-80-SXM"}
ENGINES = {"a10g": "s-lora-a10g", "a100-40": "s-lora-a100", "a100-80": "s-lora-a100"}
SLOW_HOST = "s-lora-a100-slow-host"
"""For the cluster ablation, whose runs are slower than the GPU's others by a constant factor."""
THROUGHPUT_AIM, LATENCY_AIM = 0.03, 0.1
MAX_REQ_TOTAL_LEN = 3072
"""For every published run; S-LoRA's default."""
EXTRA_PROMPT_TOKENS = 2
"""The tokeniser adds the beginning of sequence and splits the prompt's last blank off (not verified)."""
LOADS = {"a10g": (2.63, 5.55), "a100-40": (1.92, 8.6), "a100-80": (1.92, 8.6)}
"""Load of an adapter from host memory: milliseconds, and GB/s; fitted with the engines."""
_PS_PER_MS = 10**9


@dataclass(frozen=True, slots=True)
class SloraRow:
    """One published run; its fields are the columns of the file."""

    policy: str
    gpu: str
    setting: str
    experiment: str
    source_line: int
    base_model: str
    ranks: tuple[int, ...]
    num_adapters: int
    alpha: float
    req_rate: float
    cv: float
    duration: float
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    pool_tokens: int
    measured: Mapping[str, float]

    @property
    def max_adapters(self) -> int:
        """The limit on adapters in a batch (cluster), from the experiment's name."""
        _, _, size = self.experiment.partition("size_")
        return int(size.partition("_")[0]) if size else 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row and the simulator's prediction.

    Attributes:
        predicted: by figure, requests/s and seconds.
        errors: by figure, predicted / measured - 1.
        num_dropped: requests that the policy dropped.
    """

    row: SloraRow
    predicted: Mapping[str, float]
    errors: Mapping[str, float]
    num_dropped: int


@dataclass(frozen=True, slots=True)
class NotModelled:
    """A row that is not evaluated, and why."""

    policy: str
    gpu: str
    experiment: str
    why: str


def read_rows(path: Path) -> tuple[list[SloraRow], list[NotModelled]]:
    """Read the file: the modelled rows, and the others.

    Raises:
        FormatError: an unreadable file, a missing column, or an invalid cell; names line and column.
    """
    rows: list[SloraRow] = []
    others: list[NotModelled] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            _check_columns(reader.fieldnames or ())
            for cells in reader:
                why = _why_not(cells)
                if why is None:
                    rows.append(_row(_Cells(reader.line_num, cells)))
                else:
                    others.append(NotModelled(cells["policy"], cells["gpu"], cells["experiment"], why))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not a text file") from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    return rows, others


def _check_columns(columns: Sequence[str]) -> None:
    missing = [column for column in _NEEDED if column not in columns]
    if missing:
        raise FormatError(
            f"line 1: no column {', '.join(missing)}; validate slora reads runs as docs/validation.md describes them"
        )


@dataclass(frozen=True, slots=True)
class _Cells:
    """A line of the file; converting a cell to a type that it does not have raises `FormatError`."""

    line: int
    texts: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return the cell unchanged."""
        return self.texts[column]

    def number(self, column: str, *, least: float = 0.0) -> float:
        """Return a finite number, `least` or more."""
        try:
            value = float(self.texts[column])
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise FormatError(
                f"line {self.line}: {column} is {self.texts[column]!r}; it must be a number, {least:g} or more"
            )
        return value

    def above_0(self, column: str) -> float:
        """Return a finite number above 0."""
        value = self.number(column)
        if not value:
            raise FormatError(f"line {self.line}: {column} is {self.texts[column]!r}; it must be above 0")
        return value

    def count(self, column: str, *, least: int = 0) -> int:
        """Return a whole number, `least` or more."""
        value = self.number(column, least=least)
        if value != int(value):
            raise FormatError(f"line {self.line}: {column} is {self.texts[column]!r}; it must be a whole number")
        return int(value)

    def ranks(self, column: str) -> tuple[int, ...]:
        """Return ranks separated by `|`; none for an empty cell."""
        text = self.texts[column]
        try:
            ranks = tuple(int(rank) for rank in text.split("|") if rank)
        except ValueError:
            ranks = (0,)
        if any(rank < 1 for rank in ranks):
            raise FormatError(f"line {self.line}: {column} is {text!r}; expected ranks as in 64|32|16")
        return ranks


def _why_not(cells: Mapping[str, str]) -> str | None:
    if cells["policy"] not in POLICIES:
        return f"policy {cells['policy']}"
    if cells["flags"]:
        return f"flagged {cells['flags']}"
    if not cells["max_total_token_num"]:
        return "no pool size"
    if not cells["num_adapters"] or cells["gpu"] not in _GPUS:
        return "recorded traffic or unknown GPU"
    if not all(cells[column] for column in _COLUMNS.values()):
        return "a figure was not recorded"
    return None


def _row(cells: _Cells) -> SloraRow:
    num_adapters, ranks = cells.count("num_adapters"), cells.ranks("lora_ranks")
    if num_adapters and not ranks:
        raise FormatError(f"line {cells.line}: lora_ranks is empty; {num_adapters} adapters have at least one rank")
    return SloraRow(
        policy=cells.text("policy"),
        gpu=cells.text("gpu"),
        setting=cells.text("setting"),
        experiment=cells.text("experiment"),
        source_line=cells.count("source_line"),
        base_model=cells.text("base_model"),
        ranks=ranks,
        num_adapters=num_adapters,
        alpha=cells.above_0("alpha"),
        req_rate=cells.above_0("req_rate"),
        cv=cells.above_0("cv"),
        duration=cells.above_0("duration"),
        input_range=(cells.count("input_lo", least=1), cells.count("input_hi", least=1)),
        output_range=(cells.count("output_lo", least=1), cells.count("output_hi", least=1)),
        pool_tokens=cells.count("max_total_token_num", least=1),
        measured={figure: cells.above_0(column) for figure, column in _COLUMNS.items()},
    )


def predict(row: SloraRow, catalogue: Catalogue) -> Prediction:
    """Run a row's workload, and compare the figures with the measured ones.

    Raises:
        FormatError: a base model that the catalogue does not have.
    """
    try:
        gpu, model = catalogue.gpu(_GPUS[row.gpu]), catalogue.model(row.base_model)
    except CatalogueError as error:
        raise FormatError(f"base_model of {row.experiment}, line {row.source_line}: {error}") from None
    engine = SLOW_HOST if (row.gpu, row.policy) == ("a100-40", "cluster") else ENGINES[row.gpu]
    deployment = Deployment(gpu, model, engine=catalogue.engine(engine))
    workload, adapters = _workload(row)
    settings = ReplicaSettings(
        POLICIES[row.policy], row.pool_tokens, MAX_REQ_TOTAL_LEN, strict=True, batch_num_adapters=row.max_adapters
    )

    once_ms, gb_per_second = LOADS[row.gpu]

    def load(adapter: Adapter, _tier: Tier) -> int:
        size_bytes = adapter_bytes(model, adapter.rank)
        return round(once_ms * _PS_PER_MS + size_bytes / gb_per_second / 1e9 * PS_PER_SECOND)

    def make_replica(chosen: ReplicaSettings) -> Replica:
        return build_replica(chosen, load_ps=load)

    simulation = Simulation(build_workers(1, settings, Roofline(deployment), make_replica), RoundRobin())
    ended = list(simulation.run(build_requests(workload, model.name, adapters)))
    per_request: list[tuple[float, ...]] = []
    for request in ended:
        end_ps, first_ps = request.finished_ps or 0, request.first_token_ps
        first = math.nan if first_ps is None else (first_ps - request.arrived_ps) / PS_PER_SECOND
        e2e = (end_ps - request.arrived_ps) / PS_PER_SECOND
        per_request.append((request.prompt_tokens, request.output_tokens, e2e, first))
    seconds = max(request.finished_ps or 0 for request in ended) / PS_PER_SECOND
    summary = slora_summary(per_request, seconds, req_rate=row.req_rate)
    predicted = {
        "throughput": summary.throughput or 0.0,
        "latency": summary.avg_latency or 0.0,
        "first_token": summary.avg_first_token_latency or 0.0,
    }
    errors = {figure: predicted[figure] / row.measured[figure] - 1 for figure in FIGURES}
    return Prediction(row, predicted, errors, summary.num_abort)


def _workload(row: SloraRow) -> tuple[list[WorkloadRequest], dict[str, Adapter]]:
    draws = draw(
        num_adapters=row.num_adapters,
        alpha=row.alpha,
        req_rate=row.req_rate,
        cv=row.cv,
        duration=row.duration,
        input_range=row.input_range,
        output_range=row.output_range,
    )
    names = [f"r{rank}-{index}" for index, rank in enumerate(row.ranks)]
    drawn = generate_requests(draws, adapter_dirs=names if row.num_adapters else None)
    workload = [replace(request, prompt_tokens=request.prompt_tokens + EXTRA_PROMPT_TOKENS) for request in drawn]
    ranks = dict(zip(names, row.ranks, strict=True))
    used = {request.adapter_id for request in workload if request.adapter_id is not None}
    return workload, {name: Adapter(name, ranks[name.rpartition("-")[0]]) for name in used}


def why_off(prediction: Prediction) -> str | None:
    """Return a likely reason why a row's throughput is off by over 3 % or its latency by over 10 %; None if neither."""
    row, errors = prediction.row, prediction.errors
    if abs(errors["throughput"]) <= THROUGHPUT_AIM and abs(errors["latency"]) <= LATENCY_AIM:
        return None
    if (row.gpu, row.policy) == ("a100-40", "cluster"):
        return "another host than the GPU's other runs; its factor is fitted, not known"
    if row.policy == "abort":
        return "whom abort drops turns on who has just waited 5.5 s"
    if row.measured["first_token"] < row.measured["latency"] / 2:
        return "the queue only just begins: a step's small error is a large share of it"
    return "in overload every step's error adds up in the queue"


def by_gpu_and_policy(predictions: Iterable[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    """Group predictions."""
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.row.gpu, prediction.row.policy), []).append(prediction)
    return dict(sorted(groups.items()))


def render_rows(predictions: Sequence[Prediction]) -> list[str]:
    """Return predicted / measured as lines of 80 columns."""
    columns = f"{'run':<19}{'N':>4} {'R':>4}{'cv':>3}{'alpha':>6}  {'req/s':<15} {'latency s':<15} {'1st token s':<15}"
    lines = [f"{columns.rstrip()}   (predicted/measured)"]
    for prediction in predictions:
        row = prediction.row
        figures = (
            f"{prediction.predicted[figure]:.3g}/{row.measured[figure]:.3g}".ljust(10)
            + f"{prediction.errors[figure]:+.0%}"
            for figure in FIGURES
        )
        run = f"{row.policy:<8}{row.gpu:<8}{row.setting:<3}{row.num_adapters:>4}"
        run += f" {row.req_rate:>4g}{row.cv:>3g}{row.alpha:>6g}"
        lines.append(f"{run}  " + " ".join(f"{figure:<15}" for figure in figures).rstrip())
    return lines


def render_groups(predictions: Sequence[Prediction]) -> FigureTable:
    """Return a table of the median and the 90th percentile of the absolute errors."""
    table = FigureTable(box=box.SIMPLE_HEAD, caption="median / 90th percentile of the absolute relative error")
    for name in ("gpu", "policy"):
        table.add_column(name, justify="left")
    for name in ("rows", "throughput", "latency", "first token"):
        table.add_column(name)
    for (gpu, policy), group in by_gpu_and_policy(predictions).items():
        cells = []
        for figure in FIGURES:
            errors = [abs(prediction.errors[figure]) for prediction in group]
            cells.append(f"{median(errors):.1%} / {float(np.percentile(errors, 90)):.1%}")
        table.add_row(gpu, policy, str(len(group)), *cells)
    return table


def to_json(predictions: Sequence[Prediction], others: Sequence[NotModelled]) -> dict[str, Any]:
    """Return signed relative errors with their inputs, and the rows that are not modelled."""
    rows = []
    for prediction in predictions:
        row = prediction.row
        entry: dict[str, Any] = {
            "policy": row.policy,
            "gpu": row.gpu,
            "setting": row.setting,
            "num_adapters": row.num_adapters,
            "req_rate": row.req_rate,
            "cv": row.cv,
            "alpha": row.alpha,
            "duration": row.duration,
            "experiment": row.experiment,
            "source_line": row.source_line,
            "max_total_token_num": row.pool_tokens,
            "num_dropped": prediction.num_dropped,
        }
        for figure in FIGURES:
            entry[f"{figure}_error"] = prediction.errors[figure]
            entry[f"{figure}_predicted"] = prediction.predicted[figure]
            entry[f"{figure}_measured"] = row.measured[figure]
        rows.append(entry)
    return {"rows": rows, "not_modelled": [asdict(other) for other in others]}
