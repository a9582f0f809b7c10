"""`lorrery validate steptime`: step-time models against measured steps.

A row names its source, which determines what its time covers: kernels alone as Vidur times them, kernels alone as vLLM
runs them, or whole steps with the CPU's share of 2023. So each source has its engine, and errors of different sources
are never pooled.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lorrery.service.errors import FormatError
from lorrery.service.files.reading import open_csv
from lorrery.view.terminal import FigureTable
from lorrery.worker.device.catalogue.hardware import AllReduce, CatalogueError, Gpu
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.profile import PHASES, ProfileError, ProfileRow, read_profile
from lorrery.worker.device.steptime import STEP_TIME_MODELS, StepTimeModel

ENGINES: Mapping[str, str] = {
    "vidur": "vidur-kernels",
    "llmservingsim": "vllm-kernels",
    "splitwise_e2e": "vllm-2023",
}
"""Source -> engine; an unknown source counts as kernels of a present-day engine."""
OTHER_ENGINE = "vllm-kernels"
NO_ALL_REDUCE = frozenset({"llmservingsim"})
"""Sources that time a single GPU's shard."""

ALL_MODELS = "*"
UNTIMED = "no time of their phase (measured_step_ms or step_ms; for phase linear measured_linear_ms)"
NO_GPU = "no GPU named; say which with --gpu"
NO_MODEL = "no model named; say which with --model"
TABLE_NEEDS = "of a deployment without both decodes and prefills, which table needs"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Relative errors of one group of rows, in percent."""

    gpu: str
    model: str
    source: str
    phase: str
    n: int
    mape: float
    p95: float


@dataclass(slots=True)
class Comparison:
    """Result for a file.

    Attributes:
        rows: by source, GPU, model (`*`: all of them) and phase.
        left_out: reason -> number of rows.
    """

    rows: list[ErrorRow] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def read_file(path: Path) -> list[ProfileRow]:
    """Read a CSV file of measured steps.

    Raises:
        FormatError: an unreadable file, or an invalid row; the message names file and line.
    """
    with open_csv(path, FormatError, ProfileError) as file:
        return read_profile(file)


def name_rows(rows: Iterable[ProfileRow], gpu: str | None, model: str | None) -> list[ProfileRow]:
    """Return the rows, with the given GPU and model where a row names none."""
    return [replace(row, gpu=row.gpu or gpu or "", model=row.model or model or "") for row in rows]


def compare(
    rows: Iterable[ProfileRow], catalogue: Catalogue, step_time: str = "roofline", *, all_qualities: bool = False
) -> Comparison:
    """Compare a step-time model with measured rows.

    The model `table` learns from every second row of each group and is compared with the others.

    Args:
        rows: measured steps.
        catalogue: with their GPUs and models.
        step_time: name of the model.
        all_qualities: whether rows whose quality is not "ok" count too.
    """
    result = Comparison()
    errors: dict[tuple[str, str, str, str], list[float]] = {}
    groups: dict[tuple[str, str, str, int, int | None], list[ProfileRow]] = {}
    for row in rows:
        if (why := _why_left_out(row, all_qualities)) is not None:
            _count(result.left_out, why)
        else:
            key = row.source, row.gpu, row.model, row.tensor_parallel, row.num_layers
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        try:
            model, held_against = _model_of(group, catalogue, step_time)
        except CatalogueError as error:
            reason = TABLE_NEEDS if step_time == "table" else str(error)
            _count(result.left_out, reason, len(group))
            continue
        for row in held_against:
            modelled_ms = modelled(model, row)
            if modelled_ms is None:
                _count(result.left_out, f"linear, which {step_time} does not tell apart")
                continue
            assert row.measured_ms is not None
            error_percent = abs(modelled_ms / row.measured_ms - 1) * 100
            for name in (row.model, ALL_MODELS):
                errors.setdefault((row.source, row.gpu, name, row.phase), []).append(error_percent)
    for (source, gpu, name, phase), values in sorted(errors.items(), key=_order):
        mape, p95 = float(np.mean(values)), float(np.percentile(values, 95))
        result.rows.append(ErrorRow(gpu, name, source, phase, len(values), mape, p95))
    return result


def measured_deployment(
    row: ProfileRow, catalogue: Catalogue, gpu: Gpu | None = None, engine: str | None = None
) -> Deployment:
    """Return the deployment that a row was measured on, with the engine that its source timed.

    Args:
        row: measured step.
        catalogue: with its GPU and model.
        gpu: replaces the row's GPU.
        engine: name of the timed engine, instead of the source's.

    Raises:
        CatalogueError: an unknown GPU or model, or a combination that does not work.
    """
    gpu, model = gpu or catalogue.gpu(row.gpu), catalogue.model(row.model)
    if row.num_layers is not None:
        model = replace(model, num_layers=row.num_layers)
    if row.source in NO_ALL_REDUCE:
        gpu = replace(gpu, all_reduce=AllReduce(0.0, float("inf")), pair_all_reduce=None, modern_all_reduce=None)
    timed = catalogue.engine(engine or ENGINES.get(row.source, OTHER_ENGINE), gpu)
    return Deployment(gpu, model, row.tensor_parallel, engine=timed)


def modelled(model: StepTimeModel, row: ProfileRow) -> float | None:
    """Return a model's time of a row in milliseconds; None if it cannot separate the row's linear part."""
    if row.phase == "linear":
        linear_seconds = getattr(model, "linear_seconds", None)
        return None if linear_seconds is None else linear_seconds(row.num_tokens) * 1e3
    return model.step_ps(row.batch()) / 1e9


def render(comparison: Comparison) -> FigureTable:
    """Return the errors as a table."""
    table = FigureTable()
    for name in ("source", "gpu", "model", "phase"):
        table.add_column(name, justify="left")
    for name in ("rows", "MAPE %", "p95 %"):
        table.add_column(name)
    last = ("", "")
    for row in comparison.rows:
        shown = ("", "") if (row.source, row.gpu) == last else (row.source, row.gpu)
        last = row.source, row.gpu
        model = "all" if row.model == ALL_MODELS else row.model
        table.add_row(*shown, model, row.phase, str(row.n), f"{row.mape:.2f}", f"{row.p95:.2f}")
    return table


def to_json(comparison: Comparison) -> str:
    """Return the errors as `{"rows": [{gpu, model, source, phase, n, mape, p95}, ...]}`, percent."""
    rows = [{key: getattr(row, key) for key in ErrorRow.__slots__} for row in comparison.rows]
    return json.dumps({"rows": rows}, indent=1) + "\n"


def _why_left_out(row: ProfileRow, all_qualities: bool) -> str | None:
    if row.quality != "ok" and not all_qualities:
        return f"quality is {row.quality}"
    if row.measured_ms is None:
        return UNTIMED
    if not row.gpu:
        return NO_GPU
    return None if row.model else NO_MODEL


def _model_of(
    group: list[ProfileRow], catalogue: Catalogue, step_time: str
) -> tuple[StepTimeModel, Iterable[ProfileRow]]:
    deployment = measured_deployment(group[0], catalogue)
    held_against = group
    if step_time == "table":
        group = sorted(group, key=_by_shape)
        deployment, held_against = replace(deployment, profile=group[::2]), group[1::2]
    return STEP_TIME_MODELS[step_time](deployment), held_against


def _by_shape(row: ProfileRow) -> tuple[str, int, int, int, int, int]:
    return row.phase, row.batch_size, row.prefill_prefix, row.kv_len, row.prefill_chunk, row.num_tokens


def _order(entry: tuple[tuple[str, str, str, str], list[float]]) -> tuple[str, str, int, str, int]:
    (source, gpu, name, phase), _ = entry
    return source, gpu, name != ALL_MODELS, name, PHASES.index(phase)


def _count(reasons: dict[str, int], reason: str, num_rows: int = 1) -> None:
    reasons[reason] = reasons.get(reason, 0) + num_rows
