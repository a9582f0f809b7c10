"""Synthetic logits: a mock model's value of each word at each position in logits mode.

Word i of a sequence has at output position t the logit

    2.5 likes(i) + 1.7 surprise(i, t)

with `likes` and `surprise` standard normal: the topic of the context (adapter, prompt), and the variation at one
position. Both follow from a hash of the context, never from the request's seed, so greedy decoding gives the same
output for every seed. Their sum has a deviation of 3: of 1,905 words some twenty are likely at temperature 1, and the
words that a context likes recur.
"""

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.splitmix import hash64, hashes64

Logits = NDArray[np.float64]

MAX_WORDS = 1905
_LIKES, _SURPRISE = 2.5, 1.7
_TABLE_SIZE = 1 << 16


def context_of(adapter_id: str, prompt_token_ids_u32: bytes) -> int:
    """Return the 64-bit hash that a sequence's logits follow from; the prompt as little-endian 32-bit numbers."""
    digest = hashlib.blake2b(f"{adapter_id}\0".encode(), digest_size=8)
    digest.update(prompt_token_ids_u32)
    return int.from_bytes(digest.digest(), "little")


def model_logits(context: int, position: int, num_words: int = MAX_WORDS) -> Logits:
    """Return the logits of all words at an output position; shape (num_words,).

    Args:
        context: from `context_of`.
        position: from 0.
        num_words: at most `MAX_WORDS`.
    """
    return _likes(context, num_words) + _SURPRISE * _normals(hash64(context, position), num_words)


def _likes(context: int, num_words: int) -> Logits:
    """Return a context's likes: the sum of two windows of the table, so that no two contexts have the same."""
    likes = _normals(hash64(context, -1), num_words) + _normals(hash64(context, -3), num_words)
    scaled: Logits = likes * (_LIKES / np.sqrt(2.0))
    return scaled


def _normals(at: int, num_words: int) -> Logits:
    start = at % _TABLE_SIZE
    return _table()[start : start + num_words]


@cache
def _table() -> Logits:
    """Return standard normal numbers (Box and Muller), the same on every machine."""
    hashes = hashes64(0x10C4, 2 * _TABLE_SIZE)
    uniform = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)
    normals = np.sqrt(-2 * np.log(uniform[:_TABLE_SIZE])) * np.cos(2 * np.pi * uniform[_TABLE_SIZE:])
    return np.concatenate((normals, normals[:MAX_WORDS]))
