"""State that the parts of a simulation share: its clock with its scheduled events, and its requests."""

from collections import deque
from collections.abc import Callable
from heapq import heappush

from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.units import NEVER


class Clock:
    """Holds the current time; only the simulation's loop advances it.

    Attributes:
        now_ps: the time.
        coming: a heap of scheduled events: (time, number, callback).
    """

    def __init__(self) -> None:
        self.now_ps = 0
        self.coming: list[tuple[int, int, Callable[[], None]]] = []
        self._turn_ps = -1
        self._turn = 0
        self._num_coming = 0

    def take_turn(self, at_ps: int, order: int) -> None:
        """Advance to a worker's boundary."""
        self.now_ps = at_ps
        if self._turn_ps != at_ps:
            self._turn_ps, self._turn = at_ps, order
        elif order > self._turn:
            self._turn = order

    def has_passed(self, at_ps: int, order: int) -> bool:
        """Return whether a worker's boundary at this time, if it has one, has already had its turn."""
        return self._turn_ps == at_ps and order < self._turn

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Schedule a callback at a time; of two at one time, the one scheduled first runs first."""
        heappush(self.coming, (at_ps, self._num_coming, happen))
        self._num_coming += 1


class OpenRequests:
    """A simulation's requests: those that have arrived and not ended, their deadlines, and those that have just ended.

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
            self.close(handle, OUTCOME_OF_REFUSAL[refusal.reason], refusal.message)

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


OUTCOME_OF_REFUSAL = {
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
