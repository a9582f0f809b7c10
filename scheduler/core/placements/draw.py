"""Some workers at random, for placements that do not look at all of them."""

import numpy as np

_BLOCK = 4096
_FEW = 16
"""Drawn one by one, however few are left: at most some sixty draws."""


class Draw:
    """Draws indices, without an order to expect.

    Args:
        rng: what it draws from; in blocks, since a draw by itself takes numpy ten times as long.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._shares: list[float] = []

    def some(self, count: int, total: int) -> list[int]:
        """Return different indices below `total`: `count` of them, or all if there are no more. Cost: O(count)."""
        if count >= total:
            return list(range(total))
        if count > max(_FEW, total // 2):
            left_out = self._different(total - count, total)
            return [index for index in range(total) if index not in left_out]
        return list(self._different(count, total))

    def _different(self, count: int, total: int) -> dict[int, None]:
        """Draw indices, as keys in the order in which they come."""
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            if not self._shares:
                self._shares = self._rng.random(_BLOCK).tolist()
            drawn[int(self._shares.pop() * total)] = None
        return drawn
