"""Indexes over many workers, so that a placement finds the right one without looking at each.

    load of each worker          `load_order`
    holders of each adapter      `adapter_holders`
    bounds on the finish         `finish_order`
    holders of each prefix       `prefix_cache.holders`

A member reports a possible change (`touch`) after each submit, plan, and commit that ends a sequence, and a worker's
residency reports its adapters on the GPU. The indexes are updated when the next request is placed, once for each worker
that has changed since. Between two such times a worker's load stays and its KV tokens only grow, by steps that its
driver has perhaps not committed yet: the index holds a lower bound, and workers that may be the best by it are brought
up to date before one is chosen.

It covers one list of workers, numbered in order of attaching; when one comes or goes a new one is made in O(n). Nothing
is kept before the first request is placed by it, so other placements pay nothing. If workers are few, or some could not
hold the request, placements evaluate each instead: both ways choose the same worker.

Cost, for n workers: a logarithm, and some operations on integers of n bits, for each worker that has changed. If prefix
caches are read, each worker is brought up to date whose plan goes on to compute a long prompt: in a fleet with little
other work, all of them.
"""

from collections.abc import Iterator

from lorrery.scheduler.core.adapter_holders import AdapterHolders
from lorrery.scheduler.core.candidates import ReplicaCandidate
from lorrery.scheduler.core.finish_order import FinishOrder
from lorrery.scheduler.core.load_order import LoadOrder
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Way
from lorrery.scheduler.core.sequence import Sequence

FEW = 8
"""Up to this many workers are evaluated one by one, without an index."""


class ManyWorkers:
    """See the module.

    Args:
        candidates: the workers, by number.
        adapter_holders: index over the same workers.

    Attributes:
        candidates: as given.
        adapter_holders: as given.
        have_prefix_caches: whether any of them has one.
    """

    def __init__(self, candidates: tuple[ReplicaCandidate, ...], adapter_holders: AdapterHolders) -> None:
        self.candidates = candidates
        self.adapter_holders = adapter_holders
        self.have_prefix_caches = any(candidate.has_prefix_cache for candidate in candidates)
        self._finishes: FinishOrder | None = None
        self._prefixes: PrefixHolders | None = None
        self._chunking = 0  # workers by number, as bits
        self._loads: LoadOrder | None = None
        self._touched: list[int] = []
        self._is_touched = bytearray(len(candidates))

    def touch(self, number: int) -> None:
        """Record that a worker's load may have changed, or its KV tokens may have decreased."""
        if self._loads is not None and not self._is_touched[number]:
            self._is_touched[number] = 1
            self._touched.append(number)

    def refresh(self) -> None:
        """Update the indexes for the touches since the last call; required before any of them is read."""
        loads = self._loads
        if loads is None:
            self._loads = LoadOrder(self.candidates)
            return
        for number in self._touched:
            self._is_touched[number] = 0
            candidate = self.candidates[number]
            loads.note(number, candidate.load, candidate.least_kv_tokens)
            if self._finishes is not None:
                self._finishes.note(number)
        self._touched.clear()

    @property
    def finishes(self) -> FinishOrder:
        """Index for `predicted_finish`."""
        if self._finishes is None:
            self._finishes = FinishOrder(self.candidates)
        return self._finishes

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def note_chunking(self, number: int, is_chunking: bool) -> None:
        """Record whether a worker's plan goes on to compute a prompt, so that its cache may grow within the plan."""
        if is_chunking:
            self._chunking |= 1 << number
        elif self._chunking >> number & 1:
            self._chunking ^= 1 << number

    def holders(self, sequence: Sequence) -> Way | None:
        """Return which workers hold how much of a sequence's input; None: their caches are not of one kind.

        Upper bounds; exact for a worker that is up to date.
        """
        if sequence.skips_prefix_cache:
            return []
        prefixes = self._prefixes
        if prefixes is None:
            prefixes = self._prefixes = self._tree()
            if prefixes is None:
                return None
        for number in bits(self._chunking):
            self.candidates[number].bring_up_to_date()
        return prefixes.along(sequence)

    def _tree(self) -> PrefixHolders | None:
        caches: list[BlockCache] = []
        for candidate in self.candidates:
            cache = candidate.block_cache
            if cache is None:
                return None
            caches.append(cache)
        kind = (caches[0].block_size, caches[0].min_computed_tokens)
        if kind[1] < 1 or any((one.block_size, one.min_computed_tokens) != kind for one in caches):
            return None
        tree = PrefixHolders(*kind)
        for number, cache in enumerate(caches):
            cache.tell(tree, number)
        return tree

    # --- loads ------------------------------------------------------------------------------------------------------

    @property
    def loads(self) -> LoadOrder:
        """Loads as of the last `refresh`."""
        assert self._loads is not None
        return self._loads

    def least(self) -> ReplicaCandidate:
        """Return the worker with the least load; ties: fewest KV tokens, then the first."""
        return self.candidates[self.loads.least()]

    def least_among(self, numbers: int, most: float) -> ReplicaCandidate | None:
        """Return the same among the workers in the bits of `numbers`; None: all have a load above `most`."""
        number = self.loads.least_among(numbers, most)
        return None if number is None else self.candidates[number]


def bits(number: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
