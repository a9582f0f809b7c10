"""Parts of an output that router and worker compute alike: draws, synthetic logits, the first stop sequence.

Draws are splitmix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014): hashes that are
the same on every machine. Synthetic logits are the values that a mock model gives each word in logits mode.
"""

import hashlib
from array import array
from collections.abc import Iterable
from functools import cache

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

    Word i has at position t the logit 2.5 likes(i) + 1.7 surprise(i, t), with `likes` and `surprise` standard normal:
    the topic of the context (adapter, prompt), and the variation at one position. Both follow from a hash of the
    context, never from the request's seed, so greedy decoding gives the same output for every seed. Their sum has a
    deviation of 3: of 1,905 words some twenty are likely at temperature 1, and the words that a context likes recur.

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


_SYMBOL_BITS = 32
START = 0
"""The state before any symbol was read."""


class StopAutomaton:
    """Finds which of many stop sequences is complete first; its state is a number that the caller keeps.

    Aho and Corasick, Efficient string matching, CACM 18(6), 1975. A step costs the same whatever the number and length
    of the sequences, up to a constant factor on average over a text; building costs their total length. The router
    matches characters with it and the worker token ids, so both use the same definition of "first": the sequence whose
    last symbol comes earliest, and of those that end there the longest.

    Args:
        sequences: of symbols, each an unsigned 32-bit number: code points of characters, or token ids. Empty ones are
            ignored.

    Attributes:
        first_symbols: those that leave the state `START`.
        matched: by state: length of the longest sequence that is complete there; 0: none is.
        depth: by state: number of last symbols that may begin a sequence.
    """

    __slots__ = ("_fallback", "_next", "depth", "first_symbols", "matched")

    def __init__(self, sequences: Iterable[Iterable[int]]) -> None:
        # One dict for all edges: one per state would take three times the memory.
        self._next: dict[int, int] = {}
        self.depth = array("I", (0,))
        self.matched = array("I", (0,))
        parents, symbols = array("I", (0,)), array("I", (0,))
        for sequence in sequences:
            state = START
            for symbol in sequence:
                edge = state << _SYMBOL_BITS | symbol
                child = self._next.get(edge)
                if child is None:
                    child = self._next[edge] = len(parents)
                    parents.append(state)
                    symbols.append(symbol)
                    self.depth.append(self.depth[state] + 1)
                    self.matched.append(0)
                state = child
            self.matched[state] = self.depth[state]
        self.first_symbols = frozenset(symbol for symbol, depth in zip(symbols, self.depth, strict=True) if depth == 1)
        self._fallback = array("I", bytes(4 * len(parents)))
        for state in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            if parents[state] != START:
                self._fallback[state] = self.step(self._fallback[parents[state]], symbols[state])
            if not self.matched[state]:
                self.matched[state] = self.matched[self._fallback[state]]

    def step(self, state: int, symbol: int) -> int:
        """Return the state after one more symbol."""
        edges = self._next
        while True:
            following = edges.get(state << _SYMBOL_BITS | symbol)
            if following is not None:
                return following
            if state == START:
                return START
            state = self._fallback[state]
