"""Gaps between tokens (inter-token latency) of a simulated run, from its steps: nothing is kept for each token.

A span of steps leaves some rows of `loadgen.workload.progressions`, which are in a file once there are many.

Within a span of decode steps every sequence has a gap of one step. In the first of them the gap goes back to each
one's last token: to the decode step before or, for those that came since, to the end of their own prefill. A sequence
that was queued again has a gap from its last token to the end of its next prefill.
"""

from lorrery.loadgen.workload.distribution import Distribution
from lorrery.loadgen.workload.progressions import Chunks, describe
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.spilled_rows import SpilledRows
from lorrery.simulator.step_span import StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND


class GapRecorder:
    """Gathers gaps of a whole run; its memory does not grow with the run."""

    reads_prompts = False

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, start_ps: int) -> None:
        """Forget all that was."""
        del start_ps  # a gap has no origin
        self._rows = SpilledRows(4)
        self._decoded_ps: dict[str, int] = {}  # worker -> end of its last decode step
        self._since_ps: dict[str, dict[int, int]] = {}  # worker -> handle -> last token, of those who came since
        self._requeued_ps: dict[int, int] = {}  # handle -> last token

    def ran(self, span: StepSpan) -> None:
        """Take note of the gaps that these steps ended."""
        since = self._since_ps.setdefault(span.worker, {})
        first_end_ps = span.start_ps + span.first_ps
        if span.num_decodes:
            self._decoded(span, since, first_end_ps)
        for handle in span.newcomers:
            since[handle] = first_end_ps
            if self._requeued_ps and (token_ps := self._requeued_ps.pop(handle, None)) is not None:
                self._add(first_end_ps - token_ps, 0, 1, 1)

    def _decoded(self, span: StepSpan, since: dict[int, int], first_end_ps: int) -> None:
        num_steps, num_decodes = span.num_steps, span.num_decodes
        silent = set(span.silent)
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

    def left(self, worker: str, handle: int) -> None:
        """Forget one that left its batch other than by the end of a step that gave it a token."""
        self._since_ps.get(worker, {}).pop(handle, None)

    def requeued(self, worker: str, request: SimulatedRequest) -> None:
        """Remember when it got its last token."""
        token_ps = self._since_ps.get(worker, {}).pop(request.handle, None)
        if request.produced_tokens:
            self._requeued_ps.setdefault(request.handle, token_ps or self._decoded_ps.get(worker, 0))

    def lost(self, worker: str) -> None:
        """Forget a worker's batch."""
        self._since_ps.pop(worker, None)

    def _add(self, first_ps: int, slope_ps: int, num_gaps: int, num_sequences: int) -> None:
        assert num_sequences >= 0
        if num_sequences:
            self._rows.add((first_ps, slope_ps, num_gaps, num_sequences))

    @property
    def chunks(self) -> Chunks:
        """All of them: the first gap, what each further one is longer by, how many, sequences that have them; in ps."""
        return self._rows.chunks

    def itl_ms(self) -> Distribution:
        """Describe them all, in milliseconds."""
        return describe(self.chunks, lambda gap_ps: gap_ps / PS_PER_SECOND * 1e3)
