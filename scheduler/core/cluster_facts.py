"""The facts of a whole scheduler: where requests go, and which workers come and leave. See `core.facts`."""

from dataclasses import dataclass
from typing import Any

from lorrery.scheduler.core.facts import Cancelled, Event, Finished
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.candidate import Figures
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@dataclass(slots=True)
class Arrived:
    """A sequence has come to the scheduler.

    Attributes:
        resumed: a scheduler that is gone had accepted it.
        accepted: whether more is to come of it than that it was refused; also if only a placement's error refuses it.
    """

    sequence: Sequence
    resumed: bool = False
    accepted: bool = True


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
        on_arrival: whether it was never accepted.
    """

    sequence: Sequence
    refusal: Refusal
    error: Exception | None = None
    figures: dict[str, Figures] | None = None
    on_arrival: bool = False


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
class Joined:
    """A worker has attached.

    Attributes:
        origin: the driver's record of it.
    """

    member: Member
    origin: Any = None


@dataclass(frozen=True, slots=True)
class GaveBack:
    """A worker is gone, or takes no new sequences from now on.

    Attributes:
        lost: whether it is gone.
        sequences: that it has given back, queued again; the facts returned with this record say where they went.
        events: of sequences that ended at that moment.
    """

    member: Member
    lost: bool
    sequences: list[Sequence]
    events: list[Event]
