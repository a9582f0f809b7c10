"""The plan that a worker runs: its progress, and which step may come next."""

from collections.abc import Callable

from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.messages import ProtocolError, StepReport
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_AHEAD_PS = 3600 * PS_PER_SECOND
"""A worker's clock may be ahead of its scheduler's, but a step that ends over an hour from now has not been run."""


class RunningPlan:
    """See the module.

    Args:
        plan: of the core.
        plan_id: its number on the stream.

    Attributes:
        steps_left: steps that may still come.
        interrupted: whether the worker has been sent an Interrupt.
    """

    __slots__ = ("interrupted", "plan", "plan_id", "steps_left")

    def __init__(self, plan: Plan, plan_id: int) -> None:
        self.plan = plan
        self.plan_id = plan_id
        self.steps_left = plan.max_steps
        self.interrupted = False

    @property
    def fresh(self) -> bool:
        """Whether no step of it has been reported."""
        return self.steps_left == self.plan.max_steps

    def expected_start_ps(self, boundary_ps: int) -> int:
        """Return when its next step begins, unless the worker stands still; `boundary_ps`: the end of its last one."""
        return self.plan.at_ps if self.steps_left == self.plan.max_steps else boundary_ps

    def check(self, step: StepReport, boundary_ps: int, now_ps: Callable[[], int]) -> None:
        """Check that a step follows the one before, belongs to the plan, and does not end in the distant future.

        Args:
            step: as reported by the worker.
            boundary_ps: the end of the one before.
            now_ps: reads the device clock; most steps end so soon after the one before that it need not be read.

        Raises:
            ProtocolError: it does not.
        """
        boundary_ps = self.expected_start_ps(boundary_ps)
        start_ps, end_ps = step.start_ps, step.ran.end_ps
        latest_ps = boundary_ps + MAX_AHEAD_PS
        if end_ps > latest_ps:
            latest_ps = max(latest_ps, now_ps() + MAX_AHEAD_PS)
        if not boundary_ps <= start_ps <= end_ps <= latest_ps:
            raise ProtocolError(
                f"the worker has a step from {start_ps} to {end_ps} ps; the one before ended at"
                f" {boundary_ps}, and {latest_ps} has not come"
            )
        if end_ps > start_ps and not self.steps_left:
            raise ProtocolError(f"the worker ran more than the {self.plan.max_steps} steps of plan {self.plan_id}")
