"""Collects the results of simulated requests in the columns that reports are built from."""

from collections.abc import Hashable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.distribution import Distribution
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK, Labels, OutcomeTable
from lorrery.scheduler.core.sequence import Phases
from lorrery.service.faults.rules import NO_FAULTS
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.spilled_rows import RowColumns
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

_NONE = -1
_NUMBERS = ("index", "prompt", "output", "cached", "requeues")
_TIMES = ("sent", "first", "last", "end")
_SPANS = ("queue", "load", "prefill", "decode")
_LABELS = ("status", "adapter", "tenant", "worker", "reason")
_PRIORITY = "priority"
_KINDS: dict[str, type[np.int64] | type[np.int32]] = {}
_KINDS |= dict.fromkeys((*_NUMBERS, *_TIMES, *_SPANS), np.int64) | dict.fromkeys((*_LABELS, _PRIORITY), np.int32)
T = TypeVar("T", bound=Hashable)
_NO_PHASES = Phases(_NONE, _NONE, _NONE, _NONE)

STATUS = {
    "finished": OK,
    "cancelled": "CANCELLED",
    "timed out": "DEADLINE_EXCEEDED",
    "dropped": "RESOURCE_EXHAUSTED",
    "refused": "INVALID_ARGUMENT",
    "unknown adapter": "NOT_FOUND",
    "queue full": "RESOURCE_EXHAUSTED",
    "no adapter": "UNAVAILABLE",
    "no worker": "UNAVAILABLE",
    "draining": "UNAVAILABLE",
    "failed": "INTERNAL",
    "interrupted": INTERRUPTED,
}
"""Outcome -> status that a client of the live cluster would see."""


class OutcomeRecorder:
    """Takes requests as they end, in any order, and keeps only their figures.

    Args:
        start_ps: start of the run, the origin of all times.
    """

    def __init__(self, start_ps: int = 0) -> None:
        self._start_ps = start_ps
        self._rows = RowColumns(_KINDS)
        self._status = Codes[str]()
        self._adapter_id = Codes[str | None]()
        self._tenant_id = Codes[str]()
        self._worker = Codes[str]()
        self._reason = Codes[FinishReason | None]()
        self._detail: dict[int, str] = {}  # by index

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: SimulatedRequest) -> None:
        """Record an ended request."""
        sequence, first_ps = request.sequence, request.first_token_ps
        left_ps = request.finished_ps if request.left_ps is None else request.left_ps
        phases = _NO_PHASES
        if left_ps is not None and sequence.first_admitted_ps is not None:
            phases = sequence.phases(left_ps)
        if request.detail:
            self._detail[request.handle] = request.detail
        status = STATUS[request.outcome or ""] if request.faults is NO_FAULTS else _status(request)
        self._rows.add((  # in the order of `_KINDS`
            request.handle,
            sequence.prompt_tokens,
            request.output_tokens,
            sequence.first_cached_tokens,
            sequence.num_requeues,
            request.sent_ps,
            _NONE if first_ps is None else first_ps,
            _last_token_ps(request),
            _NONE if request.finished_ps is None else request.finished_ps,
            *phases,
            self._status[status],
            self._adapter_id[None if sequence.adapter is None else sequence.adapter.adapter_id],
            self._tenant_id[sequence.tenant_id],
            self._worker[request.worker],
            self._reason[request.reason],
            sequence.priority,
        ))  # fmt: skip

    def table(self, itl_ms: Distribution) -> OutcomeTable:
        """Return all rows in order of index, and drop them; `itl_ms`: distribution of the gaps between their tokens."""
        column = self._rows.take(sort_by="index")
        sent, first, last, end = (_seconds(column.pop(name), self._start_ps) for name in _TIMES)
        queue, load, prefill, decode = (_seconds(column.pop(name), 0) for name in _SPANS)
        index, prompt, output, cached, requeues = (column.pop(name) for name in _NUMBERS)
        detail = {}
        if self._detail:
            detail = {row: self._detail[one] for row, one in enumerate(index.tolist()) if one in self._detail}
        words = ["" if reason is None else reason.word for reason in self._reason]
        return OutcomeTable(
            index=index,
            status=Labels(column["status"], list(self._status)),
            adapter_id=Labels(column["adapter"], list(self._adapter_id)),
            tenant_id=Labels(column["tenant"], list(self._tenant_id)),
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=cached,
            num_messages=output,
            num_requeues=requeues,
            intended_seconds=sent,
            sent_seconds=sent,
            first_token_seconds=first,
            last_token_seconds=last,
            end_seconds=end,
            queue_seconds=queue,
            adapter_load_seconds=load,
            prefill_seconds=prefill,
            decode_seconds=decode,
            worker_id=Labels(column["worker"], list(self._worker)),
            finish_reason=Labels(column["reason"], words),
            token_ids_crc32=Labels(np.broadcast_to(np.int32(0), len(index)), [None]),
            detail=detail,
            itl_ms=itl_ms,
            priority=column[_PRIORITY],
        )


class Codes(dict[T, int]):
    """Numbers values in the order of their first lookup."""

    def __missing__(self, value: T) -> int:
        code = self[value] = len(self)
        return code


def _seconds(column_ps: npt.NDArray[np.int64], start_ps: int) -> npt.NDArray[np.float64]:
    """Convert a column to seconds from a start, NaN for missing values; in place if the column is writeable."""
    if not column_ps.flags.writeable:  # all alike
        return np.broadcast_to(_seconds(column_ps[:1].copy(), start_ps), len(column_ps))
    seconds = column_ps.view(np.float64)
    unknown = column_ps == _NONE
    column_ps -= start_ps
    np.divide(column_ps, PS_PER_SECOND, out=seconds)
    seconds[unknown] = np.nan
    return seconds


def _status(request: SimulatedRequest) -> str:
    faults = request.faults
    if request.outcome == "faulted" and (fault := faults.refusal or faults.cut) is not None:
        return fault.status
    return STATUS[request.outcome or ""]


def _last_token_ps(request: SimulatedRequest) -> int:
    if request.outcome != "finished":
        return _NONE  # the time of its last token is not known
    last_ps = request.finished_ps if request.last_token_ps is None else request.last_token_ps
    assert last_ps is not None
    return last_ps
