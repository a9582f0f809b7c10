"""Adapter residency by rendezvous hash with bounded load.

Each adapter ranks the workers by a hash of its name and theirs (Thaler and Ravishankar, 1998), and its sequences go to
the first in its ranking that has room: load at most `LOAD_FACTOR` times the mean (consistent hashing with bounded
loads; Mirrokni, Thorup and Zadimoghaddam, SODA 2018). So an adapter is resident on few workers, each worker serves few
adapters, and when a worker attaches or leaves only the adapters that ranked it first move. Sequences of the base model
go to the least loaded worker.
"""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded, load_bound
from lorrery.scheduler.core.placements.rendezvous import Rankings, weight
from lorrery.scheduler.core.sequence import Sequence

LOAD_FACTOR = 1.25
KEPT = 8
"""Workers kept of each ranking; a search for room rarely goes further."""


class AdapterHash:
    """See the module."""

    moves_waiting = True

    def __init__(self) -> None:
        self._rankings = Rankings(KEPT)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the first worker in the adapter's ranking that has room."""
        if sequence.adapter is None:
            chosen = least_loaded(candidates)
            return Choice(chosen, f"no adapter; least load, {chosen.load}")
        name = sequence.adapter.adapter_id
        most = load_bound(candidates, LOAD_FACTOR)
        head = [candidates[index] for index in self._rankings.head(name, candidates)]
        for place, candidate in enumerate(head, start=1):
            if candidate.load <= most:
                return _chosen(candidate, place, name, most)
        ranking = sorted(candidates, key=lambda candidate: weight(name, candidate.name), reverse=True)
        for place, candidate in enumerate(ranking, start=1):
            if candidate.load <= most:
                return _chosen(candidate, place, name, most)
        raise AssertionError("the least loaded worker is always within the bound")


def _chosen(candidate: Candidate, place: int, name: str, most: int) -> Choice:
    return Choice(candidate, f"number {place} in the ranking of {name}; load {candidate.load} of {most}")
