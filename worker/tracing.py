"""The spans of a worker: prefill and decode of the sequences whose requests are traced, in device time.

Spans are updated when a plan arrives and when a step ends. A step that neither prefills nor finishes a traced sequence
costs one dict look-up. The spans of a worker that is killed are lost; the scheduler's `run` span covers the same time.
"""

from collections.abc import Iterable

from lorrery.service.telemetry.spans import Span, TraceContext, Value
from lorrery.service.telemetry.tracing import NS_PER_SECOND, Tracer
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.pacer import Plan, StepReport


class _Traced:
    """A traced sequence on this worker.

    Attributes:
        began_ps: start of its prefill; None: not started.
        first_ps: end of its prefill; None: not finished.
    """

    __slots__ = ("attributes", "began_ps", "first_ps", "num_chunks", "parent", "prefilled_tokens")

    def __init__(self, parent: TraceContext, attributes: dict[str, Value]) -> None:
        self.parent = parent
        self.attributes = attributes
        self.began_ps: int | None = None
        self.first_ps: int | None = None
        self.num_chunks = self.prefilled_tokens = 0


class SequenceTraces:
    """Makes the spans of one attachment's sequences.

    Args:
        tracer: receives the spans.
        worker: name of the worker.
        time_scale: wall seconds per device second.
        sent_ps: a device time.
        sent_unix_ns: the same instant as Unix time on the scheduler's clock, so that both processes' spans share one
            time line.
    """

    def __init__(self, tracer: Tracer, worker: str, time_scale: float, sent_ps: int, sent_unix_ns: int) -> None:
        self._tracer, self._worker = tracer, worker
        self._ns_per_ps = time_scale * NS_PER_SECOND / PS_PER_SECOND
        self._sent_ps, self._sent_unix_ns = sent_ps, sent_unix_ns
        self._traced: dict[int, _Traced] = {}
        self._chunks: dict[int, tuple[_Traced, int, bool]] = {}

    def __bool__(self) -> bool:
        """Whether any sequence here is traced."""
        return bool(self._traced)

    def planned(self, plan: Plan, parents: Iterable[tuple[int, TraceContext]]) -> None:
        """Record a plan that begins.

        Args:
            plan: the plan.
            parents: for each traced sequence that joins: handle, and the span context of its run.
        """
        for handle in plan.leaves:
            if (left := self._traced.pop(handle, None)) is not None:
                self._end(left, plan.start_ps, None)
        by_handle = dict(parents)
        for sequence in plan.joins if by_handle else ():
            if (parent := by_handle.get(sequence.handle)) is not None:
                self._traced[sequence.handle] = _Traced(parent, self._describe(sequence))
        self._chunks = {
            chunk.handle: (traced, chunk.new_tokens, chunk.samples)
            for chunk in plan.prefills
            if (traced := self._traced.get(chunk.handle)) is not None
        }

    def stepped(self, report: StepReport) -> None:
        """Record a finished step; only the first step of a plan has prefill chunks."""
        if report.end_ps == report.start_ps:
            return
        if self._chunks:
            for traced, new_tokens, samples in self._chunks.values():
                traced.num_chunks += 1
                traced.prefilled_tokens += new_tokens
                if traced.began_ps is None:
                    traced.began_ps = report.start_ps
                if samples:
                    traced.first_ps = report.end_ps
                    self._prefill(traced, report.end_ps)
            self._chunks = {}
        for handle, reason in report.outcome.finished:
            if (traced_one := self._traced.pop(handle, None)) is not None:
                self._end(traced_one, report.end_ps, reason)

    def detached(self, at_ps: int) -> None:
        """End the open spans: the stream to the scheduler is over."""
        for traced in self._traced.values():
            self._end(traced, at_ps, None)
        self._traced.clear()

    def _describe(self, sequence: DeviceSequence) -> dict[str, Value]:
        return {
            "lorrery.worker": self._worker,
            "lorrery.adapter": sequence.adapter_key,
            "lorrery.adapter_rank": sequence.adapter_rank,
        }

    def _prefill(self, traced: _Traced, to_ps: int) -> None:
        assert traced.began_ps is not None
        said: dict[str, Value] = {
            "lorrery.prefill_chunks": traced.num_chunks,
            "lorrery.computed_tokens": traced.prefilled_tokens,
        }
        self._keep("prefill", traced, traced.began_ps, to_ps, said)

    def _end(self, traced: _Traced, at_ps: int, reason: FinishReason | None) -> None:
        """End the span of a sequence; `reason` is None if the sequence left before it finished."""
        if traced.first_ps is not None:
            said: dict[str, Value] = {} if reason is None else {"gen_ai.response.finish_reasons": (reason.word,)}
            self._keep("decode", traced, traced.first_ps, at_ps, said)
        elif traced.began_ps is not None:
            self._prefill(traced, at_ps)

    def _keep(self, name: str, traced: _Traced, from_ps: int, to_ps: int, attributes: dict[str, Value]) -> None:
        begin_ns, end_ns = self._unix_ns(from_ps), self._unix_ns(max(from_ps, to_ps))
        said = traced.attributes | attributes
        self._tracer.end(Span(name, traced.parent.child(), traced.parent, begin_ns, end_ns, said))

    def _unix_ns(self, at_ps: int) -> int:
        return self._sent_unix_ns + round((at_ps - self._sent_ps) * self._ns_per_ps)
