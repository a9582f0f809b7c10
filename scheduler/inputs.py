"""When what is handed to a worker takes effect, and which of it does so too late.

The rule (docs/simulator.md): at the first boundary at or after its stamp. The worker runs ahead of what the scheduler
knows, so an Interrupt may reach it when it has already sent the tokens of a further step; the input then takes effect
at a later boundary. Such inputs are counted, and recorded with the boundary at which they did.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lorrery.scheduler.core.cluster_facts import Placed, Withdrawn
from lorrery.scheduler.core.inbox import LoadOnRequest, Recall, Retire
from lorrery.scheduler.facts import InputLate, InputTaken

NEVER_PS = -1
NOBODY = -1
"""Used in place of a handle for an input without a request."""


@dataclass(slots=True)
class Awaited:
    """An input that has to take effect on the worker.

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

    @property
    def late(self) -> InputLate:
        """The fact that it took effect too late."""
        return InputLate(self.number, self.handle, self.missed)

    @property
    def never(self) -> InputLate:
        """The fact that it left before it took effect."""
        return InputLate(self.number, self.handle, self.missed, never=True)


class Inputs:
    """Tracks one worker's boundaries and the inputs that wait for one.

    Attributes:
        awaited: these inputs.
    """

    def __init__(self) -> None:
        self.awaited: list[Awaited] = []
        self._num = 0
        self._boundary_ps = NEVER_PS
        self._planned_ps = NEVER_PS
        self._num_planned = 0  # at that boundary

    @property
    def any_overdue(self) -> bool:
        """Whether an input should have taken effect already."""
        return any(one.overdue for one in self.awaited)

    def missed(self, at_ps: int) -> bool:
        """Return whether a plan has already been made that should have included an input of this time.

        That happens if the worker's clock is ahead of the scheduler's, as it may be on another host.
        """
        return at_ps <= self._planned_ps

    def take(
        self, what: Placed | Withdrawn | Recall | Retire | LoadOnRequest, at_ps: int, *, expected: bool, lost: bool
    ) -> InputTaken:
        """Wait for the effect of an input that has just come.

        Args:
            what: the input.
            at_ps: its stamp.
            expected: whether it should take effect at the next boundary.
            lost: whether the worker's stream is about to end, so that there will be no boundary.
        """
        number, self._num = self._num, self._num + 1
        has_passed = at_ps <= self._boundary_ps
        if expected and not lost:
            handle = _handle(what)
            one = Awaited(number, handle, at_ps, self._num_planned if self.missed(at_ps) else 0)
            if has_passed:
                one.due_ps, one.overdue = NEVER_PS, True
            self.awaited.append(one)
        return InputTaken(number, what, lost or (expected and has_passed))

    def stepped(self, end_ps: int) -> None:
        """Note that a step ended, and that the worker did not stop at the boundary before."""
        self._boundary_ps = end_ps
        for one in self.awaited:
            if one.due_ps is not None:
                one.overdue = True
            elif one.at_ps <= end_ps:
                one.due_ps = end_ps

    def planned(self, at_ps: int) -> list[InputLate]:
        """Record a plan at this boundary; return what takes effect there, but should have earlier."""
        if at_ps != self._planned_ps:
            self._num_planned = 0
            for one in self.awaited:
                one.missed = 0
        self._num_planned += 1
        self._boundary_ps = max(self._boundary_ps, at_ps)
        self._planned_ps = at_ps
        if not self.awaited:
            return []
        late = [one.late for one in self.awaited if one.at_ps <= at_ps and one.overdue]
        self.awaited = [one for one in self.awaited if one.at_ps > at_ps]
        return late

    def left(self, handles: Collection[int]) -> list[InputLate]:
        """Forget the inputs of requests that leave the worker; return those that should have taken effect earlier."""
        gone = [one for one in self.awaited if one.handle in handles]
        self.awaited = [one for one in self.awaited if one.handle not in handles]
        return [one.never for one in gone if one.overdue]

    def lost(self) -> list[InputLate]:
        """Return what should have taken effect before the worker was lost."""
        return [one.never for one in self.awaited if one.overdue]


def _handle(what: Placed | Withdrawn | Recall | Retire | LoadOnRequest) -> int:
    if isinstance(what, Recall):
        return what.handle
    return what.sequence.handle if isinstance(what, (Placed, Withdrawn)) else NOBODY
