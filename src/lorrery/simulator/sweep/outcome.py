"""The figures of a run, or its error."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.workload.distribution import Distribution
from lorrery.service.errors import LorreryError, exit_in_words
from lorrery.vocabulary.files import CPU_SECONDS

__all__ = ["COUNTS", "FIGURES", "SCALING", "Figure", "Outcome", "attempt", "figures_of"]

Figure = int | float | None
"""None: nothing to compute it from."""

COUNTS = (
    "num_requests",
    "num_completed",
    "num_failed",
    "num_skipped",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "num_requeues",
    "num_steps",
    "num_plans",
    "replicas_min",
    "replicas_max",
    "num_scale_ups",
    "num_scale_downs",
)
SCALING = (
    "gpu_hours",
    "replicas_min",
    "replicas_mean",
    "replicas_max",
    "num_scale_ups",
    "num_scale_downs",
    "good_ratio",
)
"""Additional figures of an autoscaled run; `autoscaler.summary` defines them."""
_LATENCIES = ("ttft", "tpot", "itl", "e2e", "norm_tpot")
FIGURES = (
    *(name for name in COUNTS if name not in SCALING),
    "simulated_seconds",
    "duration_seconds",
    "requests_per_second",
    "input_tokens_per_second",
    "output_tokens_per_second",
    *(f"{name}_ms_{part}" for name in _LATENCIES for part in ("mean", "p50", "p90", "p99")),
    "slora_avg_satisfaction",
    "slora_avg_attainment",
    CPU_SECONDS,
    *SCALING,
)
"""Columns of the table, in order; the last ones only with an autoscaler."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a point.

    Attributes:
        key: the point's.
        figures: by name; None if it failed.
        error: message of the failure.
        warnings: remarks that the figures must be read with.
    """

    key: str
    figures: dict[str, Figure] | None = None
    error: str = ""
    warnings: tuple[str, ...] = ()


def attempt(key: str, simulate: Callable[[], Outcome]) -> Outcome:
    """Return what a run gives, or its error: an internal one, or a plug-in's, fails this run alone."""
    try:
        return simulate()
    except LorreryError as error:
        return Outcome(key, error=str(error))
    except Exception as error:  # an internal error, or a plug-in's
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(key, error=f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})")
    except BaseException as error:  # raised by a plug-in: processes that run points ignore Ctrl-C
        return Outcome(key, error=exit_in_words(error))


def figures_of(report: LoadReport) -> dict[str, Figure]:
    """Return the figures of a run by name, in order of `FIGURES`."""
    summary, cost, slora = report.summary, report.simulation, report.slora
    assert cost is not None
    sources = [report, summary, cost, *([] if report.scaling is None else [report.scaling.summary])]
    found: dict[str, Figure] = dict.fromkeys(SCALING)
    found |= {name: getattr(source, name) for source in sources for name in FIGURES if hasattr(source, name)}
    latencies: dict[str, Distribution] = {
        "ttft": summary.from_intended.ttft_ms,
        "tpot": summary.tpot_ms,
        "itl": summary.itl_ms,
        "e2e": summary.from_intended.e2e_ms,
        "norm_tpot": summary.from_intended.norm_tpot_ms,
    }
    for name, values in latencies.items():
        for part in ("mean", "p50", "p90", "p99"):
            found[f"{name}_ms_{part}"] = getattr(values, part) if values.count else None
    found["slora_avg_satisfaction"], found["slora_avg_attainment"] = slora.avg_satisfaction, slora.avg_attainment
    return {name: None if (value := found[name]) is None or not math.isfinite(value) else value for name in FIGURES}
