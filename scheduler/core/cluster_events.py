"""Decisions of `scheduler.core.cluster`, for its drivers to carry out."""

from dataclasses import dataclass

from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Cancelled, Event, Finished
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.core.watched_candidate import Figures
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Placed:
    """A sequence is in the inbox of a worker.

    Attributes:
        member: the worker.
        matters: whether it may change the plan that runs there.
        why: the placement's reason; empty if there was no choice.
        figures: what the placement read of each candidate, by name in order of attaching; None: it was not called, or
            figures are not recorded.
        moved_from: the worker at which it waited before, if this is a move and not a choice of the placement.
    """

    sequence: Sequence
    member: Member
    matters: bool
    why: str
    figures: dict[str, Figures] | None
    moved_from: str

    def __init__(
        self,
        sequence: Sequence,
        member: Member,
        matters: bool,
        why: str = "",
        figures: dict[str, Figures] | None = None,
        moved_from: str = "",
    ) -> None:
        self.sequence = sequence
        self.member = member
        self.matters = matters
        self.why = why
        self.figures = figures
        self.moved_from = moved_from


@dataclass(frozen=True, slots=True)
class Refused:
    """A sequence was not accepted, or may not stay; it holds nothing.

    Attributes:
        refusal: the reason.
        error: the placement's exception, if that is the reason.
        figures: what it had read of each candidate until then, as in `Placed`.
    """

    sequence: Sequence
    refusal: Refusal
    error: Exception | None = None
    figures: dict[str, Figures] | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A cancel is in the inbox of the worker that has the sequence; an event of that worker will report its end.

    Attributes:
        refusal: why the scheduler withdrew it; None: its client did.
    """

    sequence: Sequence
    member: Member
    refusal: Refusal | None = None


ClusterEvent = Placed | Refused | Withdrawn | Cancelled | Finished
"""The last two: a request that no worker had was cancelled, and has by its cause not finished, or finished."""


@dataclass(frozen=True, slots=True)
class GaveBack:
    """What a worker that drains or is gone has given back.

    Attributes:
        sequences: queued again; the events returned with this record say where they went.
        events: of sequences that ended at that moment.
    """

    member: Member
    sequences: list[Sequence]
    events: list[Event]
