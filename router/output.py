"""The client's view of one sequence: text beside token ids, cut at a stop string."""

from dataclasses import replace

from lorrery.router.request import Finish, Request, Usage
from lorrery.router.stop import StopMatcher, stop_automaton
from lorrery.tokenizer.base import Tokenizer
from lorrery.vocabulary.finish_reason import FinishReason


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
