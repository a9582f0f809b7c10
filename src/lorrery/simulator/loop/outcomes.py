"""Collects the results of simulated requests in the columns that reports are built from, and gaps between tokens."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.distribution import Chunks, Distribution, describe
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK, Labels, OutcomeTable
from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Cancelled, Failed, Handler, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Phases, Sequence
from lorrery.service.faults.rules import NO_FAULTS
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import RunBegan, StepSpan
from lorrery.simulator.spilled_rows import RowColumns, SpilledRows
from lorrery.vocabulary.endings import FinishReason
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


class GapRecorder:
    """Gathers the gaps between tokens (inter-token latency) of a whole run; its memory does not grow with the run.

    They are computed from steps, without storing each token: a span of steps adds a few rows of
    `loadgen.workload.progressions`, which spill to a file once there are many.

    Within a span of decode steps every sequence has a gap of one step. The first of these gaps reaches back to each
    sequence's last token: in the previous decode step or, for sequences that joined since, at the end of their prefill.
    A requeued sequence has a gap from its last token to the end of its next prefill.
    """

    reads_prompts = False

    def __init__(self) -> None:
        self._begin()

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            RunBegan: self._begin,
            StepSpan: self._ran,
            Cancelled: self._left,
            Failed: self._left,
            Preempted: self._preempted,
            GaveBack: self._gave_back,
        }

    def _begin(self, *_: object) -> None:
        """Discard everything recorded so far."""
        self._rows = SpilledRows(4)
        self._decoded_ps: dict[str, int] = {}  # worker -> end of its last decode step
        self._since_ps: dict[str, dict[int, int]] = {}  # worker -> handle -> last token, if joined since
        self._requeued_ps: dict[int, int] = {}  # handle -> last token

    def _ran(self, span: StepSpan, at_ps: int, member: Member | None) -> None:
        """Record the gaps that these steps ended."""
        since = self._since_ps.setdefault(span.worker, {})
        first_end_ps = span.start_ps + span.first_ps
        if span.num_decodes:
            self._decoded(span, since, first_end_ps)
        if self._requeued_ps:
            self._recomputed(span, first_end_ps)
        for handle in span.newcomers:
            since[handle] = first_end_ps

    def _recomputed(self, span: StepSpan, first_end_ps: int) -> None:
        """End the gaps of requeued sequences whose prompts end here, also of those that this token finishes."""
        for chunk in span.plan.prefills:
            handle = chunk.sequence.handle
            token_ps = self._requeued_ps.pop(handle, None) if chunk.samples else None
            if token_ps is not None and handle not in span.silent and handle not in span.gone:
                self._add(first_end_ps - token_ps, 0, 1, 1)

    def _decoded(self, span: StepSpan, since: dict[int, int], first_end_ps: int) -> None:
        num_steps, num_decodes = span.num_steps, span.num_decodes
        silent = set(span.silent)
        silent.update(span.gone)
        if silent:
            silent.difference_update(chunk.sequence.handle for chunk in span.plan.prefills)
        num_silent = len(silent)
        last_ps = self._decoded_ps.get(span.worker, 0)
        for handle, token_ps in since.items():
            if num_steps > 1 or handle not in silent:
                self._add(first_end_ps - token_ps, 0, 1, 1)
        num_others = num_decodes - (len(since) if num_steps > 1 else len(silent.union(since)))
        self._add(first_end_ps - last_ps, 0, 1, num_others)
        since.clear()
        num_full = num_steps - 1 - (num_silent > 0)
        if num_full > 0:
            self._add(span.first_ps + span.slope_ps, span.slope_ps, num_full, num_decodes)
        if num_silent and num_steps > 1:
            last_step_ps = span.first_ps + span.slope_ps * (num_steps - 1)
            self._add(last_step_ps, 0, 1, num_decodes - num_silent)
        self._decoded_ps[span.worker] = span.end_ps

    def _left(self, fact: Cancelled | Failed, at_ps: int, member: Member | None) -> None:
        """Drop a sequence that left its batch other than at the end of a step that gave it a token."""
        if member is not None:
            self._since_ps.get(member.name, {}).pop(fact.sequence.handle, None)

    def _preempted(self, fact: Preempted, at_ps: int, member: Member | None) -> None:
        if member is not None:
            self._requeued(member.name, fact.sequence)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        if fact.lost:
            for sequence in fact.sequences:
                self._requeued(fact.member.name, sequence)
            self._since_ps.pop(fact.member.name, None)

    def _requeued(self, worker: str, sequence: Sequence) -> None:
        """Store the time of its last token."""
        token_ps = self._since_ps.get(worker, {}).pop(sequence.handle, None)
        if sequence.produced_tokens:
            self._requeued_ps.setdefault(sequence.handle, token_ps or self._decoded_ps.get(worker, 0))

    def _add(self, first_ps: int, slope_ps: int, num_gaps: int, num_sequences: int) -> None:
        assert num_sequences >= 0
        if num_sequences:
            self._rows.add((first_ps, slope_ps, num_gaps, num_sequences))

    @property
    def chunks(self) -> Chunks:
        """All gaps as rows: first gap, increment of each further gap, number of gaps, number of sequences; in ps."""
        return self._rows.chunks

    def itl_ms(self) -> Distribution:
        """Return the distribution of all gaps, in milliseconds."""
        return describe(self.chunks, lambda gap_ps: gap_ps / PS_PER_SECOND * 1e3)
