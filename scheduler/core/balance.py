"""Which waiting requests move to another worker, because they would start there first.

A request is placed when it comes; afterwards workers join, finish early or fill up. So whenever it has changed who
waits or runs somewhere, workers that cannot start their first waiting request give some up (donors, the longest queue
first), each to the ready worker that has the fewest waiting, then the fewest running (the taker):

* while nobody waits at the taker, all that it could start now: it has a seat, memory and a place for the adapter;
* half of the difference, every second one, where at least twice as many, and two, wait at the donor.

Nobody goes back and forth: what moves could not be started where it was, and can be where it goes, or it moves to the
worker where, even after that, no more wait. Whether a worker could start one is told from what is known at that moment;
that memory will suffice in some steps does not count.

Cost: O(workers) if nobody is blocked; otherwise O(workers log workers), and at most `MOST_LOOKED_AT` looks for each of
at most `MOST_DONORS` donors. The rest of a long queue moves when the first have.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence

MOST_MOVES = 256
MOST_LOOKED_AT = 4 * MOST_MOVES
MOST_DONORS = 4


@dataclass(frozen=True, slots=True)
class Move:
    """A waiting sequence that goes from one worker to another."""

    sequence: Sequence
    donor: Member
    taker: Member


def someone_is_blocked(members: Iterable[Member]) -> bool:
    """Tell whether any of these workers has a sequence that waits and could not start when it was tried."""
    for member in members:  # noqa: SIM110 - every boundary asks, and a generator costs more than the answer
        if member.replica.is_blocked and member.replica.num_waiting:
            return True
    return False


def moves(ready: list[Member], catch_up: Callable[[Member], None]) -> list[Move]:
    """Return what should move, those first that should start first.

    Args:
        ready: workers that take new sequences, in order of attaching.
        catch_up: called before a worker's headroom is looked at; by a driver whose replicas lag behind its clock.
    """
    members = [member for member in ready if not member.replica.options.strict]
    waiting = {member.name: member.replica.num_waiting for member in members}
    for member in members:
        for handle, taker_name in member.moving.items():
            if taker_name in waiting and member.sequences[handle].admitted_ps is None:
                waiting[member.name] -= 1
                waiting[taker_name] += 1
    found: list[Move] = []
    blocked = [member for member in members if member.replica.is_blocked and waiting[member.name] > 0]
    donors = sorted(blocked, key=lambda one: -waiting[one.name])
    for donor in donors[:MOST_DONORS]:
        first = next(_waiting(donor), None)
        if first is None:
            continue
        takers = [one for one in members if one is not donor and one.replica.never_fits_reason(first) is None]
        if not takers:
            continue
        taker = min(takers, key=lambda one: (waiting[one.name], one.replica.num_running))
        num_there, num_here = waiting[donor.name], waiting[taker.name]
        if num_here and not _share(num_there, num_here):
            continue
        catch_up(donor)
        if donor.replica.headroom().has(first):
            continue
        catch_up(taker)
        given = _give(donor, taker, num_there, num_here)
        waiting[donor.name] -= len(given)
        waiting[taker.name] += len(given)
        found += given
    return found


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
    """Return how many should go from where so many wait to where fewer do; 0 where there are not twice as many."""
    return (num_there - num_here) // 2 if num_there >= 2 * num_here else 0


def _waiting(donor: Member) -> Iterator[Sequence]:
    """Yield what waits at a worker and is not about to leave it, in the order in which it got it."""
    for handle, sequence in donor.sequences.items():
        if sequence.admitted_ps is None and handle not in donor.moving and handle not in donor.withdrawn:
            yield sequence
