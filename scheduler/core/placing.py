"""Where sequences go: each to one of the workers that could hold it, and to the waiting room while none can.

One worker alone gets what it can hold; among several the placement chooses (`placements/`). What it raises ends the
sequence, not the driver.
"""

from collections.abc import Callable, Iterable
from functools import partial

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.candidates import Figures, WatchedCandidate
from lorrery.scheduler.core.cluster_events import ClusterEvent, Placed, Refused
from lorrery.scheduler.core.door import ClusterRules
from lorrery.scheduler.core.load_order import FEW, LoadOrder
from lorrery.scheduler.core.member import Member, class_name
from lorrery.scheduler.core.placements.base import Candidate, Placement
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.core.waiting_room import WaitingRoom
from lorrery.vocabulary.units import PS_PER_SECOND

SLICE = 16
"""Requests that one call places or refuses: a millisecond, or some where prompts are looked up in several caches."""

MOST_FITS = 64
"""Sets of kinds of workers whose lists are kept."""


class Placing:
    """Gives sequences to workers.

    Args:
        placement: chooses among several.
        rules: how long a sequence waits for a worker.
        notes_figures: whether `Placed` says what the placement read.
        bring_up_to_date: called with the time for each of several candidates before a placement that predicts looks at
            them, and for others when it looks at what changes with each step.

    Attributes:
        ready: workers that take new sequences, in order of attaching.
        room: sequences that no worker has.
    """

    def __init__(
        self,
        placement: Placement,
        rules: ClusterRules,
        *,
        notes_figures: bool,
        bring_up_to_date: Callable[[Member, int], None] | None,
    ) -> None:
        self.ready: list[Member] = []
        self._candidates: list[Candidate] = []
        self._kinds: list[tuple[object, ...]] = []
        self._samples: dict[tuple[object, ...], Member] = {}
        self._fit: dict[frozenset[tuple[object, ...]], tuple[list[Member], list[Candidate]]] = {}
        self._at_ps = 0
        self.room = WaitingRoom()
        self._placement = placement
        self._wait_seconds = rules.worker_wait_seconds
        self._wait_ps = round(rules.worker_wait_seconds / rules.time_scale * PS_PER_SECOND)
        self._notes_figures = notes_figures
        self._bring_up_to_date = bring_up_to_date
        self._predicts = bool(getattr(placement, "predicts", False))

    def attach(self, member: Member) -> None:
        """Let a new worker be brought up to date when the placement looks at what changes with each step."""
        if self._bring_up_to_date is not None and not self._predicts:
            member.candidate.before_look = partial(self._look, member)

    def _look(self, member: Member) -> None:
        assert self._bring_up_to_date is not None
        self._bring_up_to_date(member, self._at_ps)

    def set_ready(self, ready: list[Member]) -> None:
        """Take note of which workers take new sequences, in order of attaching. Their kinds stay as they are."""
        self.ready = ready
        self._candidates = [member.candidate for member in ready]
        self._kinds = [member.replica.kind for member in ready]
        self._samples = dict(zip(self._kinds, ready, strict=True))
        self._fit.clear()
        order = LoadOrder(self._candidates) if len(ready) > FEW else None
        for number, member in enumerate(ready):
            member.rank_by_load(order, number)

    def _fitting(self, sequence: Sequence) -> tuple[list[Member], list[Candidate]]:
        """Return the workers that could hold a sequence; where the same kinds could, the same lists each time."""
        unfit = [kind for kind, one in self._samples.items() if one.replica.never_fits_reason(sequence) is not None]
        if not unfit:
            return self.ready, self._candidates
        key = frozenset(unfit)
        found = self._fit.get(key)
        if found is None:
            if len(self._fit) >= MOST_FITS:
                self._fit.clear()
            fitting = [member for member, kind in zip(self.ready, self._kinds, strict=True) if kind not in key]
            found = self._fit[key] = (fitting, [member.candidate for member in fitting])
        return found

    def why_not_first(self, sequence: Sequence) -> str | None:
        """Return why the first worker can never hold a sequence; None: it can, or there is no worker."""
        return self.ready[0].replica.never_fits_reason(sequence) if self.ready else None

    def wait(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait for a worker that can hold it."""
        self.room.put(sequence, at_ps + self._wait_ps)

    def place(self, sequence: Sequence, at_ps: int) -> ClusterEvent | None:
        """Give a sequence to a worker, or refuse it if the placement raises; None: none can take it now."""
        ready = self.ready
        fitting, candidates = self._fitting(sequence)
        if not fitting:
            return None
        if len(ready) == 1:
            return Placed(sequence, ready[0], ready[0].submit(sequence, at_ps))
        return self._choose(sequence, at_ps, fitting, candidates)

    def place_again(self, at_ps: int) -> list[ClusterEvent]:
        """Place what has come back from workers, or waits while one attaches: the next `SLICE` of them."""
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
        """Try all that wait, since there is another worker, the first of them now."""
        self.room.try_all()
        return self.place_again(at_ps)

    def take_back(self, sequences: Iterable[Sequence], at_ps: int) -> list[ClusterEvent]:
        """Place sequences that have left their worker, the first of them now."""
        for sequence in sequences:
            self.room.put_untried(sequence, at_ps + self._wait_ps)
        return self.place_again(at_ps)

    def expire(self, at_ps: int) -> list[ClusterEvent]:
        """Refuse those who have waited for long enough; nobody before all have been tried."""
        if self.room.has_untried:
            return self.place_again(at_ps)
        over = self.room.take_over(at_ps, SLICE)
        return [
            Refused(sequence, refusals.no_worker(self._wait_seconds, self.why_not_first(sequence))) for sequence in over
        ]

    def _choose(
        self, sequence: Sequence, at_ps: int, fitting: list[Member], candidates: list[Candidate]
    ) -> ClusterEvent:
        self._at_ps = at_ps
        if self._bring_up_to_date is not None and self._predicts and len(fitting) > 1:
            for member in fitting:
                self._bring_up_to_date(member, at_ps)
        figures: dict[str, Figures] | None = None
        if self._notes_figures:
            watched = [WatchedCandidate(candidate) for candidate in candidates]
            figures = {candidate.name: candidate.read for candidate in watched}
            candidates = list(watched)
        try:
            choice = self._placement.place(sequence, candidates)
            member = fitting[candidates.index(choice.candidate)]
        except Exception as error:
            message = f"placement {class_name(self._placement)} raised {type(error).__name__}: {error}"
            return Refused(sequence, refusals.raised(message), error, figures)
        return Placed(sequence, member, member.submit(sequence, at_ps), choice.why, figures)
