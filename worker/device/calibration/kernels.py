"""Fits a GPU's constants to measured kernels, part by part: products and experts by type, attention by type, links.

No kernel depends on the constants of two parts, so each part is fitted by itself: least squares on ln(modelled /
measured), over the logarithms of the constants. Large errors count by their size rather than its square (`soften`), as
in the mean absolute error, since a few shapes for which a library picks a bad kernel are two times off. A weak pull
towards the starting values (`PULL` for a factor of e) keeps the solution in place. Constants that the rows do not
determine are found by their standard error and reset: a profile of small products alone says nothing about `flops`.

Rows are those of the shapes to fit on (`kernel_rows.is_fitted`); the others judge.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lorrery.worker.device.basis import no_measurement
from lorrery.worker.device.calibration.kernel_prediction import OneGpu, is_library, kv_type, weight_type, why_not
from lorrery.worker.device.calibration.kernel_rows import (
    AllReduceShape,
    AttentionShape,
    GemmShape,
    KernelRow,
    LoraShape,
    MoeShape,
    SegmentedLoraShape,
)
from lorrery.worker.device.calibration.steps import Floats, least_squares, slopes, soften
from lorrery.worker.device.catalogue.hardware import (
    AttentionFit,
    CatalogueError,
    GemmFit,
    Gpu,
    LoraFit,
    MoeFit,
    SegmentedLoraFit,
)

LORA: Mapping[str, str] = {"lora": "grouped_lora", "lora_segmented": "segmented_lora"}
"""The parts of adapters' kernels, which are of one type -> the fit's property with their constants."""
PULL = 0.03
MOST_ROWS = 900
"""Most rows fitted per part, evenly chosen: more change no significant digit."""
MOST_ERROR = 0.25
"""Standard error of a constant's logarithm above which the rows do not determine it."""
SOFT = 0.08
"""Error (of the logarithm) beyond which it counts by its size, not its square."""
WORTH = 0.98
"""Another tile is taken if its loss is below this share of the current one's."""
LEAST = {
    "us": 1.0, "decode_us": 5.0, "prefill_us": 5.0, "sequence_us": 0.01, "sequence_ns": 5.0, "longest_ns": 0.05,
    "us_per_gpu": 0.5, "large_us": 5.0, "expert_us": 0.1, "all_pairs": 0.1,
    "columns_start": 100.0, "inner_start": 100.0,
}  # fmt: skip
"""Starting value of a constant of 0, as a logarithm cannot leave 0. Others of 0 stay: the kernel has no such cost."""
MOST = {"moe.all_pairs": 1.0, "moe.bandwidth": 1.0}
"""Upper limits of constants. Small experts stay in the L2 cache from run to run, and look faster than memory."""
CHOICES: Mapping[str, Sequence[int]] = {"tile": (64, 128, 256), "least_rows": (16, 64), "inner_rows": (64, 128, 256)}
"""Discrete constants -> values to try."""
_APART = 0.05
"""Step of a logarithm for a slope: attention of one layer takes 30 to 1,000 ps a token, rounded to whole ones."""

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """Constants that are fitted together, and the rows that determine them.

    Attributes:
        name: as in a catalogue: `gemm.bf16`, `attention.fp8`, `lora`, `lora_segmented`, `all_reduce`,
            `modern_all_reduce`.
        rows: measured.
        start: name -> value; all constants of the part.
        choices: name -> values to try in turn, for discrete constants.
        apply: returns the GPU with other constants.
    """

    name: str
    rows: Sequence[KernelRow]
    start: Values
    choices: Mapping[str, Sequence[int]]
    apply: Callable[[Values], Gpu]


@dataclass(frozen=True, slots=True)
class PartFit:
    """Result of fitting a part.

    Attributes:
        part: that was fitted.
        values: name -> constant.
        errors: name -> relative standard error of the fitted constants.
        kept: constants that the rows do not determine, unchanged.
    """

    part: Part
    values: Values
    errors: Values
    kept: Sequence[str]


def parts_of(gpu: Gpu, rows: Sequence[KernelRow]) -> list[Part]:
    """Sort rows into the parts that they determine; rows that no kernel stands for are in none."""
    found: dict[str, list[KernelRow]] = {}
    for row in rows:
        if why_not(row) is None and (name := _part_name(row)):
            found.setdefault(name, []).append(row)
    parts = [_part(gpu, name, of) for name, of in sorted(found.items())]
    return [replace(part, rows=rows) for part in parts if (rows := _possible(part))]


