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
    does not depend on how the text was split. As in vLLM, one character fewer than the longest has is held back,
    whatever it is; nothing where the stop string is to be part of the text.

    Args:
        automaton: of the stop strings' characters.
        longest: characters of the longest.
        include: whether the returned text includes the stop string.

    Attributes:
        found: the stop string that was found; empty: none.
    """

    __slots__ = ("_automaton", "_include", "_longest", "_state", "_tail", "found")

    def __init__(self, automaton: StopAutomaton, longest: int, *, include: bool = False) -> None:
        self._automaton = automaton
        self._longest = longest
        self._include = include
        self._state = START
        self._tail = ""  # of the text so far, as much of it as the beginning of a stop string may be
        self.found = ""

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.found)

    def push(self, text: str, *, counts: bool = True) -> str:
        """Take more text and return what is not held back; after a match, nothing.

        Args:
            text: the new text.
            counts: whether a stop string that is complete in this text is a match.
        """
        if self.found:
            return ""
        automaton, state = self._automaton, self._state
        num_returned = len(self._tail) if self._include else 0
        text = self._tail + text
        for index, char in enumerate(text[len(self._tail) :], len(self._tail) + 1):
            state = automaton.step(state, ord(char))
            if counts and (length := automaton.matched[state]):
                self._tail = ""
                self.found = text[index - length : index]
                return text[num_returned : index if self._include else index - length]
        self._state = state
        certain = max(0, len(text) - self._longest + 1)
        self._tail = text[certain:]
        return text[num_returned:] if self._include else text[:certain]

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._tail = self._tail, ""
        return "" if self._include else held
