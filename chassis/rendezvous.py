"""Rendezvous hashing (Thaler and Ravishankar, 1998): each key ranks the servers by a hash of both.

A key stays with its server when another one comes or goes.
"""

from collections.abc import Sequence
from hashlib import blake2b


def choose(key: str, servers: Sequence[str]) -> int:
    """Return the index of the server that ranks first for a key; there is at least one."""
    return max(range(len(servers)), key=lambda index: _weight(key, servers[index]))


def _weight(key: str, server: str) -> bytes:
    return blake2b(f"{server}\0{key}".encode(), digest_size=8).digest()
