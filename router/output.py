"""The client's view of one sequence: text beside token ids, cut at a stop string.

Stop strings are matched twice. The worker matches one if the model produces it in the tokenizer's own tokenisation; it
then computes no further step. Text with other token boundaries is matched here, by characters. Either way the client's
text ends before the stop string, while its token ids include every token that was produced.
"""

from collections.abc import Iterable
from dataclasses import replace

from lorrery.router.request import Finish, Request, Usage
from lorrery.tokenizer.base import Tokenizer
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.outputs import START, StopAutomaton


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


class Output:
    """Turns the tokens of one sequence into the contents of its messages.

    Args:
        request: its stop strings cut the text.
        tokenizer: for the text.

    Attributes:
        num_tokens: number of tokens returned by `push` so far.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = tokenizer.detokenizer()
        sampling = request.sampling
        self._stop = (
            StopMatcher(
                stop_automaton(sampling.stop_sequences),
                max(map(len, sampling.stop_sequences)),
                include=sampling.include_stop_sequence,
            )
            if sampling.stop_sequences
            else None
        )
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string; nothing may be written after it."""
        return self._stop is not None and self._stop.matched

    def push(self, token_ids: list[int], finish: Finish | None) -> tuple[list[int], str, Finish | None]:
        """Take new tokens, and the finish if they are the last.

        Returns:
            What to write: tokens, text, finish. Tokens after a stop string are left out. If the stop string shows only
            in the text, `stopped` is set and there is no finish: the caller ends the sequence and calls `stop_finish`.
        """
        if self._stop is not None:
            token_ids, text, finish = self._push_until_stop(self._stop, token_ids, finish)
        else:
            text = self._detokenizer.push(token_ids)
        self.num_tokens += len(token_ids)
        if finish is not None and self._stop is not None and not self.stopped:
            text += self._stop.flush()
        return token_ids, text, finish

    def _push_until_stop(
        self, stop: StopMatcher, token_ids: list[int], finish: Finish | None
    ) -> tuple[list[int], str, Finish | None]:
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            pieces.append(stop.push(self._detokenizer.push((token_id,)), counts=self._counts(index + 1)))
            if stop.matched:
                if finish is not None:
                    finish = _stop_finish(finish.usage, self.num_tokens + index + 1, stop.found)
                return token_ids[: index + 1], "".join(pieces), finish
        return token_ids, "".join(pieces), finish

    def _counts(self, num_more: int) -> bool:
        """Return whether a stop string may end with the last of `num_more` further tokens."""
        return self.num_tokens + num_more > self._request.sampling.min_new_tokens

    def stop_finish(self, upstream: Finish | None) -> Finish:
        """Return the finish of a sequence that was stopped here.

        Args:
            upstream: the scheduler's finish, for a sequence that ran past the stop string; None: unknown.
        """
        usage = upstream.usage if upstream is not None else Usage(self._request.prompt_tokens, 0)
        return _stop_finish(usage, self.num_tokens, "" if self._stop is None else self._stop.found)


def _stop_finish(usage: Usage, completion_tokens: int, stop_sequence: str) -> Finish:
    return Finish(FinishReason.STOP, replace(usage, completion_tokens=completion_tokens), stop_sequence)
