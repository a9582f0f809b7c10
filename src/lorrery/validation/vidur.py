"""`lorrery validate vidur`: the simulator against a recorded run of Microsoft's Vidur, with its rules and step times.

Vidur's vLLM-style scheduler (vidur/scheduler/replica_scheduler/vllm_replica_scheduler.py, commit 7d47513) has the rules
of policy `fcfs`, batching `continuous` and memory `paged`, with one difference: `max_tokens_in_batch` bounds a prefill
with padding, its prompts times the longest of them, where vLLM and we bound the sum. `padded_fifo` has that rule.

A log of its requests has one row each, in order of arrival, with the columns `arrival_s`, `prompt_tokens`,
`output_tokens`, `scheduled_s`, `first_token_s`, `finish_s`.

Two runs. In the first, step times come from the model `fitted`, fitted to the log of steps: this run is judged. In the
second, each step takes the recorded time of a step with its shape: if all rules are the same, every request then has
its recorded times, to the last digit of the log.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.service.errors import FormatError
from lorrery.service.files.reading import open_csv
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.validation.padded_fifo import PaddedFifo
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import read_catalogue, read_steps_file
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, StepCost
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.steps import EngineStep
from lorrery.worker.device.steptime import StepTimeModel

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Vidur's corresponding options, with those of the published run as defaults.

    Attributes:
        max_tokens: in a prefill, padded (`max_tokens_in_batch`).
        max_sequences: in the batch (`batch_size_cap`).
        block_size: tokens in a block of KV memory.
        num_blocks: of KV memory.
        watermark: share of them that admission leaves free (`watermark_blocks_fraction`).
    """

    max_tokens: int = 4096
    max_sequences: int = 256
    block_size: int = 16
    num_blocks: int = 7424
    watermark: float = 0.01

    def replica_settings(self) -> ReplicaSettings:
        """Return the equivalent replica settings, apart from the padding."""
        pool_tokens = self.num_blocks * self.block_size
        return ReplicaSettings(
            "fcfs",
            pool_tokens,
            pool_tokens,
            "continuous",
            "paged",
            block_size=self.block_size,
            watermark=self.watermark,
            max_num_seqs=self.max_sequences,
            max_num_batched_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Requests in order of arrival: lengths, and times of their events in seconds."""

    arrived: Floats
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    scheduled: Floats
    first_token: Floats
    finished: Floats

    def __len__(self) -> int:
        return len(self.arrived)

    def workload(self) -> Iterator[WorkloadRequest]:
        """Yield the requests as a workload."""
        columns = self.arrived.tolist(), self.prompt_tokens.tolist(), self.output_tokens.tolist()
        for index, (at_seconds, prompt_tokens, output_tokens) in enumerate(zip(*columns, strict=True)):
            yield WorkloadRequest(index, at_seconds, prompt_tokens, output_tokens)

    def metrics(self) -> dict[str, Floats]:
        """Return waits in the queue, TTFT, TPOT and E2E, in seconds."""
        return {
            "queue": self.scheduled - self.arrived,
            "TTFT": self.first_token - self.arrived,
            "TPOT": (self.finished - self.first_token) / np.maximum(self.output_tokens - 1, 1),
            "E2E": self.finished - self.arrived,
        }


def read_requests(path: Path, limit: int | None = None) -> RequestTimes:
    """Read a log of requests.

    Args:
        path: CSV file.
        limit: most rows to read.

    Raises:
        FormatError: an unreadable file, or an invalid row; the message names file and line.
    """
    rows: list[tuple[float, ...]] = []
    with open_csv(path, FormatError, FormatError) as file:
        reader = csv.DictReader(file)
        for cells in reader:
            if len(rows) == limit:
                break
            rows.append(_read_row(reader.line_num, cells))
            if len(rows) > 1 and rows[-2][0] > rows[-1][0]:
                raise FormatError(f"line {reader.line_num}: arrives before the row above")
    if not rows:
        raise FormatError(f"{path}: no requests")
    arrived, prompts, outputs, scheduled, first, finished = np.array(rows).T
    return RequestTimes(arrived, prompts.astype(np.int64), outputs.astype(np.int64), scheduled, first, finished)


_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "scheduled_s", "first_token_s", "finish_s")


def _read_row(line: int, cells: dict[str, str | None]) -> tuple[float, ...]:
    try:
        values = tuple(float(cells[column] or "") for column in _COLUMNS)
    except KeyError as error:
        raise FormatError(f"line {line}: no column {error}") from None
    except ValueError as error:
        raise FormatError(f"line {line}: {error}") from None
    for column, value in zip(_COLUMNS, values, strict=True):
        least = 1 if column.endswith("tokens") else 0
        if not least <= value < float("inf") or (least and value != int(value)):
            raise FormatError(f"line {line}: {column} is {cells[column]!r}")
    return values


def replay(requests: RequestTimes, rules: BatchRules, step_time: StepTimeModel) -> tuple[RequestTimes, int]:
    """Run the requests through the simulator; return their times there, and the number of steps.

    Raises:
        FormatError: a request that no batch of these rules can hold.
    """
    (worker,) = build_workers(
        1,
        rules.replica_settings(),
        step_time,
        lambda settings: build_replica(settings, make_queue=lambda _: PaddedFifo(rules.max_tokens)),
    )
    simulation = Simulation([worker], PLACEMENTS["least_loaded"](np.random.default_rng(0)))
    times = np.zeros((3, len(requests)), np.int64)
    for request in simulation.run(build_requests(requests.workload(), "", {})):
        if request.outcome != "finished":
            raise FormatError(f"request {request.handle} cannot be served: {request.detail or request.outcome}")
        times[:, request.handle] = [
            at_ps or 0 for at_ps in (request.first_admitted_ps, request.first_token_ps, request.finished_ps)
        ]
    scheduled, first_token, finished = times / PS_PER_SECOND
    replayed = RequestTimes(
        requests.arrived, requests.prompt_tokens, requests.output_tokens, scheduled, first_token, finished
    )
    return replayed, worker.totals.num_steps


class RecordedSteps:
    """The recorded time of each step whose shape was recorded, and another model's of every other.

    Steps have the same shape if they have equal decodes and KV tokens, or equal prompt tokens and attention.

    Args:
        steps: the log.
        others: model for steps that are not in the log.

    Attributes:
        num_others: number of such steps.
    """

    name = "recorded"

    def __init__(self, steps: Iterable[EngineStep], others: StepTimeModel) -> None:
        self._step_ps = {
            (step.prefill_tokens, round(2 * step.prefill_pairs), step.num_decodes, step.decode_kv_tokens): round(
                step.seconds * PS_PER_SECOND
            )
            for step in steps
        }
        self._others = others
        self.num_others = 0

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration."""
        tokens = sum(chunk.new_tokens for chunk in batch.prefills)
        half_pairs = sum(chunk.new_tokens * (2 * chunk.past_tokens + chunk.new_tokens) for chunk in batch.prefills)
        found = self._step_ps.get((tokens, half_pairs, batch.num_decodes, batch.decode_kv_tokens))
        if found is not None:
            return found
        self.num_others += 1
        return self._others.step_ps(batch)

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration undivided."""
        return StepCost(whole=self.step_ps(batch))

    def decode_segment(
        self,
        num_decodes: int,
        kv_tokens: int,
        max_kv_tokens: int,
        lora: LoraWork = NO_LORA,
        *,
        num_held: int = 0,
        longest_grows: bool = True,
    ) -> None:
        """Return None: every step has its own time."""
        del num_decodes, kv_tokens, max_kv_tokens, lora, num_held, longest_grows


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
