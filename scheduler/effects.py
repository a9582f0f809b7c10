"""When arrivals, cancels and the like take effect on one worker, and which of them do so too late.

The rule (docs/simulator.md): at the first boundary at or after their stamp. The worker runs ahead of what the
scheduler knows, so an Interrupt may reach it when it has already sent the tokens of a further step; the event then
takes effect at a later boundary.
"""

from collections.abc import Collection
from dataclasses import dataclass

NEVER_PS = -1
NOBODY = -1
"""Used in place of a handle for an event without a request."""


@dataclass(slots=True)
class Awaited:
    """An arrival, a cancel or the like that has to take effect on the worker.

    Attributes:
        number: of the input, on this worker.
        handle: of the request; `NOBODY`: of none.
        at_ps: its stamp.
        missed: number of plans made before it came that should have included it: those at the boundary of the last
            plan, if that is not before its stamp.
        due_ps: the boundary at which it should take effect, once known; `NEVER_PS`: that had passed when it came.
        overdue: whether the worker ran on beyond that boundary.
    """

    number: int
    handle: int
    at_ps: int
    missed: int
    due_ps: int | None = None
    overdue: bool = False


class Effects:
    """Tracks one worker's boundaries and the events that wait for one."""

    def __init__(self) -> None:
        self.awaited: list[Awaited] = []
        self._boundary_ps = NEVER_PS
        self._planned_ps = NEVER_PS
        self._num_planned = 0  # at that boundary

    @property
    def any_overdue(self) -> bool:
        """Whether an event should have taken effect already."""
        return any(event.overdue for event in self.awaited)

    def missed(self, at_ps: int) -> bool:
        """Return whether a plan has already been made that should have included an event of this time.

        That happens if the worker's clock is ahead of the scheduler's, as it may be on another host.
        """
        return at_ps <= self._planned_ps

    def passed(self, at_ps: int) -> bool:
        """Return whether the boundary at which an event of this time should take effect is known to have passed."""
        return at_ps <= self._boundary_ps

    def expect(self, number: int, handle: int, at_ps: int) -> None:
        """Wait for the effect of an event that has just come."""
        event = Awaited(number, handle, at_ps, self._num_planned if self.missed(at_ps) else 0)
        if self.passed(at_ps):
            event.due_ps, event.overdue = NEVER_PS, True
        self.awaited.append(event)

    def stepped(self, end_ps: int) -> None:
        """Note that a step ended, and that the worker did not stop at the boundary before."""
        self._boundary_ps = end_ps
        for event in self.awaited:
            if event.due_ps is not None:
                event.overdue = True
            elif event.at_ps <= end_ps:
                event.due_ps = end_ps

    def planned(self, at_ps: int) -> list[Awaited]:
        """Record a plan at this boundary; return the events that take effect there, but should have earlier."""
        if at_ps != self._planned_ps:
            self._num_planned = 0
            for event in self.awaited:
                event.missed = 0
        self._num_planned += 1
        self._boundary_ps = max(self._boundary_ps, at_ps)
        self._planned_ps = at_ps
        if not self.awaited:
            return []
        late = [event for event in self.awaited if event.at_ps <= at_ps and event.overdue]
        self.awaited = [event for event in self.awaited if event.at_ps > at_ps]
        return late

    def withdrawn(self, handles: Collection[int]) -> list[Awaited]:
        """Forget the events of requests that leave the worker; return those that should have taken effect earlier."""
        gone = [event for event in self.awaited if event.handle in handles]
        self.awaited = [event for event in self.awaited if event.handle not in handles]
        return [event for event in gone if event.overdue]
