"""`lorrery validate vidur`: the simulator against a run of Vidur, with its batch rules and its step times.

Two runs. In the first, step times come from the model `fitted`, fitted to the log of steps: this run is judged. In the
second, each step takes the recorded time of a step with its shape: if all rules are the same, every request then has
its recorded times, to the last digit of the log.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorrery.service.errors import FormatError
from lorrery.validation.vidur import BatchRules, RecordedSteps, RequestTimes, read_requests, replay
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import read_catalogue, read_steps_file
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.hardware import CatalogueError

QUANTILES = (0.5, 0.9, 0.99)
JUDGED = (0.5, 0.99)
TOLERANCE = 0.03
SAME_SECONDS = 1e-6
"""The log of steps has 9 digits; thousands of steps add up."""


@dataclass(frozen=True, slots=True)
class ComparedQuantile:
    """One quantile of one metric, in seconds."""

    metric: str
    quantile: float
    recorded: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative, signed; 0 where both are 0."""
        if self.recorded == self.simulated:
            return 0.0
        return self.simulated / self.recorded - 1 if self.recorded else float("inf")

    @property
    def within(self) -> bool:
        """Whether it is within the tolerance; always true for quantiles that are not judged."""
        return self.quantile not in JUDGED or abs(self.error) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class VidurComparison:
    """Result of a replay.

    Attributes:
        num_requests: replayed.
        num_recorded_steps: in the log.
        num_steps: in the replay with fitted times.
        quantiles: of each metric.
        num_same: requests with their recorded times, if every step takes its recorded time.
    """

    num_requests: int
    num_recorded_steps: int
    num_steps: int
    quantiles: list[ComparedQuantile]
    num_same: int

    @property
    def within(self) -> bool:
        """Whether every judged quantile is within the tolerance."""
        return all(quantile.within for quantile in self.quantiles)


def compare(requests_file: Path, steps_file: Path, rules: BatchRules) -> VidurComparison:
    """Replay a run.

    Raises:
        LorreryError: an unreadable file, a log without decodes or prefills, or a request that does not fit.
    """
    recorded = read_requests(requests_file)
    steps = read_steps_file(steps_file)
    catalogue = read_catalogue()
    try:
        # No adapters are served, so GPU and model do not matter.
        fitted = Fitted(Deployment(catalogue.gpu("A100-80-SXM"), catalogue.model("Llama-2-7B"), steps=steps))
    except CatalogueError as error:
        raise FormatError(f"{steps_file}: {error}") from None
    simulated, num_steps = replay(recorded, rules, fitted)
    again, _ = replay(recorded, rules, RecordedSteps(steps, fitted))
    theirs, ours = recorded.metrics(), simulated.metrics()
    quantiles = [
        ComparedQuantile(metric, q, float(np.quantile(theirs[metric], q)), float(np.quantile(ours[metric], q)))
        for metric in theirs
        for q in QUANTILES
    ]
    return VidurComparison(len(recorded), len(steps), num_steps, quantiles, _num_same(recorded, again))


def _num_same(some: RequestTimes, others: RequestTimes) -> int:
    same = np.ones(len(some), np.bool_)
    for name in ("scheduled", "first_token", "finished"):
        same &= np.abs(getattr(some, name) - getattr(others, name)) <= SAME_SECONDS
    return int(same.sum())


def render(comparison: VidurComparison) -> FigureTable:
    """Return the quantiles as a table."""
    table = FigureTable()
    for name in ("metric", "quantile"):
        table.add_column(name, justify="left")
    for name in ("recorded ms", "simulated ms", "error %"):
        table.add_column(name)
    table.add_column("", justify="left")
    for row in comparison.quantiles:
        table.add_row(
            row.metric if row.quantile == QUANTILES[0] else "",
            f"p{row.quantile * 100:.0f}",
            f"{row.recorded * 1e3:.3f}",
            f"{row.simulated * 1e3:.3f}",
            f"{row.error * 100:+.2f}",
            "" if row.within else f"beyond {TOLERANCE:.0%}",
        )
    return table


def summary(comparison: VidurComparison) -> list[str]:
    """Return the rest as lines of text."""
    num_requests, num_same = f"{comparison.num_requests:,}", f"{comparison.num_same:,}"
    steps = f"{comparison.num_recorded_steps:,} recorded steps, {comparison.num_steps:,} simulated"
    return [
        f"{num_requests} requests, {steps}",
        f"if each step takes what was recorded, {num_same} of {num_requests} requests have their recorded times",
    ]


def to_json(comparison: VidurComparison) -> str:
    """Return `{"rows": [{metric, quantile, recorded, simulated, error}, ...], ...}`, seconds and relative errors."""
    rows = [
        {
            "metric": row.metric,
            "quantile": row.quantile,
            "recorded": row.recorded,
            "simulated": row.simulated,
            "error": row.error,
        }
        for row in comparison.quantiles
    ]
    content = {
        "rows": rows,
        "num_requests": comparison.num_requests,
        "num_recorded_steps": comparison.num_recorded_steps,
        "num_steps": comparison.num_steps,
        "num_same": comparison.num_same,
    }
    return json.dumps(content, indent=1) + "\n"
