"""Stop strings, twice: as token sequences for the worker, and over the detokenised stream.

The worker matches a stop string if the model produces it in the tokenizer's own tokenisation; it then computes no
further step. Text with other token boundaries is matched here, by characters. Either way the client's text ends before
the stop string, while its token ids include every token that was produced.
"""

from collections.abc import Iterable

from lorrery.tokenizer.base import Tokenizer
from lorrery.vocabulary.stops import START, StopAutomaton


def stop_automaton(stop_strings: Iterable[str]) -> StopAutomaton:
    """Return the automaton that finds the stop strings in a text."""
    return StopAutomaton(map(ord, text) for text in stop_strings)


def stop_token_sequences(stop_strings: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the worker searches for, without duplicates and empty ones."""
    sequences = (tuple(tokenizer.encode_stop(text)) for text in stop_strings)
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The first is the one whose last character comes earliest; of those that end there, the longest. The result therefore
    does not depend on how the text was split. Text that may be the beginning of a stop string is held back.

    Args:
        automaton: of the stop strings' characters.
        include: whether the returned text includes the stop string.

    Attributes:
        found: the stop string that was found; empty: none.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "found")

    def __init__(self, automaton: StopAutomaton, *, include: bool = False) -> None:
        self._automaton = automaton
        self._include = include
        self._state = START
        self._held = ""
        self.found = ""

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.found)

    def push(self, text: str, *, counts: bool = True) -> str:
        """Take more text and return the part that cannot belong to a stop string; after a match, nothing.

        Args:
            text: the new text.
            counts: whether a stop string that is complete in this text is a match.
        """
        if self.found:
            return ""
        automaton, state = self._automaton, self._state
        for index, char in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, ord(char))
            if counts and (length := automaton.matched[state]):
                text, self._held = self._held + text, ""
                self.found = text[index - length : index]
                return text[:index] if self._include else text[: index - length]
        self._state = state
        text = self._held + text
        certain = len(text) - automaton.depth[state]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held
