"""Which waiting requests move to another worker, because they would start there earlier.

A request is placed on arrival; afterwards workers join, finish early or fill up. So after each change of what waits or
runs somewhere, workers that cannot start their first waiting request give some up (donors, longest queue first), each
to the ready worker with the fewest waiting, then the fewest running sequences (the taker):

* while nothing waits at the taker, all that it could start now: it has a seat, memory and a place for the adapter;
* half of the difference, every second one, if at least two and at least twice as many wait at the donor.

No request goes back and forth: it could not start where it was and can where it goes, or it moves to the worker where,
even after that, no more wait. Whether a worker could start a request is judged by its state at that moment; that memory
will suffice some steps later does not count.

Cost: O(blocked workers), and for each of at most `MOST_DONORS` donors some operations on columns
(`placements.worker_table`) and at most `MOST_LOOKED_AT` tests, if all that waits fits everywhere. The rest of a long
queue moves after the first have moved.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.worker_table import LARGEST, WorkerTable
from lorrery.scheduler.core.sequence import Sequence

MOST_MOVES: Final = 256
MOST_LOOKED_AT: Final = 4 * MOST_MOVES
MOST_DONORS: Final = 4
_RUNNING_BITS: Final = 24


@dataclass(frozen=True, slots=True)
class Move:
    """A waiting sequence that goes from one worker to another."""

    sequence: Sequence
    donor: Member
    taker: Member


class Balance:
    """The workers of one scheduler that may give or take waiting requests; strict ones do neither."""

    def __init__(self) -> None:
        self._members: set[Member] = set()
        self._blocked: set[Member] = set()
        self._movers: dict[str, Member] = {}

    def attach(self, member: Member) -> None:
        """Add a worker, unless it is strict. A single worker need not report whether it is blocked."""
        if member.replica.options.strict:
            return
        self._members.add(member)
        if len(self._members) == 1:
            return
        for one in self._members if len(self._members) == 2 else (member,):
            one.blocked = self._blocked
            one.note_counts()

    def detach(self, member: Member) -> None:
        """Remove a worker that is gone or accepts no new requests."""
        if member in self._members:
            self._members.remove(member)
            self._blocked.discard(member)
            self._movers.pop(member.name, None)
            member.blocked = None

    @property
    def someone_is_blocked(self) -> bool:
        """Whether any worker has a waiting sequence that could not start when it was tried."""
        for member in self._blocked:  # noqa: SIM110 - every boundary asks, and a generator costs more
            if member.replica.num_waiting:
                return True
        return False

    def moves(self, ready: list[Member], table: WorkerTable, catch_up: Callable[[Member], None]) -> list[Move]:
        """Return the moves to make, in order of their start.

        Args:
            ready: workers that accept new sequences, in order of attaching.
            table: their figures, up to date.
            catch_up: called before a worker's headroom is read; for a driver whose replicas lag behind its clock.
        """
        shifts = self._shifts()
        found: list[Move] = []
        blocked: list[tuple[int, int]] = []
        for member in self._blocked:
            num_waiting = member.replica.num_waiting + shifts.get(member.row, 0)
            if num_waiting > 0:
                blocked.append((-num_waiting, member.row))
        for _, row in nsmallest(MOST_DONORS, blocked):
            donor = ready[row]
            first = next(_waiting(donor), None)
            if first is None:
                continue
            taker = _taker(donor, first, ready, table, shifts)
            if taker is None:
                continue
            num_there = donor.replica.num_waiting + shifts.get(row, 0)
            num_here = taker.replica.num_waiting + shifts.get(taker.row, 0)
            if num_here and not _share(num_there, num_here):
                continue
            catch_up(donor)
            if donor.replica.headroom().has(first):
                continue
            catch_up(taker)
            given = _give(donor, taker, num_there, num_here)
            if given:
                self._movers[donor.name] = donor
                shifts[row] = shifts.get(row, 0) - len(given)
                shifts[taker.row] = shifts.get(taker.row, 0) + len(given)
            found += given
        return found

    def _shifts(self) -> dict[int, int]:
        """Return the change of the waiting count by row that moves under way will make."""
        shifts: dict[int, int] = {}
        if not self._movers:
            return shifts
        by_name = {member.name: member for member in self._members}
        for name, member in list(self._movers.items()):
            if not member.moving:
                del self._movers[name]
            for handle, taker_name in member.moving.items():
                taker = by_name.get(taker_name)
                if taker is not None and member.sequences[handle].admitted_ps is None:
                    shifts[member.row] = shifts.get(member.row, 0) - 1
                    shifts[taker.row] = shifts.get(taker.row, 0) + 1
        return shifts


def _taker(
    donor: Member, first: Sequence, ready: list[Member], table: WorkerTable, shifts: dict[int, int]
) -> Member | None:
    """Return the worker with the fewest waiting, then fewest running, that could hold the donor's first request."""
    ranks = (table.num_waiting << _RUNNING_BITS) + table.loads - table.num_waiting
    for row, shift in shifts.items():
        ranks[row] += shift << _RUNNING_BITS
    ranks[donor.row] = LARGEST
    while True:
        row = int(ranks.argmin())
        if ranks[row] == LARGEST:
            return None
        member = ready[row]
        if not member.replica.options.strict and member.replica.never_fits_reason(first) is None:
            return member
        ranks[row] = LARGEST


def _give(donor: Member, taker: Member, num_there: int, num_here: int) -> list[Move]:
    given: list[Move] = []
    kept: list[Sequence] = []
    room = None if num_here else taker.replica.headroom()
    for number, sequence in enumerate(_waiting(donor)):
        if number == MOST_LOOKED_AT or len(given) == MOST_MOVES:
            break
        if taker.replica.never_fits_reason(sequence) is not None:
            continue
        if room is not None and room.has(sequence):
            room.take(sequence)
            given.append(Move(sequence, donor, taker))
            continue
        room = None
        kept.append(sequence)
    num_more = min(_share(num_there - len(given), num_here), MOST_MOVES - len(given))
    given += [Move(sequence, donor, taker) for sequence in kept[1 : 2 * num_more : 2]]
    return given


def _share(num_there: int, num_here: int) -> int:
    """Return how many requests go from a worker with more waiting ones to one with fewer; 0 if not twice as many."""
    return (num_there - num_here) // 2 if num_there >= 2 * num_here else 0


def _waiting(donor: Member) -> Iterator[Sequence]:
    """Yield the waiting sequences of a worker that are not about to leave it, in the order it received them."""
    for handle, sequence in donor.sequences.items():
        if sequence.admitted_ps is None and handle not in donor.moving and handle not in donor.withdrawn:
            yield sequence
