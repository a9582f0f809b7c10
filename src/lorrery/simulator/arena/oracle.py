"""The fewest adapter loads with which a run's admissions could have been served, by someone who knew all of them.

Given is in which order sequences entered and left the batch, and their adapters. An adapter must be on the GPU from the
first of these to the last that overlap; between two such stays it may remain, which saves a load, or go. With places
for k adapters, the fewest loads result if, whenever a place is needed, the unused adapter goes that is needed again
last (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966; that stays have a length does
not change his argument: it is the choice of the most gaps of which at most k less the adapters in use overlap, and
dropping the one that ends last is optimal at each overlap).

Loads of no duration are assumed, so the bound is below what any real policy needs, with or without look-ahead.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["Use", "fewest_loads"]

Use = tuple[str, int]
"""An adapter by key, and +1 where a sequence that has it enters a batch, -1 where it leaves."""

_NEVER = 1 << 62


def fewest_loads(uses: Sequence[Use], places: int) -> int:
    """Return the fewest loads, from an empty GPU. Cost: O(n log n).

    Args:
        uses: in order.
        places: most adapters on the GPU at a time; more may be in use.
    """
    next_begins = _next_begins(uses)
    in_use: dict[str, int] = {}
    idle: dict[str, int] = {}
    """Unused adapters on the GPU, and when each is needed again."""
    latest: list[tuple[int, str]] = []
    """A heap of these, the one needed last first; may hold outdated entries."""
    num_loads = 0
    for (key, change), next_begin in zip(uses, next_begins, strict=True):
        if change > 0:
            if key in in_use:
                in_use[key] += 1
                continue
            in_use[key] = 1
            if idle.pop(key, None) is None:
                num_loads += 1
        else:
            in_use[key] -= 1
            if in_use[key]:
                continue
            del in_use[key]
            if next_begin < _NEVER:
                idle[key] = next_begin
                heappush(latest, (-next_begin, key))
        while len(idle) + len(in_use) > places and idle:
            when, gone = heappop(latest)
            if idle.get(gone) == -when:
                del idle[gone]
    return num_loads


def _next_begins(uses: Sequence[Use]) -> list[int]:
    """Return for each entry the place of the next one at which its adapter is needed; a large number: never."""
    found, following = [_NEVER] * len(uses), dict[str, int]()
    for place in range(len(uses) - 1, -1, -1):
        key, change = uses[place]
        found[place] = following.get(key, _NEVER)
        if change > 0:
            following[key] = place
    return found
