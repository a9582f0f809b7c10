"""Rendezvous hashing: each adapter ranks the workers by a hash of its name and theirs (Thaler and Ravishankar, 1998).

When a worker comes or goes, an adapter's ranking of the others stays as it is: of the first k places a share of k / n
changes with n workers, and no other. A ranking's head is kept for some sets of workers, so that a request costs no
hash, though requests alternate between those that any worker can hold and those that only the large ones can.
"""

from collections.abc import Sequence as Many
from hashlib import blake2b
from heapq import nlargest

from lorrery.scheduler.core.placements.base import Candidate

MOST_KEPT = 65_536
"""Rankings kept; beyond, all are made anew as they are asked for."""
MOST_LISTS = 8
"""Sets of workers whose rankings are kept; beyond, those of the oldest are dropped."""


def weight(adapter_id: str, worker_id: str) -> bytes:
    """Return what an adapter ranks a worker by; the greatest is the first."""
    return blake2b(f"{worker_id}\0{adapter_id}".encode(), digest_size=8).digest()


class _Ranked:
    """The heads of adapters' rankings of some workers, by adapter."""

    __slots__ = ("heads", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.heads: dict[str, list[int]] = {}


class Rankings:
    """The heads of adapters' rankings.

    Args:
        depth: how many workers of each.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_kept = 0
        self._by_names: dict[tuple[str, ...], _Ranked] = {}
        self._by_list: dict[int, tuple[Many[Candidate], _Ranked]] = {}  # which it keeps, so that its id stays its own

    def head(self, adapter_id: str, candidates: Many[Candidate]) -> list[int]:
        """Return the indices of an adapter's first workers, in order.

        Cost: two look-ups where `candidates` is one of the last `MOST_LISTS` sequences, which must not change then; a
        look at all names where it is another; O(workers) hashes for each adapter once the names are others.
        """
        known = self._by_list.get(id(candidates))
        ranked = self._take_in(candidates) if known is None else known[1]
        head = ranked.heads.get(adapter_id)
        if head is None:
            if self._num_kept >= MOST_KEPT:
                self._num_kept = 0
                for other in self._by_names.values():
                    other.heads.clear()
            weights = [weight(adapter_id, name) for name in ranked.names]
            head = nlargest(self._depth, range(len(weights)), key=weights.__getitem__)
            ranked.heads[adapter_id] = head
            self._num_kept += 1
        return head

    def _take_in(self, candidates: Many[Candidate]) -> _Ranked:
        names = tuple([candidate.name for candidate in candidates])
        ranked = self._by_names.get(names)
        if ranked is None:
            if len(self._by_names) >= MOST_LISTS:
                dropped = self._by_names.pop(next(iter(self._by_names)))
                self._num_kept -= len(dropped.heads)
                self._by_list.clear()
            ranked = self._by_names[names] = _Ranked(names)
        if len(self._by_list) >= MOST_LISTS:
            del self._by_list[next(iter(self._by_list))]
        self._by_list[id(candidates)] = (candidates, ranked)
        return ranked
