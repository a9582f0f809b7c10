"""Request faults in a simulation, by the rules that a router follows live (`service.faults.kinds`).

Refusals and delays apply before the scheduler receives a request. A cut ends the output early, so the scheduler sees
the same as when a router cancels. A stall changes nothing in the cluster, only when the client receives tokens. It
needs the time of one token, found from the spans of steps; gaps between tokens (ITL) leave stalls out.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Cancelled, Failed, Handler, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.service.faults.kinds import Fault
from lorrery.service.faults.rules import NO_FAULTS, FaultRules, RequestFaults, together
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.state import Clock, OpenRequests
from lorrery.simulator.loop.worker import StepSpan
from lorrery.worker.device.output import Ending


class Hold(NamedTuple):
    """A stall of one request: output after its first `after` tokens is held back until a time."""

    after: int
    until_ps: int


class RequestFaultInjector:
    """Chooses each request's faults, and computes until when stalls hold its output back.

    A subscriber of the simulation, if there are stalls.

    Args:
        faults: of any kind; only those of requests apply.
        begin_ps: origin of their times.
    """

    def __init__(self, faults: Iterable[Fault], begin_ps: int) -> None:
        self._rules = FaultRules(faults)
        self._begin_ps = begin_ps
        self._decoding: dict[str, dict[int, SimulatedRequest]] = {}  # worker -> handle
        self._num_tokens: dict[int, int] = {}  # handle -> output so far
        self._stalls: dict[int, list[Fault]] = {}  # handle -> stalls still to come
        self._stalled: dict[int, SimulatedRequest] = {}
        self._holds: dict[int, list[Hold]] = {}  # by handle, in order

    @property
    def has_rules(self) -> bool:
        """Whether any request can have a fault."""
        return bool(self._rules.faults)

    def choose(self, request: SimulatedRequest, at_ps: int) -> RequestFaults:
        """Choose the faults of a request that its client sends now, and apply those that change its end."""
        adapter_id = "" if request.adapter is None else request.adapter.adapter_id
        faults = together(self._rules.choose(request.tenant_id, adapter_id, at_ps - self._begin_ps))
        if faults is NO_FAULTS:
            return faults
        request.faults = faults
        cut, ending = faults.cut, request.ending
        if cut is not None and cut.after <= ending.output_tokens:
            request.ending = Ending(max(cut.after, 1), ending.reason)
        if faults.stalls:
            self._stalls[request.handle] = list(faults.stalls)
            self._stalled[request.handle] = request
        return faults

    def take_holds(self, request: SimulatedRequest) -> list[Hold]:
        """Return, once, the stalls that held back the output of an ended request, in order."""
        handle = request.handle
        self._stalls.pop(handle, None)
        self._num_tokens.pop(handle, None)
        self._stalled.pop(handle, None)
        for decoding in self._decoding.values():
            decoding.pop(handle, None)
        return self._holds.pop(handle, [])

    # --- what happens -----------------------------------------------------------------------------------------------

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            StepSpan: self._ran,
            Cancelled: self._left,
            Failed: self._left,
            Preempted: self._left,
            GaveBack: self._gave_back,
        }

    def _ran(self, span: StepSpan, at_ps: int, member: Member | None) -> None:
        """Find the times of the tokens after which stalls begin."""
        if not self._stalled:
            return
        decoding = self._decoding.setdefault(span.worker, {})
        if span.num_decodes:
            for handle, request in decoding.items():
                steps = min(span.num_steps, request.ending.output_tokens - self._num_tokens[handle])
                self._tokens(handle, steps, span)
        for handle in span.newcomers:
            request_or_none = self._stalled.get(handle)
            if request_or_none is not None:
                decoding[handle] = request_or_none
                self._num_tokens.setdefault(handle, 0)
                self._tokens(handle, 1, span)

    def _tokens(self, handle: int, num_tokens: int, span: StepSpan) -> None:
        """Count tokens of the first steps of a span."""
        before = self._num_tokens[handle]
        self._num_tokens[handle] = before + num_tokens
        stalls = self._stalls[handle]
        while stalls and stalls[0].after <= before + num_tokens:
            fault = stalls.pop(0)
            if fault.after >= self._stalled[handle].ending.output_tokens:
                continue  # the stream has ended by then
            steps = fault.after - before
            token_ps = span.start_ps + steps * span.first_ps + span.slope_ps * (steps * (steps - 1) // 2)
            holds = self._holds.setdefault(handle, [])
            begin_ps = max(token_ps, holds[-1].until_ps) if holds else token_ps
            holds.append(Hold(fault.after, begin_ps + fault.duration_ps))

    def _left(self, fact: Cancelled | Failed | Preempted, at_ps: int, member: Member | None) -> None:
        """Drop a sequence that has ended, or gets its next token in another batch."""
        if member is not None:
            self._decoding.get(member.name, {}).pop(fact.sequence.handle, None)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        if fact.lost:
            self._decoding.pop(fact.member.name, None)


class FaultyRequests:
    """Stands between clients and schedulers.

    Args:
        injector: chooses the faults.
        clock: of the simulation.
        requests: of the simulation.
        submit: submits a request to its scheduler.
    """

    def __init__(
        self,
        injector: RequestFaultInjector,
        clock: Clock,
        requests: OpenRequests,
        submit: Callable[[SimulatedRequest], None],
    ) -> None:
        self._injector = injector
        self._clock = clock
        self._requests = requests
        self._submit = submit
        self._delayed: set[int] = set()  # handles not yet submitted to a scheduler

    def take(self, request: SimulatedRequest) -> bool:
        """Choose the faults of a request sent now; return whether it has any and is handled here."""
        if self._injector.choose(request, self._clock.now_ps) is NO_FAULTS:
            return False
        self._requests.by_handle[request.handle] = request
        self._delayed.add(request.handle)
        request.arrived_ps = self._clock.now_ps + request.faults.delay_ps
        self._clock.at(request.arrived_ps, partial(self._let_through, request))
        self._requests.expire_in_time(request)
        return True

    def _let_through(self, request: SimulatedRequest) -> None:
        if request.handle not in self._delayed:
            return  # its client no longer waits
        self._delayed.remove(request.handle)
        if (refusal := request.faults.refusal) is not None:
            self._requests.close(request.handle, "faulted", refusal.text)
        else:
            self._submit(request)

    def cancel(self, request: SimulatedRequest) -> bool:
        """Cancel a request not yet submitted to a scheduler; return whether it was one."""
        if request.handle not in self._delayed:
            return False
        self._delayed.remove(request.handle)
        self._requests.withdraw(request.handle)
        return True

    def finish(self, request: SimulatedRequest) -> None:
        """End a request whose stream a fault may have cut or still hold back.

        A request without an outcome did not finish: its client has left.
        """
        requests, cut, holds = self._requests, request.faults.cut, self._injector.take_holds(request)
        if request.outcome is None:
            requests.withdraw(request.handle)
            assert request.finished_ps is not None
            if cut is not None and request.output_tokens >= max(cut.after, 1):  # static batching held it
                request.outcome, request.detail, request.output_tokens = "faulted", cut.text, cut.after
                request.finished_ps = request.last_token_ps
            else:
                request.output_tokens = _tokens_released(request, holds, request.finished_ps)
            return
        assert request.finished_ps is not None
        if cut is not None and request.output_tokens >= cut.after:
            request.outcome, request.reason, request.detail = "faulted", None, cut.text
            request.output_tokens = cut.after
        last_ps = request.finished_ps if request.last_token_ps is None else request.last_token_ps
        released_ps = holds[-1].until_ps if holds else 0
        if released_ps <= last_ps:
            requests.ended.append(request)
            return
        request.last_token_ps = released_ps
        request.left_ps = request.finished_ps
        request.finished_ps = max(request.finished_ps, released_ps)
        if requests.timeout_ps is not None and request.finished_ps > request.sent_ps + requests.timeout_ps:
            request.finished_ps, request.reason = request.sent_ps + requests.timeout_ps, None
            request.outcome, request.detail = "timed out", "deadline exceeded"
            request.output_tokens = _tokens_released(request, holds, request.finished_ps)
        self._clock.at(request.finished_ps, partial(requests.ended.append, request))


def _tokens_released(request: SimulatedRequest, holds: Iterable[Hold], at_ps: int) -> int:
    """Return how many of a request's tokens no stall held back at this time."""
    return min([request.output_tokens, *(hold.after for hold in holds if hold.until_ps > at_ps)])
