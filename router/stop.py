"""Stop strings, twice: as token sequences for the worker, and over the detokenised stream.

The worker matches a stop string where the model happened to produce it in the tokenizer's own spelling; it then
computes no further step. Text in which token boundaries fall otherwise is matched here, by characters. Either way the
client's text ends before the stop string, while its token ids tell every token that was produced.
"""

from collections.abc import Iterable, Sequence

from lorrery.router.tokenizer import Tokenizer


def stop_token_sequences(stop_strings: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the worker compares with a sequence's last tokens; empty ones are dropped."""
    sequences = (tuple(tokenizer.encode_stop(text)) for text in stop_strings)
    return tuple(sequence for sequence in sequences if sequence)


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The first is the one whose last character comes earliest, and of those that end there the longest; so the outcome
    does not depend on how the text was split. Text that may be the beginning of a stop string is held back.

    Args:
        stop_strings: none of them empty.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text and return what is certain not to belong to a stop string; after a match, nothing."""
        if self.matched:
            return ""
        text = self._held + text
        matches = ((at + len(stop), at) for stop in self._stop_strings if (at := text.find(stop)) >= 0)
        if (first := min(matches, default=None)) is not None:
            self.matched, self._held = True, ""
            return text[: first[1]]
        keep = max(_overlap(text, stop) for stop in self._stop_strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what is held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
