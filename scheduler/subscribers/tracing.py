"""The spans of a scheduler: how a request's time divides between its arrival and its end, in device time.

    schedule                from arrival to end, below the router's span of the request
      placement             until it has a worker, on arrival and each time it has to go elsewhere
      queue                 from there to its admission into a batch, less
      adapter_load          while it lacks only its adapter; with blocking loads, a part of `run`
      cache_query           at its admission: cached part of its input; takes no device time
      run                   in a worker's batch, to its end, preemption or loss; the worker's own spans are below it

Device times are mapped to the wall clock by the device clock, so the spans of one request add up to the picosecond
before they are rounded.
"""

from collections.abc import Mapping
from typing import Protocol

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.cluster_facts import Arrived, GaveBack, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Admitted, Cancelled, Dropped, Failed, Finished, FirstToken, Handler, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.clocks import DeviceClock
from lorrery.service.telemetry.spans import Kind, Span, SpanEvent, TraceContext, Value
from lorrery.service.telemetry.tracing import Tracer
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_EVENTS = 100
"""Most events of one span: a request that is preempted a thousand times has the first ones, and the number."""


class RequestTraces:
    """Makes the spans of a scheduler's requests.

    Args:
        tracer: receives them; None: tracing is off.
        clock: device clock.
        lives: the scheduler's requests, by handle; each has its trace.
    """

    def __init__(self, tracer: Tracer | None, clock: DeviceClock, lives: Mapping[int, "Traced"]) -> None:
        self._tracer, self._clock, self._lives = tracer, clock, lives

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        if self._tracer is None:
            return {}
        return {
            Arrived: self._arrived,
            Placed: self._placed,
            Refused: self._refused,
            Withdrawn: self._withdrawn,
            Admitted: self._admitted,
            FirstToken: self._first_token,
            Preempted: self._preempted,
            Finished: self._finished,
            Cancelled: self._cancelled,
            Dropped: self._dropped,
            Failed: self._failed,
            GaveBack: self._gave_back,
        }

    def unix_ns(self, at_ps: int) -> int:
        """Return a device time as Unix time; 0: tracing is off."""
        return 0 if self._tracer is None else self._tracer.unix_ns(self._clock.to_monotonic(at_ps))

    def close(self, at_ps: int) -> None:
        """Make the spans of unfinished requests."""
        for live in self._lives.values():
            if live.trace is not None:
                live.trace.ended(at_ps)
                live.trace = None

    def _of(self, sequence: Sequence) -> "RequestTrace | None":
        live = self._lives.get(sequence.handle)
        return None if live is None else live.trace

    def _arrived(self, fact: Arrived, at_ps: int, member: Member | None) -> None:
        live = self._lives[fact.sequence.handle]
        if self._tracer is not None and live.context is not None and live.context.sampled:
            live.trace = RequestTrace(self._tracer, self._clock, live, live.context, resumed=fact.resumed)

    def _placed(self, fact: Placed, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.placed(fact.member.name, fact.why, at_ps)

    def _refused(self, fact: Refused, at_ps: int, member: Member | None) -> None:
        self._fail(fact.sequence, fact.refusal, at_ps)

    def _withdrawn(self, fact: Withdrawn, at_ps: int, member: Member | None) -> None:
        if fact.refusal is not None and (trace := self._of(fact.sequence)) is not None:
            trace.refused(fact.refusal)

    def _admitted(self, fact: Admitted, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.admitted(at_ps, has_cache=member is not None and member.replica.prefix_cache is not None)

    def _first_token(self, fact: FirstToken, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.first_token(fact.at_ps)

    def _preempted(self, fact: Preempted, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.preempted(at_ps)

    def _finished(self, fact: Finished, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.finished(fact.reason, fact.output_tokens, fact.at_ps)
            trace.ended(fact.at_ps)

    def _cancelled(self, fact: Cancelled, at_ps: int, member: Member | None) -> None:
        if (trace := self._of(fact.sequence)) is not None:
            trace.ended(at_ps)

    def _dropped(self, fact: Dropped, at_ps: int, member: Member | None) -> None:
        self._fail(fact.sequence, refusals.dropped(fact.sequence, fact.reason), at_ps)

    def _failed(self, fact: Failed, at_ps: int, member: Member | None) -> None:
        self._fail(fact.sequence, refusals.raised(fact.message), at_ps)

    def _fail(self, sequence: Sequence, refusal: Refusal, at_ps: int) -> None:
        if (trace := self._of(sequence)) is not None:
            trace.refused(refusal)
            trace.ended(at_ps)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        why = "worker_lost" if fact.lost else "worker_draining"
        for sequence in fact.sequences:
            if (trace := self._of(sequence)) is not None:
                trace.given_back(why, at_ps)


class Traced(Protocol):
    """A request of the scheduler, as far as its spans say something about it."""

    sequence: Sequence
    request_id: str
    adapter_id: str
    context: TraceContext | None
    trace: "RequestTrace | None"


class RequestTrace:
    """One request, from its arrival to its end in this scheduler."""

    def __init__(
        self, tracer: Tracer, clock: DeviceClock, live: Traced, parent: TraceContext, *, resumed: bool
    ) -> None:
        sequence = live.sequence
        self._tracer, self._clock, self._parent, self._sequence = tracer, clock, parent, sequence
        self._context = parent.child()
        self._attributes: dict[str, Value] = {
            "gen_ai.request.id": live.request_id,
            "lorrery.adapter": live.adapter_id,
            "lorrery.tenant": sequence.tenant_id,
            "lorrery.prompt_tokens": sequence.prompt_tokens,
            "lorrery.resumed": resumed,
        }
        self._events: list[SpanEvent] = []
        self._error: str | None = None
        self._finished_ps: int | None = None
        self._num_preemptions = 0
        self._load_ps = 0  # waits for its adapter that already have a span
        self._adapter = {"lorrery.adapter": live.adapter_id}
        self._since_ps = sequence.arrived_ps
        self._worker = ""
        self._run: TraceContext | None = None
        self._run_from_ps: int | None = None
        self._run_events: list[SpanEvent] = []

    @property
    def trace_id(self) -> str:
        """The trace id that histograms show with its times."""
        return self._context.trace_id

    # --- what happens -----------------------------------------------------------------------------------------------

    def placed(self, worker: str, why: str, at_ps: int) -> None:
        """Record the worker at which it waits from now on."""
        if self._worker:  # it waited for another
            self._event("moved", at_ps, {"lorrery.from": self._worker, "lorrery.worker": worker})
            self._end_wait(at_ps)
        said: dict[str, Value] = {"lorrery.worker": worker}
        if why:
            said["lorrery.why"] = why
        self._end("placement", at_ps, said)
        self._worker = worker

    def run_context(self) -> TraceContext:
        """Return the span of its run, to which a worker's spans belong."""
        if self._run is None:
            self._run = self._context.child()
        return self._run

    def admitted(self, at_ps: int, *, has_cache: bool) -> None:
        """Record its admission into its worker's batch."""
        sequence = self._sequence
        self._end_wait(at_ps)
        if has_cache:
            cached = {"lorrery.input_tokens": sequence.input_tokens, "lorrery.cached_tokens": sequence.cached_tokens}
            self._end("cache_query", at_ps, cached)
        self.run_context()
        self._run_from_ps = at_ps

    def first_token(self, at_ps: int) -> None:
        """Record its first token."""
        self._run_events.append(self._made("first_token", at_ps, {}))

    def preempted(self, at_ps: int) -> None:
        """Record that it has lost its place in the batch, and waits again."""
        self._num_preemptions += 1
        self._event("preempted", at_ps, {"lorrery.worker": self._worker})
        self._end_run(at_ps, "preempted")

    def given_back(self, why: str, at_ps: int) -> None:
        """Record that its worker is gone, or accepts no more, and it needs another."""
        self._event("requeued", at_ps, {"lorrery.worker": self._worker, "lorrery.why": why})
        if self._run_from_ps is not None:
            self._end_run(at_ps, why, error=why)
        elif self._worker:
            self._end_wait(at_ps)
        self._worker = ""

    def finished(self, reason: FinishReason, output_tokens: int, at_ps: int) -> None:
        """Record why and when it has ended by itself."""
        self._finished_ps = at_ps
        self._attributes["gen_ai.response.finish_reasons"] = (reason.word,)
        self._attributes["lorrery.output_tokens"] = output_tokens

    def refused(self, refusal: Refusal) -> None:
        """Record why it is about to end with an error."""
        self._attributes["error.type"] = refusal.reason.name
        self._error = f"{refusal.reason.name}: {refusal.message}"

    def ended(self, at_ps: int) -> None:
        """Make the remaining spans; it ends now, unless it has ended by itself."""
        at_ps = at_ps if self._finished_ps is None else self._finished_ps
        said = self._attributes
        if self._run_from_ps is not None:
            self._end_run(at_ps, error=self._error)
        elif self._worker:
            self._end_wait(at_ps)
        elif not self._error:
            self._end("placement", at_ps, {})
        sequence = self._sequence
        if "gen_ai.response.finish_reasons" not in said and self._error is None:
            said["gen_ai.response.finish_reasons"] = (FinishReason.ABORTED.word,)
        if sequence.withdrawal is not None:
            said["lorrery.cancel_cause"] = sequence.withdrawal.cause.word
        said["lorrery.worker"] = self._worker
        said["lorrery.cached_tokens"] = sequence.first_cached_tokens
        said["lorrery.num_requeues"] = sequence.num_requeues
        said["lorrery.num_preemptions"] = self._num_preemptions
        phases = sequence.phases(at_ps)
        for name, phase_ps in phases._asdict().items():
            said[f"lorrery.{name.removesuffix('_ps')}_seconds"] = phase_ps / PS_PER_SECOND
        self._keep("schedule", self._context, self._parent, sequence.arrived_ps, at_ps, said, self._events, self._error)

    # --- spans ------------------------------------------------------------------------------------------------------

    def _end_wait(self, at_ps: int) -> None:
        """End its wait at its worker: in the queue, and part of it for its adapter."""
        sequence, where = self._sequence, {"lorrery.worker": self._worker}
        waited_ps = sequence.phases(at_ps).adapter_load_ps - self._load_ps if sequence.first_token_ps is None else 0
        if waited_ps > 0:
            self._load_ps += waited_ps
            from_ps = max(self._since_ps, min(sequence.load_wait_ps, at_ps - waited_ps))
            self._end("queue", from_ps, where)
            self._end("adapter_load", min(from_ps + waited_ps, at_ps), where | self._adapter)
        if waited_ps <= 0 or self._since_ps < at_ps:
            self._end("queue", at_ps, where)

    def _end_run(self, at_ps: int, why: str = "", error: str | None = None) -> None:
        assert self._run_from_ps is not None
        said: dict[str, Value] = {"lorrery.worker": self._worker}
        if why:
            said["lorrery.why"] = why
        context, from_ps = self.run_context(), self._run_from_ps
        load_ps = self._sequence.phases(at_ps).adapter_load_ps - self._load_ps
        if load_ps > 0:  # its prefill step waited for it
            self._load_ps += load_ps
            self._keep("adapter_load", context.child(), context, from_ps, from_ps + load_ps, self._adapter)
        self._keep("run", context, self._context, from_ps, at_ps, said, self._run_events, error)
        self._run = self._run_from_ps = None
        self._run_events = []
        self._since_ps = max(self._since_ps, at_ps)

    def _end(self, name: str, at_ps: int, attributes: Mapping[str, Value]) -> None:
        """Make a span from the end of the last one to `at_ps`."""
        self._keep(name, self._context.child(), self._context, self._since_ps, at_ps, attributes)
        self._since_ps = max(self._since_ps, at_ps)

    def _keep(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext,
        from_ps: int,
        to_ps: int,
        attributes: Mapping[str, Value],
        events: list[SpanEvent] | None = None,
        error: str | None = None,
    ) -> None:
        begin_ns = self._unix_ns(from_ps)
        end_ns = self._unix_ns(max(from_ps, to_ps))
        kind = Kind.SERVER if parent is self._parent else Kind.INTERNAL
        self._tracer.end(Span(name, context, parent, begin_ns, end_ns, attributes, kind, events or (), error))

    def _event(self, name: str, at_ps: int, attributes: Mapping[str, Value]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(self._made(name, at_ps, attributes))

    def _made(self, name: str, at_ps: int, attributes: Mapping[str, Value]) -> SpanEvent:
        return SpanEvent(name, self._unix_ns(at_ps), attributes)

    def _unix_ns(self, at_ps: int) -> int:
        return self._tracer.unix_ns(self._clock.to_monotonic(at_ps))
