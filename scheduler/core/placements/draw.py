"""Some workers at random, for placements that do not look at all of them."""

import numpy as np

_BLOCK = 4096


class Draw:
    """Draws indices, without an order to expect.

    Args:
        rng: what it draws from; in blocks, since a draw by itself takes numpy ten times as long.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._shares: list[float] = []

    def some(self, count: int, total: int) -> list[int]:
        """Return different indices below `total`: `count` of them, or all if there are no more."""
        if count >= total:
            return list(range(total))
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._shares:
                self._shares = self._rng.random(_BLOCK).tolist()
            index = int(self._shares.pop() * total)
            if index not in drawn:
                drawn.append(index)
        return drawn
