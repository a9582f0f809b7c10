"""Hashes that must give the same result everywhere.

splitmix64: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

import numpy as np
from numpy.typing import NDArray

STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U64 = (1 << 64) - 1


def hash64(seed: int, position: int) -> int:
    """Return the 64-bit number at a position of a random stream; positions may be negative."""
    z = (seed + (position + 1) * STEP) & _U64
    z = ((z ^ (z >> 30)) * _MIX_1) & _U64
    z = ((z ^ (z >> 27)) * _MIX_2) & _U64
    return z ^ (z >> 31)


def hashes64(seed: int, count: int) -> NDArray[np.uint64]:
    """Return `hash64` of the positions from 0 to `count - 1`."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
