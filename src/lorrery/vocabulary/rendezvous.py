"""Rendezvous hashing (Thaler and Ravishankar, 1998): each key ranks the servers by a hash of both.

A key stays with its server when another one comes or goes. With bounded loads (Mirrokni, Thorup and Zadimoghaddam,
2018) a server that already has its share and a margin is skipped for the next in the key's ranking.
"""

from collections.abc import Sequence
from hashlib import blake2b

FEW = 2.0
"""Load per size below which a server always has room."""


def choose(key: str, servers: Sequence[str]) -> int:
    """Return the index of the server that ranks first for a key; `servers` is not empty."""
    return max(range(len(servers)), key=lambda index: _weight(key, servers[index]))


def choose_bounded(
    key: str, servers: Sequence[str], loads: Sequence[float], sizes: Sequence[float], bound: float
) -> int:
    """Return the index of the first server in a key's ranking that has room for one more.

    A server has room if with one more it has at most `bound` times its share of the total, rounded up, or if it has
    less than `FEW` times its size: a small load is not worth moving a key. At least one server always has room.

    Args:
        key: the key to place.
        servers: at least one.
        loads: of each server, at least 0.
        sizes: of each server, proportional to its share; their sum is above 0.
        bound: above 1; infinite: all have room.
    """
    wanted = bound * (sum(loads) + 1) / sum(sizes)
    ranked = sorted(range(len(servers)), key=lambda index: _weight(key, servers[index]), reverse=True)
    return next((index for index in ranked if loads[index] < max(wanted, FEW) * sizes[index]), ranked[0])


def _weight(key: str, server: str) -> bytes:
    return blake2b(f"{server}\0{key}".encode(), digest_size=8).digest()
