"""Published figures in the package (`data/README.md` names their sources), and errors of predictions by row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FOLDER = Path(__file__).parent / "data"

MEASURED_STEPS = _FOLDER / "step_time_measured.csv"
"""Steps timed on real GPUs, from three sources."""
MEASURED_KERNELS = _FOLDER / "kernel_measured_excerpt.csv"
"""Kernels timed one by one, on eleven GPUs."""
MEASURED_LORA = _FOLDER / "lora_measured.csv"
"""vLLM's LoRA kernels, timed for this project on H100 and H200."""
MEASURED_SEGMENTED_LORA = _FOLDER / "lora_segmented_measured.csv"
"""SGLang's, likewise."""
MEASURED_SERVING = _FOLDER / "serving_measured.csv"
"""Runs of models served on H100, H200, B200 and MI300X, by vLLM, SGLang and TensorRT-LLM."""
POSTED_SERVING = _FOLDER / "served_bench.csv"
"""Runs that users of vLLM, SGLang and TensorRT-LLM posted, and TensorRT-LLM's published throughput, with commands."""
SERVED_LORA = _FOLDER / "served_lora.csv"
"""Runs with adapters that users of vLLM and SGLang published, with their commands."""
SLORA_RUNS = _FOLDER / "slora_measured.csv"
"""The runs that S-LoRA's repository publishes."""
VIDUR_REQUESTS = _FOLDER / "vidur_conv_vllm.csv"
"""A run of Vidur: its requests."""
VIDUR_STEPS = _FOLDER / "vidur_conv_vllm_steps.csv"
"""The same run's engine steps."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted against measured figures.

    Attributes:
        num_rows: number of rows.
        mape: mean absolute error, percent; None without rows.
        median: signed, percent: above 0 the model is too slow.
    """

    num_rows: int
    mape: float | None
    median: float | None


@dataclass(frozen=True, slots=True)
class NotPredicted:
    """Rows without a prediction: reason, number, and line of the first."""

    why: str
    num_rows: int
    line: int


def sum_up(errors: Sequence[float] | NDArray[np.float64]) -> Errors:
    """Summarise signed errors of rows, in percent."""
    if not len(errors):
        return Errors(0, None, None)
    return Errors(len(errors), float(np.mean(np.abs(errors))), float(np.median(errors)))


def reasons(rows: Iterable[tuple[int, str]]) -> list[NotPredicted]:
    """Count rows by reason.

    Args:
        rows: line and reason of each row without a prediction; an empty reason: it has one.
    """
    lines: dict[str, list[int]] = {}
    for line, why in rows:
        if why:
            lines.setdefault(why, []).append(line)
    return [NotPredicted(why, len(at), at[0]) for why, at in lines.items()]


def reasons_json(left_out: Iterable[NotPredicted]) -> list[dict[str, str | int]]:
    """Return the rows left out for JSON."""
    return [{"why": one.why, "rows": one.num_rows, "first_line": one.line} for one in left_out]


def percent(value: float | None, sign: str = "") -> str:
    """Format a figure of a table; `sign` is "+" if it may be negative."""
    return "-" if value is None else f"{value:{sign}.1f}"
