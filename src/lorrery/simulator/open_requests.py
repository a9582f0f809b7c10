"""A simulation's requests: those that have arrived and not ended, their deadlines, and those that have just ended."""

from collections import deque

from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.simulator.clock import Clock
from lorrery.simulator.request import SimulatedRequest
from lorrery.vocabulary.units import NEVER


class OpenRequests:
    """See the module.

    Args:
        clock: of the simulation.
        timeout_ps: how long clients wait.

    Attributes:
        by_handle: requests that have not ended.
        ended: ended requests, until the simulation's loop has yielded them.
        deadlines: requests in order of their deadlines, which is order of sending since all share one timeout.
        timeout_ps: None: clients wait for ever.
    """

    def __init__(self, clock: Clock, timeout_ps: int | None) -> None:
        self.by_handle: dict[int, SimulatedRequest] = {}
        self.ended: list[SimulatedRequest] = []
        self.deadlines: deque[SimulatedRequest] = deque()
        self.timeout_ps = None if timeout_ps is None or timeout_ps >= NEVER else timeout_ps
        self._clock = clock

    def expire_in_time(self, request: SimulatedRequest) -> None:
        """Start the timeout of a request that its client sends now."""
        if self.timeout_ps is not None:
            self.deadlines.append(request)

    def due_ps(self) -> int:
        """Return the first deadline; there must be one."""
        assert self.timeout_ps is not None
        return self.deadlines[0].sent_ps + self.timeout_ps

    def refuse(self, handle: int, refusal: Refusal) -> None:
        """End a request as refused, or as timed out if its deadline has passed."""
        request, now_ps = self.by_handle[handle], self._clock.now_ps
        ended_ps = now_ps if request.finished_ps is None else request.finished_ps
        timeout_ps, has_deadline = self.timeout_ps, request.sequence.deadline_ps is not None
        if timeout_ps is not None and has_deadline and ended_ps >= request.sent_ps + timeout_ps:
            self.close(handle, "timed out", "deadline exceeded")
        else:
            self.close(handle, _REFUSED[refusal.reason], refusal.message)

    def withdraw(self, handle: int) -> None:
        """End a request whose client no longer waits for it."""
        request = self.by_handle[handle]
        if request.refusal is not None:
            self.refuse(handle, request.refusal)
        else:
            self.close(handle, "timed out" if request.detail else "cancelled", request.detail)

    def close(self, handle: int, outcome: str, detail: str) -> None:
        """End a request: now, or when its client left."""
        request = self.by_handle.pop(handle)
        request.outcome, request.detail = outcome, detail
        if request.finished_ps is None:
            request.finished_ps = self._clock.now_ps
            request.output_tokens = request.produced_tokens  # that its client has got
        self.ended.append(request)


_REFUSED = {
    RefusalReason.INVALID: "refused",
    RefusalReason.NEVER_FITS: "refused",
    RefusalReason.UNKNOWN_ADAPTER: "unknown adapter",
    RefusalReason.QUEUE_FULL: "queue full",
    RefusalReason.QUOTA_EXCEEDED: "queue full",
    RefusalReason.NO_WORKER: "no worker",
    RefusalReason.DRAINING: "draining",
    RefusalReason.SLO_UNATTAINABLE: "dropped",
    RefusalReason.ADAPTER_LOAD: "no adapter",
    RefusalReason.WORKERS_LOST: "failed",
    RefusalReason.INTERNAL: "failed",
}
"""Refusal reason -> outcome of the request."""
