"""Log-probabilities as JSON, assembled from strings that are made once for each token in use.

Tokens are shown as text, each by itself: a part of a character reads as U+FFFD, whose bytes are also its `bytes`. A run
of tokens costs a few microseconds for each token with its alternatives; building dicts for a JSON encoder took twenty
times as long, and the dicts of a long response were hundreds of megabytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from json import dumps
from json.encoder import encode_basestring_ascii as quoted

from lorrery.router.http.pieces import BATCH, array
from lorrery.router.logprobs import OutputLogprobs, TokenLogprobs
from lorrery.tokenizer.base import Tokenizer

_KEPT = 4096
"""Tokens, and numbers, whose JSON is cached: more than a mock model uses."""


class TokenTexts:
    """Tokens as JSON strings.

    Args:
        tokenizer: for the text of a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_KEPT)(self._text)
        self.quoted = lru_cache(_KEPT)(lambda token_id: quoted(self.text(token_id)))
        self.bytes = lru_cache(_KEPT)(lambda token_id: dumps(list(self.text(token_id).encode())))

    def _text(self, token_id: int) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return detokenizer.push((token_id,)) + detokenizer.flush()


_number = lru_cache(_KEPT)(float.__repr__)


def _quoted_id(token_id: int) -> str:
    return f'"token_id:{token_id}"'


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens.

    Attributes:
        logprobs: of the tokens.
        position: of the first token, as `logprobs` counts.
        token_ids: the tokens.
        follows: whether a token precedes the first; the first token of a prompt has no log-probability.
    """

    logprobs: OutputLogprobs
    position: int
    token_ids: Sequence[int]
    follows: bool = True

    def batches(self) -> "Iterator[Run]":
        """Yield it in runs of at most `BATCH` tokens."""
        for at in range(0, len(self.token_ids), BATCH):
            token_ids = self.token_ids[at : at + BATCH]
            yield Run(self.logprobs, self.position + at, token_ids, self.follows or at > 0)

    def each(self, num_top: int) -> Iterator[TokenLogprobs | None]:
        """Yield the log-probability of each token; None for the first token of a prompt."""
        at = self.logprobs.at
        for number, token_id in enumerate(self.token_ids):
            yield at(self.position + number, token_id, num_top) if number or self.follows else None


class LogprobsJson:
    """Log-probabilities in the formats of one response.

    Args:
        texts: of tokens.
        as_token_ids: whether tokens are called `token_id:N`.
    """

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool = False) -> None:
        self._texts = texts
        self._name = _quoted_id if as_token_ids else texts.quoted

    def completion(self, runs: Sequence[Run], num_top: int, offset: int) -> Iterator[str]:
        """Yield them in the format of `/v1/completions`.

        Args:
            runs: of tokens, in order.
            num_top: number of alternatives to list.
            offset: number of characters before them.
        """
        name, text = self._name, self._texts.text
        short = [batch for run in runs for batch in run.batches()]
        yield '{"tokens": '
        yield from array(", ".join(map(name, run.token_ids)) for run in short)
        yield ', "token_logprobs": '
        yield from array(
            ", ".join("null" if one is None else _number(one.logprob) for one in run.each(0)) for run in short
        )
        yield ', "top_logprobs": '
        yield from array(
            ", ".join("null" if one is None else self._alternatives(one) for one in run.each(num_top)) for run in short
        )
        yield ', "text_offset": '
        yield from array(_offsets(short, offset, text))
        yield "}"

    def _alternatives(self, one: TokenLogprobs) -> str:
        name = self._name
        shown = {name(one.token_id): one.logprob}  # tokens with equal text are shown once
        shown.update(zip(map(name, one.top_token_ids), one.top_logprobs, strict=True))
        return f"{{{', '.join([f'{key}: {_number(logprob)}' for key, logprob in shown.items()])}}}"

    def chat(self, runs: Sequence[Run], num_top: int) -> Iterator[str]:
        """Yield them in the format of `/v1/chat/completions`."""
        yield '{"content": '
        yield from array(
            ", ".join(self._listed(one) for one in run.each(num_top) if one is not None)
            for whole in runs
            for run in whole.batches()
        )
        yield ', "refusal": null}'

    def _listed(self, one: TokenLogprobs) -> str:
        top = ", ".join([f"{self._named(*pair)}}}" for pair in zip(one.top_token_ids, one.top_logprobs, strict=True)])
        return f'{self._named(one.token_id, one.logprob)}, "top_logprobs": [{top}]}}'

    def _named(self, token_id: int, logprob: float) -> str:
        return (
            f'{{"token": {self._name(token_id)}, "logprob": {_number(logprob)}, "bytes": {self._texts.bytes(token_id)}'
        )

    def prompt(self, run: Run, num_top: int) -> Iterator[str]:
        """Return those of a prompt in the format of vLLM's own field."""
        return array(
            ", ".join("null" if one is None else self._ranked(one) for one in batch.each(num_top))
            for batch in run.batches()
        )

    def _ranked(self, one: TokenLogprobs) -> str:
        top = dict(zip(one.top_token_ids, enumerate(one.top_logprobs, 1), strict=True))
        ranked = {one.token_id: (one.rank, one.logprob)} | top
        quoted_text = self._texts.quoted
        shown = [
            f'"{token_id}": {{"logprob": {_number(logprob)}, "rank": {rank}, "decoded_token": {quoted_text(token_id)}}}'
            for token_id, (rank, logprob) in ranked.items()
        ]
        return f"{{{', '.join(shown)}}}"

    def num_characters(self, runs: Sequence[Run]) -> int:
        """Return the number of characters of the tokens, for later offsets."""
        return sum(len(self._texts.text(token_id)) for run in runs for token_id in run.token_ids)


def _offsets(runs: Sequence[Run], offset: int, text: Callable[[int], str]) -> Iterator[str]:
    for run in runs:
        offsets = list(accumulate((len(text(token_id)) for token_id in run.token_ids), initial=offset))
        offset = offsets.pop()
        yield ", ".join(map(str, offsets))
