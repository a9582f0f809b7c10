"""Rendezvous hashing: each adapter ranks the workers by a hash of its name and theirs (Thaler and Ravishankar, 1998).

When a worker comes or goes, an adapter's ranking of the others stays as it is: of the first k places a share of k / n
changes with n workers, and no other. A ranking's head is kept until workers change, so that a request costs no hash.
"""

from collections.abc import Sequence as Many
from hashlib import blake2b
from heapq import nlargest

from lorrery.scheduler.core.placements.base import Candidate

MOST_KEPT = 65_536
"""Adapters whose rankings are kept; beyond, all are made anew as they are asked for."""


def weight(adapter_id: str, worker_id: str) -> bytes:
    """Return what an adapter ranks a worker by; the greatest is the first."""
    return blake2b(f"{worker_id}\0{adapter_id}".encode(), digest_size=8).digest()


class Rankings:
    """The heads of adapters' rankings.

    Args:
        depth: how many workers of each.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._candidates: Many[Candidate] = ()
        self._names: list[str] = []
        self._heads: dict[str, list[int]] = {}

    def head(self, adapter_id: str, candidates: Many[Candidate]) -> list[int]:
        """Return the indices of an adapter's first workers, in order.

        Cost: one look-up while `candidates` is the same sequence, which must not change then; a comparison of names
        where it is another; O(workers) hashes for each adapter once the names are others.
        """
        if candidates is not self._candidates:
            names = [candidate.name for candidate in candidates]
            if names != self._names:
                self._names = names
                self._heads.clear()
            self._candidates = candidates
        head = self._heads.get(adapter_id)
        if head is None:
            if len(self._heads) >= MOST_KEPT:
                self._heads.clear()
            weights = [weight(adapter_id, name) for name in self._names]
            head = nlargest(self._depth, range(len(weights)), key=weights.__getitem__)
            self._heads[adapter_id] = head
        return head
