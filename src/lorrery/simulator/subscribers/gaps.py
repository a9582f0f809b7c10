"""Gaps between tokens (inter-token latency) of a simulated run, computed from its steps without storing each token.

A span of steps adds a few rows of `loadgen.workload.progressions`, which spill to a file once there are many.

Within a span of decode steps every sequence has a gap of one step. The first of these gaps reaches back to each
sequence's last token: in the previous decode step or, for sequences that joined since, at the end of their prefill. A
requeued sequence has a gap from its last token to the end of its next prefill.
"""

from collections.abc import Mapping

from lorrery.loadgen.workload.distribution import Chunks, Distribution, describe
from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Cancelled, Failed, Handler, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.spilled_rows import SpilledRows
from lorrery.simulator.subscribers.step_span import RunBegan, StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND


class GapRecorder:
    """Gathers the gaps of a whole run; its memory does not grow with the run."""

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
