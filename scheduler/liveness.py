"""Whether an attached worker is alive, and makes progress with its plan.

A heartbeat shows that a worker's event loop runs, not that its GPU does. So a worker that has a plan must also show
progress: a step's end, or a heartbeat that says when the current step ends. The first such promise after each progress
counts; a later one cannot postpone the end. Lost is

    a worker that is silent                              for timeout_seconds
    a worker with a plan, neither step nor promise       for timeout_seconds since the plan or the step before
    a worker with a plan, whose promised end has passed  by timeout_seconds

No clock here: `now` is in wall seconds of the scheduler's `UptimeClock`.
"""

from enum import StrEnum


class Loss(StrEnum):
    """Why a scheduler ends a worker's stream; values of the metrics' label `reason`."""

    SILENT = "silent"
    STALLED = "stalled"
    ERROR = "error"
    PROTOCOL = "protocol"
    SUPERSEDED = "superseded"
    FAULT = "fault"


class Watch:
    """Monitors one worker.

    Args:
        timeout_seconds: after which it is lost.
        now: when it attached.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._heard = now
        self._plan_id = 0
        self._progress_due: float | None = None
        self._promised = False

    def heard(self, now: float) -> None:
        """Record a message of any kind."""
        self._heard = now

    def has_plan(self, plan_id: int, now: float) -> None:
        """Expect the first step of a plan."""
        self._plan_id = plan_id
        self.progressed(now)

    def progressed(self, now: float) -> None:
        """Record a step's end; expect the next."""
        self._progress_due = now + self._timeout_seconds
        self._promised = False

    def has_no_plan(self) -> None:
        """Expect heartbeats only: it waits for the scheduler."""
        self._progress_due = None

    def promised(self, plan_id: int, in_seconds: float, now: float) -> None:
        """Record a heartbeat that says in how many seconds the current step ends."""
        if plan_id == self._plan_id and self._progress_due is not None and not self._promised:
            self._promised = True
            self._progress_due = now + max(0.0, in_seconds) + self._timeout_seconds

    @property
    def due(self) -> float:
        """When the worker is lost if nothing more comes."""
        silent = self._heard + self._timeout_seconds
        return silent if self._progress_due is None else min(silent, self._progress_due)

    def loss(self, now: float) -> Loss | None:
        """Return why the worker is lost, if it is."""
        if now < self.due:
            return None
        return Loss.SILENT if now >= self._heard + self._timeout_seconds else Loss.STALLED
