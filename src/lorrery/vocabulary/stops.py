"""Finds which of many stop sequences is complete first, with one automaton for all of them.

Aho and Corasick, Efficient string matching, CACM 18(6), 1975. A step costs the same whatever the number and length of
the sequences, up to a constant factor on average over a text; building costs their total length. The router matches
characters with it and the worker token ids, so both use the same definition of "first": the sequence whose last symbol
comes earliest, and of those that end there the longest.
"""

from array import array
from collections.abc import Iterable

_SYMBOL_BITS = 32
START = 0
"""The state before any symbol was read."""


class StopAutomaton:
    """Reads symbols one by one; its state is a number that the caller keeps.

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
