"""Rendezvous hashing: each adapter ranks the workers by a hash of its name and theirs (Thaler and Ravishankar, 1998).

When a worker attaches or leaves, an adapter's ranking of the others stays as it is: with n workers, a share of k / n of
the first k places changes, and no other. The heads of rankings are kept for some sets of workers, so that a request
costs no hash, even if requests alternate between those that any worker can hold and those that only large ones can.
"""

from collections.abc import Sequence as Many
from hashlib import blake2b
from heapq import nlargest

from lorrery.scheduler.core.placements.base import Candidate

MOST_KEPT = 65_536
"""Rankings kept; beyond this, all are recomputed on demand."""
MOST_LISTS = 8
"""Sets of workers whose rankings are kept; beyond this, those of the oldest are dropped."""


def weight(adapter_id: str, worker_id: str) -> bytes:
    """Return the weight by which an adapter ranks a worker; the greatest comes first."""
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
        depth: number of workers kept of each.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_kept = 0
        self._by_names: dict[tuple[str, ...], _Ranked] = {}
        self._by_list: dict[int, tuple[Many[Candidate], _Ranked]] = {}  # holds the sequence, so its id is not reused

    def head(self, adapter_id: str, candidates: Many[Candidate]) -> list[int]:
        """Return the indices of an adapter's first workers, in order.

        Cost: two look-ups if `candidates` is one of the last `MOST_LISTS` sequences, which must not be changed; a pass
        over all names if it is another; O(workers) hashes for each adapter when the names are new.
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
