"""The facts that only the live scheduler has, beside those of `core.facts`: inputs, decisions, steps, faults."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lorrery.scheduler.core.cluster_facts import Placed, Withdrawn
from lorrery.scheduler.core.facts import Event
from lorrery.scheduler.core.inbox import LoadOnRequest, Recall, Retire
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.messages import StepReport

Input = Placed | Withdrawn | Recall | Retire | LoadOnRequest
"""What is handed to a worker's replica."""


@dataclass(frozen=True, slots=True)
class InputTaken:
    """Something was handed to a worker's replica, to take effect at a boundary.

    Attributes:
        number: of the input, on this worker.
        what: the input.
        overdue: whether the boundary at which it should have taken effect has passed.
    """

    number: int
    what: Input
    overdue: bool


@dataclass(frozen=True, slots=True)
class InputLate:
    """An input took effect later than it should have.

    Attributes:
        number: of the input.
        handle: of its request; `steps.NOBODY`: it has none.
        missed: plans already made at that boundary.
        never: it left before it took effect.
    """

    number: int
    handle: int
    missed: int
    never: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """A worker's next plan, or that it has none.

    Attributes:
        cpu_seconds: CPU time of the core.
    """

    decision: Plan | Idle
    cpu_seconds: float


@dataclass(slots=True)
class Stepped:
    """A worker has run a step.

    Attributes:
        plan: that it belongs to.
        step: as reported.
        num_tokens: tokens that it produced.
        gap_ps: how long the worker stood still before it.
        cpu_seconds: CPU time of the core to commit it.
        events: facts of the commit, which follow.
    """

    plan: Plan
    step: StepReport
    num_tokens: int
    gap_ps: int
    cpu_seconds: float
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class FaultsSet:
    """An operator has set faults; each that begins is a `FaultBegan` of its own.

    Attributes:
        rules: a text each.
        from_ps: from when they hold.
        add: whether those set before stay active.
    """

    rules: Collection[str]
    from_ps: int
    add: bool
