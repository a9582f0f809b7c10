"""Applies request faults to simulated requests: late arrivals, refusals, cut and stalled streams."""

from collections.abc import Callable, Iterable
from functools import partial

from lorrery.service.faults.rules import NO_FAULTS
from lorrery.simulator.clock import Clock
from lorrery.simulator.open_requests import OpenRequests
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.request_faults import Hold, RequestFaultInjector


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
                request.output_tokens = _tokens_let_go(request, holds, request.finished_ps)
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
            request.output_tokens = _tokens_let_go(request, holds, request.finished_ps)
        self._clock.at(request.finished_ps, partial(requests.ended.append, request))


def _tokens_let_go(request: SimulatedRequest, holds: Iterable[Hold], at_ps: int) -> int:
    """Return how many of a request's tokens no stall held back at this time."""
    return min([request.output_tokens, *(hold.after for hold in holds if hold.until_ps > at_ps)])
