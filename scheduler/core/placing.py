"""Where sequences go: to one of the workers that could hold it, or to the waiting room while none can.

A single worker gets what it can hold; among several the placement chooses (`placements/`). What it raises ends the
sequence, not the driver.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from functools import partial
from typing import Final

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.checked.base import error_text
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed, Refused
from lorrery.scheduler.core.member import Member, class_name
from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.placements.candidate import Figures, ReplicaCandidate, WatchedCandidate
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.placements.worker_table import FEW, WorkerTable
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND


class WaitingRoom:
    """Sequences without a worker: those that none can take now, and those about to be placed.

    They are in the order in which their waits end, which is the order of arrival here. When a worker attaches, or
    sequences come back from one, waiting ones are tried in order. There may be ten thousand of them, so a caller tries
    as many at a time as it likes; meanwhile they can be cancelled, and others can arrive.
    """

    __slots__ = ("_untried", "_waits")

    def __init__(self) -> None:
        self._waits: OrderedDict[int, tuple[int, Sequence]] = OrderedDict()  # by handle: (end of the wait, sequence)
        self._untried: deque[int] = deque()  # handles; may include some that have left

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def until_ps(self) -> int | None:
        """When the first wait is over; None: nothing waits."""
        for until_ps, _ in self._waits.values():
            return until_ps
        return None

    @property
    def has_untried(self) -> bool:
        """Whether a sequence is still to be tried."""
        untried = self._untried
        while untried and untried[0] not in self._waits:
            untried.popleft()
        return len(untried) > 0

    def waiting(self) -> list[Sequence]:
        """Return all sequences, in order."""
        return [sequence for _, sequence in self._waits.values()]

    def put(self, sequence: Sequence, until_ps: int) -> None:
        """Add a sequence that waits until `until_ps`, which is no earlier than that of the last one added."""
        self._waits[sequence.handle] = until_ps, sequence

    def put_untried(self, sequence: Sequence, until_ps: int) -> None:
        """Add a sequence that is to be tried."""
        self.put(sequence, until_ps)
        self._untried.append(sequence.handle)

    def wait_until(self, until_ps: int) -> None:
        """Let all current waits end at this time, which may be now."""
        for handle, (_, sequence) in self._waits.items():
            self._waits[handle] = until_ps, sequence

    def try_all(self) -> None:
        """Mark all to be tried, after a worker attached."""
        self._untried = deque(self._waits)

    def try_none(self) -> None:
        """Mark none to be tried, while there is no worker."""
        self._untried.clear()

    def next_untried(self) -> Sequence | None:
        """Return the next sequence to be tried, and count it as tried; it stays here."""
        return self._waits[self._untried.popleft()][1] if self.has_untried else None

    def take(self, handle: int) -> Sequence | None:
        """Remove and return a sequence; None: it does not wait here."""
        wait = self._waits.pop(handle, None)
        return None if wait is None else wait[1]

    def take_over(self, at_ps: int, most: int) -> list[Sequence]:
        """Remove and return the first sequences whose waits are over, at most `most`."""
        over: list[Sequence] = []
        while len(over) < most and (until_ps := self.until_ps) is not None and until_ps <= at_ps:
            over.append(self._waits.popitem(last=False)[1][1])
        return over


SLICE: Final = 16
"""Requests that one call places or refuses: about 1 ms; more if prompts are looked up in several prefix caches."""

MOST_FITS: Final = 64
"""Sets of worker kinds whose candidate lists are kept."""


class Placing:
    """Gives sequences to workers.

    Args:
        placement: chooses among several workers.
        rules: how long a sequence waits for a worker.
        notes_figures: whether `Placed` says what the placement read.
        bring_up_to_date: called with workers and the time before a placement reads figures that change with each step.
            If the placement `asks_all` or predicts, and workers are few: of all at once; otherwise of each when read.

    Attributes:
        ready: workers that accept new sequences, in order of attaching.
        room: sequences without a worker.
    """

    def __init__(
        self,
        placement: Placement,
        rules: ClusterRules,
        *,
        notes_figures: bool,
        bring_up_to_date: Callable[[Many[Member], int], None] | None,
    ) -> None:
        self.ready: list[Member] = []
        self._all = _Fitting([])
        self._table: WorkerTable | None = None  # of `ready`, if these are several
        self._is_current = True  # whether what is derived from `ready` is up to date
        self._kinds: list[tuple[object, ...]] = []
        self._samples: dict[tuple[object, ...], Member] = {}
        self._fit: dict[frozenset[tuple[object, ...]], _Fitting] = {}
        self._at_ps = 0
        self.room = WaitingRoom()
        self._placement = placement
        self._wait_seconds = rules.worker_wait_seconds
        self._wait_ps = round(rules.worker_wait_seconds / rules.time_scale * PS_PER_SECOND)
        self._expects_workers = True
        self._notes_figures = notes_figures
        self._bring_up_to_date = bring_up_to_date
        self._asks_all = bool(getattr(placement, "predicts", False) or getattr(placement, "asks_all", False))

    def attach(self, member: Member, at_ps: int) -> None:
        """Have a new worker brought up to date before the placement reads figures that change with each step.

        Waits that had ended because no worker was expected begin anew.
        """
        if not self._expects_workers:
            self._expects_workers = True
            self.room.wait_until(self._wait_until(at_ps))
        if self._bring_up_to_date is not None and not self._asks_all:
            member.candidate.before_look = partial(self._look, member)

    def detach(self, member: Member) -> None:
        """Leave a worker that is gone as it was last seen."""
        member.candidate.before_look = None

    def _look(self, member: Member) -> None:
        assert self._bring_up_to_date is not None
        self._bring_up_to_date((member,), self._at_ps)

    def set_ready(self, ready: list[Member]) -> None:
        """Set the workers that accept new sequences, in order of attaching. Their kinds must not change.

        Derived lists are rebuilt at the next placement, since many workers may attach at once.
        """
        self.ready = ready
        self._is_current = False

    def _take_in_ready(self) -> None:
        for member in self._all.members:
            member.enter_table(None, -1)
        ready = self.ready
        self._all = _Fitting(ready)
        self._kinds = [member.replica.kind for member in ready]
        self._samples = dict(zip(self._kinds, ready, strict=True))
        self._fit.clear()
        self._is_current = True
        self._table = None
        if len(ready) > 1:
            self._table = WorkerTable(self._all.candidates)
            for row, member in enumerate(ready):
                member.enter_table(self._table, row)
        if self._asks_all and self._bring_up_to_date is not None:
            # A few workers are all brought up to date before the placement is called.
            for member in ready:
                member.candidate.before_look = partial(self._look, member) if len(ready) > FEW else None

    def current_table(self) -> WorkerTable:
        """Return the figures of `ready`, in the same order, up to date; there are several."""
        if not self._is_current:
            self._take_in_ready()
        assert self._table is not None, "a single worker needs none"
        self._table.refresh()
        return self._table

    def _fitting(self, sequence: Sequence) -> "_Fitting":
        """Return the workers that could hold a sequence; the same lists for the same set of kinds."""
        if not self._is_current:
            self._take_in_ready()
        unfit = [kind for kind, one in self._samples.items() if one.replica.never_fits_reason(sequence) is not None]
        if not unfit:
            return self._all
        key = frozenset(unfit)
        found = self._fit.get(key)
        if found is None:
            if len(self._fit) >= MOST_FITS:
                self._fit.clear()
            fitting = [member for member, kind in zip(self.ready, self._kinds, strict=True) if kind not in key]
            found = self._fit[key] = _Fitting(fitting)
        return found

    def why_not_first(self, sequence: Sequence) -> str | None:
        """Return why the first worker can never hold a sequence; None: it can, or there is no worker."""
        return self.ready[0].replica.never_fits_reason(sequence) if self.ready else None

    def wait(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait for a worker that can hold it."""
        self.room.put(sequence, self._wait_until(at_ps))

    def expect_no_worker(self, at_ps: int) -> None:
        """End all waits, and those that begin before the next worker attaches."""
        self._expects_workers = False
        self.room.wait_until(at_ps)

    def _wait_until(self, at_ps: int) -> int:
        return at_ps + self._wait_ps if self._expects_workers else at_ps

    def place(self, sequence: Sequence, at_ps: int) -> ClusterEvent | None:
        """Give a sequence to a worker, or refuse it if the placement raises; None: no worker can take it now."""
        ready = self.ready
        fitting = self._fitting(sequence)
        if not fitting.members:
            return None
        if len(ready) == 1:
            return Placed(sequence, ready[0], ready[0].submit(sequence, at_ps))
        return self._choose(sequence, at_ps, fitting)

    def place_again(self, at_ps: int) -> list[ClusterEvent]:
        """Place sequences that came back from workers or that wait while one attaches: the next `SLICE` of them."""
        room, events = self.room, list[ClusterEvent]()
        if not self.ready:
            room.try_none()
        for _ in range(SLICE):
            sequence = room.next_untried()
            if sequence is None:
                break
            event = self.place(sequence, at_ps)
            if event is not None:
                room.take(sequence.handle)
                events.append(event)
        return events

    def place_all(self, at_ps: int) -> list[ClusterEvent]:
        """Begin to try all waiting sequences, after a worker attached; the first `SLICE` of them now."""
        self.room.try_all()
        return self.place_again(at_ps)

    def take_back(self, sequences: Iterable[Sequence], at_ps: int) -> list[ClusterEvent]:
        """Place sequences that have left their worker, the first `SLICE` of them now."""
        for sequence in sequences:
            self.room.put_untried(sequence, self._wait_until(at_ps))
        return self.place_again(at_ps)

    def expire(self, at_ps: int) -> list[ClusterEvent]:
        """Refuse sequences whose wait is over, but only once all have been tried."""
        if self.room.has_untried:
            return self.place_again(at_ps)
        over = self.room.take_over(at_ps, SLICE)
        wait_seconds = self._wait_seconds if self._expects_workers else None
        return [Refused(sequence, refusals.no_worker(wait_seconds, self.why_not_first(sequence))) for sequence in over]

    def _choose(self, sequence: Sequence, at_ps: int, fitting: "_Fitting") -> ClusterEvent:
        self._at_ps = at_ps
        if self._bring_up_to_date is not None and self._asks_all and len(fitting.members) <= FEW:
            self._bring_up_to_date(fitting.members, at_ps)
        figures: dict[str, Figures] | None = None
        candidates: Many[Candidate] = fitting.candidates
        if self._notes_figures:
            watched = [WatchedCandidate(candidate) for candidate in candidates]
            figures = {candidate.name: candidate.read for candidate in watched}
            candidates = tuple(watched)
        try:
            choice = self._placement.place(sequence, candidates)
            member = fitting.of(choice.candidate)
        except Exception as error:
            message = f"placement {class_name(self._placement)} raised {error_text(error)}"
            return Refused(sequence, refusals.raised(message), error, figures)
        return Placed(sequence, member, member.submit(sequence, at_ps), choice.why, figures)


class _Fitting:
    """Workers among which a placement chooses, and their candidates.

    Attributes:
        members: in order of attaching.
        candidates: one for each member.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.candidates: tuple[ReplicaCandidate, ...] = tuple([member.candidate for member in members])
        self._by_name = {member.name: member for member in members}

    def of(self, candidate: Candidate) -> Member:
        """Return the member of the candidate, or watched candidate, that a placement has chosen.

        Raises:
            ValueError: no member has the candidate's name.
        """
        member = self._by_name.get(candidate.name)
        if member is None:
            raise ValueError(f"{candidate.name!r} is none of the workers to choose from")
        return member