def _possible(part: Part) -> list[KernelRow]:
    """Return the rows that the part's kernels can run: no experts that cannot be cut or distributed as stated."""
    model, rows = OneGpu(part.apply(part.start)), []
    for row in part.rows:
        try:
            model.seconds(row)
        except CatalogueError:
            continue
        rows.append(row)
    return rows


def fit(part: Part) -> PartFit:
    """Fit a part's constants to its rows that are for fitting.

    Constants that the rows do not determine keep their values, and the others are fitted once more with them. Discrete
    ones are tried one by one, until no other value is better.
    """
    seen = [row for row in part.rows if row.is_fitted]
    rows = seen[:: max(1, -(-len(seen) // MOST_ROWS))]
    kept: list[str] = []
    if not rows:
        return PartFit(part, part.start, {}, [*part.start])
    values, loss, errors = _fit(part, rows, part.start, kept)
    while unknown := [name for name, error in errors.items() if error > MOST_ERROR]:
        kept.append(max(unknown, key=lambda name: errors[name]))
        values, loss, errors = _fit(part, rows, part.start, kept)
    chosen = {name: part.start[name] for name in part.choices}
    while True:
        before = dict(chosen)
        for name, choices in part.choices.items():
            for choice in choices:
                if choice != chosen[name]:
                    other = _fit(part, rows, {**part.start, **chosen, name: choice}, kept)
                    if other[1] < loss * WORTH:
                        values, loss, errors = other
                        chosen[name] = choice
        if chosen == before:
            return PartFit(part, values, errors, kept)


def calibrated(gpu: Gpu, fits: Sequence[PartFit], source: str) -> Gpu:
    """Return a GPU with all fitted constants; constants that no row determined remain marked as assumed."""
    fitted = {one.part.name for one in fits if one.errors}
    fit = gpu.modern_fit
    assumed = set(fit.assumed)
    if no_measurement(gpu):
        types = {"gemm": fit.gemm, "attention": fit.attention, "moe": fit.moe}
        assumed = {"elementwise", *(f"{part}.{name}" for part, names in types.items() for name in names)}
    for one in fits:
        gpu = _applied(gpu, one.part.name, one.values, source)
    fit = replace(
        gpu.modern_fit, basis="fitted", source=source, gpus=(gpu.name,), assumed=tuple(sorted(assumed - fitted))
    )
    return replace(gpu, modern_fit=fit)


def percent_errors(part: Part, values: Values) -> Floats:
    """Return the signed errors in percent with given constants, in the order of the part's rows."""
    return np.expm1(_log_errors(part, part.rows, values)) * 100


def _fit(part: Part, rows: Sequence[KernelRow], start: Values, kept: Sequence[str]) -> tuple[Values, float, Values]:
    """Return constants, their loss, and their standard errors; kept ones stay at the start."""
    fixed = {*kept, *part.choices}
    kind = part.name.partition(".")[0]
    most = {name: MOST[f"{kind}.{name}"] for name in start if f"{kind}.{name}" in MOST}
    names = [name for name, value in start.items() if name not in fixed and (value or name in LEAST)]
    begin = np.log([start[name] or LEAST[name] for name in names])

    def values(logs: Floats) -> Values:
        found = dict(zip(names, map(float, np.exp(logs)), strict=True))
        return {**start, **{name: min(value, most.get(name, value)) for name, value in found.items()}}

    def errors(logs: Floats) -> Floats:
        return np.append(soften(_log_errors(part, rows, values(logs)), SOFT), PULL * (logs - begin))

    if not names:
        left = errors(begin)
        return start, float(left @ left), {}
    logs, loss = least_squares(errors, begin, apart=_APART)
    return values(logs), loss, dict(zip(names, _standard_errors(part, rows, values, logs), strict=True))


def _standard_errors(
    part: Part, rows: Sequence[KernelRow], values: Callable[[Floats], Values], logs: Floats
) -> list[float]:
    """Return the standard error of each logarithm: how far it may move before the rows contradict it.

    As in least squares, with a floor under the scatter, so that a few exact rows do not count as certainty.
    """

    def errors(at: Floats) -> Floats:
        return _log_errors(part, rows, values(at))

    now = errors(logs)
    change = slopes(errors, logs, now, _APART)
    free = max(len(now) - len(logs), 1)
    scatter = max(float(np.sum(soften(now, SOFT) ** 2)) / free, 0.02**2)
    weak = np.full(len(logs), 1e-6)  # without any row: an error in the hundreds, and no division by zero
    covariance = np.linalg.inv(change.T @ change + np.diag(weak)) * scatter
    return [float(error) for error in np.sqrt(np.diag(covariance))]


def _log_errors(part: Part, rows: Sequence[KernelRow], values: Values) -> Floats:
    model = OneGpu(part.apply(values))
    modelled = [model.seconds(row) for row in rows]
    errors: Floats = np.log(np.array(modelled) * 1e6 / np.array([row.latency_us for row in rows]))
    return errors


def _part_name(row: KernelRow) -> str:
    match row.shape:
        case GemmShape():
            return f"gemm.{weight_type(row)}"
        case AttentionShape():
            return f"attention.{kv_type(row)}"
        case MoeShape():
            return f"moe.{weight_type(row)}"
        case LoraShape():
            return "lora"
        case SegmentedLoraShape():
            return "lora_segmented"
        case AllReduceShape() if is_library(row):
            return "all_reduce"
        case AllReduceShape() if "graph" in row.kernel:  # the eager kernel's time includes the launch
            return "modern_all_reduce"
        case _:
            return ""


def _part(gpu: Gpu, name: str, rows: Sequence[KernelRow]) -> Part:
    kind, _, type_name = name.partition(".")
    start: dict[str, float] = {}
    if type_name or name in LORA:
        record = _record(gpu, kind, type_name)
        start = {one.name: getattr(record, one.name) for one in fields(record)}
    else:
        link = gpu.all_reduce if name == "all_reduce" else gpu.link(2, modern=True)
        figures = {one.name: getattr(link, one.name) for one in fields(link)}
        start = {key: value for key, value in figures.items() if isinstance(value, float | int)}
        del start["gb_per_second"]
        degrees = sorted({row.shape.num_gpus for row in rows if isinstance(row.shape, AllReduceShape)})
        start |= {f"gb_per_second.{degree}": link.bandwidth(degree) for degree in degrees}
    choices = {key: values for key, values in CHOICES.items() if key in start}
    return Part(name, rows, start, choices, lambda values: _applied(gpu, name, values))


def _record(gpu: Gpu, kind: str, type_name: str) -> GemmFit | AttentionFit | MoeFit | LoraFit | SegmentedLoraFit:
    """Return a type's constants: another type's where it has none of its own."""
    if kind in LORA:
        record: LoraFit | SegmentedLoraFit = getattr(gpu, LORA[kind])
        return record
    fit = gpu.modern_fit
    if kind == "gemm":
        return fit.gemm_of(type_name)
    if kind == "attention":
        return fit.attention_of(type_name)
    return fit.moe_of(type_name) or _MOE


_MOE = MoeFit(flops=0.5, bandwidth=0.7, us=20.0, expert_rows=16.0, activation_bandwidth=0.3)
"""Start for experts if the fit has no constants for them."""


def _applied(gpu: Gpu, name: str, values: Values, source: str = "") -> Gpu:
    """Return a GPU with a part's constants."""
    kind, _, type_name = name.partition(".")
    fit = gpu.modern_fit
    if name in LORA:
        changed: dict[str, Any] = {name: replace(getattr(gpu, LORA[name]), **values)}
        return replace(gpu, modern_fit=replace(fit, **changed))
    if type_name:
        whole: dict[str, Any] = {key: int(value) if key in CHOICES else value for key, value in values.items()}
        record = replace(_record(gpu, kind, type_name), **whole)
        parts: dict[str, Any] = {kind: {**getattr(fit, kind), type_name: record}}
        return replace(gpu, modern_fit=replace(fit, **parts))
    by_degree = tuple((int(key.partition(".")[2]), value) for key, value in values.items() if "." in key)
    link = gpu.all_reduce if name == "all_reduce" else gpu.link(2, modern=True)
    others: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    link = replace(
        link,
        **others,
        gb_per_second=by_degree[0][1],
        by_degree=by_degree,
        basis="fitted",
        source=source or link.source,
        gpus=(gpu.name,),
        degrees=tuple(degree for degree, _ in by_degree),
    )
    return replace(gpu, all_reduce=link) if name == "all_reduce" else replace(gpu, modern_all_reduce=link)
