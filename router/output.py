"""The client's view of one sequence: text beside token ids, cut at a stop string."""

from dataclasses import replace

from router.request import Finish, FinishReason, Request, Usage
from router.stop import StopMatcher
from router.tokenizer import Tokenizer


class Output:
    """Turns the tokens of one sequence into what its messages say.

    Args:
        request: whose stop strings cut the text.
        tokenizer: for the text.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = tokenizer.detokenizer()
        stop_strings = request.sampling.stop_sequences
        self._stop = StopMatcher(stop_strings) if stop_strings else None
        self.num_tokens = 0

    def push(self, token_ids: list[int], finish: Finish | None) -> tuple[list[int], str, Finish | None]:
        """Take new tokens, and the finish if they are the last.

        Returns:
            What to write: tokens, text, finish. A stop string that only the text shows ends the sequence here: tokens
            behind it are left out, and the finish is made of what is known.
        """
        if self._stop is not None:
            token_ids, text, finish = self._push_until_stop(self._stop, token_ids, finish)
        else:
            text = self._detokenizer.push(token_ids)
        self.num_tokens += len(token_ids)
        if finish is not None and (self._stop is None or not self._stop.matched):
            rest = self._detokenizer.flush()
            text += rest if self._stop is None else self._stop.push(rest) + self._stop.flush()
        return token_ids, text, finish

    def _push_until_stop(
        self, stop: StopMatcher, token_ids: list[int], finish: Finish | None
    ) -> tuple[list[int], str, Finish | None]:
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            pieces.append(stop.push(self._detokenizer.push((token_id,))))
            if stop.matched:
                return token_ids[: index + 1], "".join(pieces), self._stopped(self.num_tokens + index + 1, finish)
        return token_ids, "".join(pieces), finish

    def _stopped(self, completion_tokens: int, finish: Finish | None) -> Finish:
        usage = finish.usage if finish is not None else Usage(self._request.prompt_tokens, 0)
        return Finish(FinishReason.STOP, replace(usage, completion_tokens=completion_tokens))
