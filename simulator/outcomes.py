"""Lays out what became of simulated requests as the columns that reports are made of."""

from array import array

import numpy as np

from lorrery.chassis.fault_rules import NO_FAULTS
from lorrery.loadgen.workload.distribution import Distribution
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK
from lorrery.loadgen.workload.outcome_table import OutcomeTable
from lorrery.scheduler.core.phases import Phases
from lorrery.simulator.request import SimulatedRequest
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

_NONE = -1
_COLUMNS = (
    "index",
    "prompt",
    "output",
    "cached",
    "requeues",
    "sent",
    "queue",
    "load",
    "prefill",
    "decode",
    "first",
    "last",
    "end",
)
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
"""Outcome -> the status that a client of the live cluster sees."""


class OutcomeRecorder:
    """Takes requests as they end, in any order, and keeps their figures only.

    Args:
        start_ps: when the run began; all times count from there.
    """

    def __init__(self, start_ps: int = 0) -> None:
        self._start_ps = start_ps
        self._numbers = array("q")  # row by row
        self._status: list[str] = []
        self._adapter_id: list[str | None] = []
        self._tenant_id: list[str] = []
        self._worker: list[str] = []
        self._reason: list[FinishReason | None] = []
        self._detail: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._status)

    def add(self, request: SimulatedRequest) -> None:
        """Take note of one that has ended."""
        sequence = request.sequence
        left_ps = request.finished_ps if request.left_ps is None else request.left_ps
        phases = _NO_PHASES
        if left_ps is not None and sequence.first_admitted_ps is not None:
            phases = sequence.phases(left_ps)
        row = (  # in the order of `_COLUMNS`
            request.handle,
            sequence.prompt_tokens,
            request.output_tokens,
            sequence.first_cached_tokens,
            sequence.num_requeues,
            sequence.arrived_ps - request.faults.delay_ps,
            *phases,
            _NONE if sequence.first_token_ps is None else sequence.first_token_ps,
            _last_token_ps(request),
            _NONE if request.finished_ps is None else request.finished_ps,
        )
        self._numbers.extend(row)
        if request.detail:
            self._detail[len(self._status)] = request.detail
        self._status.append(STATUS[request.outcome or ""] if request.faults is NO_FAULTS else _status(request))
        self._adapter_id.append(None if sequence.adapter is None else sequence.adapter.adapter_id)
        self._tenant_id.append(sequence.tenant_id)
        self._worker.append(request.worker)
        self._reason.append(request.reason)

    def table(self, itl_ms: Distribution) -> OutcomeTable:
        """Return all, in order of index; `itl_ms`: of the gaps between their tokens."""
        numbers = np.array(self._numbers, np.int64).reshape(-1, len(_COLUMNS)).T
        column = dict(zip(_COLUMNS, numbers, strict=True))
        order = np.argsort(column["index"], kind="stable")
        column = {name: values[order] for name, values in column.items()}
        rows = order.tolist()
        sent, end, first, last = (
            np.where(column[name] == _NONE, np.nan, (column[name] - self._start_ps) / PS_PER_SECOND)
            for name in ("sent", "end", "first", "last")
        )
        queue, load, prefill, decode = (
            np.where(column[name] == _NONE, np.nan, column[name] / PS_PER_SECOND)
            for name in ("queue", "load", "prefill", "decode")
        )
        detail = {position: self._detail[row] for position, row in enumerate(rows) if row in self._detail}
        return OutcomeTable(
            index=column["index"],
            status=[self._status[row] for row in rows],
            adapter_id=[self._adapter_id[row] for row in rows],
            tenant_id=[self._tenant_id[row] for row in rows],
            prompt_tokens=column["prompt"],
            output_tokens=column["output"],
            cached_tokens=column["cached"],
            num_messages=column["output"],
            num_requeues=column["requeues"],
            intended_seconds=sent,
            sent_seconds=sent,
            first_token_seconds=first,
            last_token_seconds=last,
            end_seconds=end,
            queue_seconds=queue,
            adapter_load_seconds=load,
            prefill_seconds=prefill,
            decode_seconds=decode,
            worker_id=[self._worker[row] for row in rows],
            finish_reason=["" if reason is None else reason.word for reason in (self._reason[row] for row in rows)],
            token_ids_crc32=[None] * len(rows),
            detail=detail,
            itl_ms=itl_ms,
        )


def _status(request: SimulatedRequest) -> str:
    faults = request.faults
    if request.outcome == "faulted" and (fault := faults.refusal or faults.cut) is not None:
        return fault.status
    return STATUS[request.outcome or ""]


def _last_token_ps(request: SimulatedRequest) -> int:
    if request.outcome != "finished":
        return _NONE  # it is not known when its last token came
    last_ps = request.finished_ps if request.last_token_ps is None else request.last_token_ps
    assert last_ps is not None
    return last_ps
