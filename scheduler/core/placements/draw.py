"""Random choice of some workers, for placements that do not look at all of them."""

import numpy as np

_BLOCK = 4096
_FEW = 16
"""Up to this many are drawn one by one, however few are left over: at most some sixty draws."""


class Draw:
    """Draws distinct indices; their order has no meaning.

    Args:
        rng: source; used in blocks, since a single draw takes numpy ten times as long.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._shares: list[float] = []

    def some(self, count: int, total: int) -> list[int]:
        """Return distinct indices below `total`: `count` of them, or all if there are no more. Cost: O(count)."""
        if count >= total:
            return list(range(total))
        if count > max(_FEW, total // 2):
            left_out = self._different(total - count, total)
            return [index for index in range(total) if index not in left_out]
        return list(self._different(count, total))

    def _different(self, count: int, total: int) -> dict[int, None]:
        """Draw indices, as keys in drawing order."""
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            if not self._shares:
                self._shares = self._rng.random(_BLOCK).tolist()
            drawn[int(self._shares.pop() * total)] = None
        return drawn
