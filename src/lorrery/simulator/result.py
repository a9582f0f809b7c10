"""The Python result of a simulation: counts, a summary, and columns with one row per request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.report import LoadReport, Scaling, SimulationCost
from lorrery.loadgen.report_files import write_report
from lorrery.loadgen.workload.outcome import OK, OutcomeTable
from lorrery.loadgen.workload.summary import Summary
from lorrery.simulator.arguments import read_path
from lorrery.vocabulary.adapters import FiguresByAdapter

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RequestColumns", "SimulationResult", "data_frame"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """One row per request, in order of `index`; every array has shape (requests,). Times are device seconds.

    Attributes:
        index: position in the workload; for your own requests, the row.
        status: what a client of the live cluster would see: `OK`, `RESOURCE_EXHAUSTED`, ...
        adapter_id: empty for the base model.
        tenant_id: empty if it has none.
        worker_id: the worker of the last token; empty if there was none.
        finish_reason: `length`, `eos`, ...; empty if it did not finish.
        detail: why a request failed; empty otherwise.
        output_tokens: tokens generated.
        cached_tokens: prompt tokens found in a prefix cache at first admission.
        num_requeues: how often a lost worker or a preemption sent it back to the queue.
        arrival_seconds: from the start of the run, after the warm-up.
        queue_seconds: arrival to first admission, less `adapter_load_seconds`. It and the next three add up to the
            request's time in the scheduler, and are NaN if it was never admitted.
        adapter_load_seconds: time before its first token in which it waited only for its adapter.
        prefill_seconds: first admission to first token, less `adapter_load_seconds`.
        decode_seconds: first token to end.
        ttft_seconds: first token - arrival; NaN without a first token.
        tpot_seconds: (E2E - TTFT) / (output tokens - 1); NaN below 2 tokens.
        e2e_seconds: last token - arrival; NaN unless it finished.
        end_seconds: when it ended, for whatever reason.
    """

    index: Ints
    status: Texts
    adapter_id: Texts
    tenant_id: Texts
    worker_id: Texts
    finish_reason: Texts
    detail: Texts
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    num_requeues: Ints
    arrival_seconds: Floats
    queue_seconds: Floats
    adapter_load_seconds: Floats
    prefill_seconds: Floats
    decode_seconds: Floats
    ttft_seconds: Floats
    tpot_seconds: Floats
    e2e_seconds: Floats
    end_seconds: Floats

    def __len__(self) -> int:
        return len(self.index)

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Shape (requests,): whether each finished with its full output."""
        completed: npt.NDArray[np.bool_] = self.status == OK
        return completed

    def as_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, table: OutcomeTable) -> "RequestColumns":
        """Build the columns from a report's table."""
        arrival, first, last = table.intended_seconds, table.first_token_seconds, table.last_token_seconds
        tokens = table.output_tokens
        tpot = np.divide(last - first, tokens - 1, out=np.full(len(table), np.nan), where=tokens > 1)
        return cls(
            index=table.index,
            status=table.status.as_text(),
            adapter_id=table.adapter_id.as_text(lambda adapter_id: adapter_id or ""),
            tenant_id=table.tenant_id.as_text(),
            worker_id=table.worker_id.as_text(),
            finish_reason=table.finish_reason.as_text(),
            detail=_texts(table.detail.get(row, "") for row in range(len(table))),
            prompt_tokens=table.prompt_tokens,
            output_tokens=tokens,
            cached_tokens=table.cached_tokens,
            num_requeues=table.num_requeues,
            arrival_seconds=arrival,
            queue_seconds=table.queue_seconds,
            adapter_load_seconds=table.adapter_load_seconds,
            prefill_seconds=table.prefill_seconds,
            decode_seconds=table.decode_seconds,
            ttft_seconds=first - arrival,
            tpot_seconds=tpot,
            e2e_seconds=last - arrival,
            end_seconds=table.end_seconds,
        )


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """A finished simulation.

    Attributes:
        report: the full report, as `lorrery simulate` prints and writes it.
    """

    report: LoadReport

    def __len__(self) -> int:
        return len(self.report.outcomes)

    def __repr__(self) -> str:
        summary = self.summary
        return (
            f"<SimulationResult: {summary.num_completed:,} of {summary.num_requests:,} requests completed in"
            f" {summary.duration_seconds:,.1f} s, {summary.output_tokens_per_second:,.0f} output tokens/s>"
        )

    @cached_property
    def columns(self) -> RequestColumns:
        """Figures of every request, as NumPy arrays."""
        return RequestColumns.of(self.report.outcomes)

    @property
    def summary(self) -> Summary:
        """Rates, means and percentiles; `loadgen.workload.summary` has the formulas."""
        return self.report.summary

    @property
    def cost(self) -> SimulationCost:
        """Cost of the simulation itself: CPU seconds, steps, plans."""
        cost = self.report.simulation
        assert cost is not None
        return cost

    @property
    def counts(self) -> dict[str, int]:
        """Requests by outcome, tokens, requeues, steps and plans."""
        summary, cost = self.summary, self.cost
        return {
            "num_requests": summary.num_requests,
            "num_completed": summary.num_completed,
            "num_failed": summary.num_failed,
            "num_interrupted": summary.num_interrupted,
            "num_skipped": self.report.num_skipped,
            "num_requeues": summary.num_requeues,
            "input_tokens": summary.input_tokens,
            "output_tokens": summary.output_tokens,
            "cached_tokens": summary.cached_tokens,
            "num_steps": cost.num_steps,
            "num_plans": cost.num_plans,
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks that the figures must be read with."""
        return self.report.warnings

    def to_pandas(self) -> "pd.DataFrame":
        """Return the columns as a data frame, one row per request.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.columns.as_dict())

    @property
    def scaling(self) -> Scaling | None:
        """The autoscaler's decisions and the GPU hours; None: the number of workers was fixed."""
        return self.report.scaling

    @property
    def adapters(self) -> FiguresByAdapter:
        """Loads, evictions and stays by adapter, those with any; all workers together."""
        return self.report.adapters or {}

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files of `lorrery simulate --out` into a folder, without its page; return their paths.

        Raises:
            LorreryError: they cannot be written.
        """
        return write_report(self.report, read_path("folder", folder))


def _texts(values: Iterable[str]) -> Texts:
    return np.array(list(values), np.str_)


def data_frame(columns: Mapping[str, npt.NDArray[Any]]) -> "pd.DataFrame":
    """Return columns as a data frame.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ImportError("to_pandas() needs pandas (pip install pandas); .columns has the same arrays") from None
    return pd.DataFrame(dict(columns))
