"""What responses show beside the text: log-probabilities, token ids, the prompt, usage so far.

Log-probabilities are computed when they are written. They follow from the token, its position and the seed, so a long
response only has to keep its tokens until then. They become JSON assembled from strings that are made once for each
token in use.

A token is shown as the text that it adds where it stands, and `bytes` are the bytes of that: of a character in several
tokens, the last one has all, and the others are empty, as in vLLM. A special token is shown by its name. Joined, the
tokens but the special ones are the text of the response, and `text_offset` is where each begins in it; only there vLLM
differs, which counts characters that its response does not have (the names of special tokens, and `token_id:N`).

A run of tokens costs a few microseconds for each token with its alternatives; building dicts for a JSON encoder took
twenty times as long, and the dicts of a long response were hundreds of megabytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from json import dumps
from json.encoder import encode_basestring_ascii as quoted

from lorrery.router.http.answer import BATCH, json_array
from lorrery.router.logprobs import OutputLogprobs, TokenLogprobs
from lorrery.tokenizer.base import Tokenizer

_KEPT = 4096
"""Tokens, and numbers, whose JSON is cached: more than a mock model uses."""

_number = lru_cache(_KEPT)(float.__repr__)
_quoted = lru_cache(_KEPT)(quoted)
_bytes = lru_cache(_KEPT)(lambda text: dumps(list(text.encode())))


class TokenTexts:
    """Tokens as text.

    Args:
        tokenizer: of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.alone = lru_cache(_KEPT)(self._alone)

    def _alone(self, token_id: int) -> str:
        """Return the text of a token wherever it stands, or the name of a special one; empty: part of a character."""
        if token_id in self._tokenizer.special_ids:
            return self._tokenizer.decode((token_id,))
        return self._tokenizer.detokenizer().push((token_id,))

    def num_characters(self, token_ids: Sequence[int]) -> int:
        """Return the length of the text of tokens, without names of special ones."""
        return len(self._tokenizer.detokenizer().push(token_ids))

    def reading(self, text: str = "", at: int = 0) -> "Reading":
        """Return a reading of a new sequence.

        Args:
            text: of the prompt that it begins with, which may have names of special tokens in it.
            at: the number of characters of that before its first token.
        """
        return Reading(self, self._tokenizer, text, at)


class Reading:
    """Reads a sequence: what each token adds to its text.

    Attributes:
        num_characters: of the text so far.
    """

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer, text: str, at: int) -> None:
        self._alone, self._special_ids, self._text = texts.alone, tokenizer.special_ids, text
        self._detokenizer = tokenizer.detokenizer()
        self.num_characters = at

    def take(self, token_ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return what each of the next tokens is shown as, and the number of characters before it."""
        texts: list[str] = []
        offsets: list[int] = []
        push, at = self._detokenizer.push, self.num_characters
        for token_id in token_ids:
            offsets.append(at)
            if token_id in self._special_ids:
                name = self._alone(token_id)
                texts.append(name)
                if self._text.startswith(name, at):
                    at += len(name)
            else:
                text = push((token_id,))
                texts.append(text)
                at += len(text)
        self.num_characters = at
        return texts, offsets


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
        self._alone, self.reading = texts.alone, texts.reading
        self._as_token_ids = as_token_ids

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else text

    def completion(self, runs: Sequence[Run], num_top: int, reading: Reading) -> Iterator[str]:
        """Yield them in the format of `/v1/completions`.

        Args:
            runs: of tokens, in order.
            num_top: number of alternatives to list.
            reading: of the sequence, up to them.
        """
        short = [batch for run in runs for batch in run.batches()]
        texts: list[Sequence[str]] = []

        def offsets() -> Iterator[str]:
            for run in short:
                of_run, places = reading.take(run.token_ids)
                texts.append(of_run)
                yield ", ".join(map(str, places))

        yield '{"text_offset": '
        yield from json_array(offsets())
        yield ', "token_logprobs": '
        yield from json_array(
            ", ".join("null" if one is None else _number(one.logprob) for one in run.each(0)) for run in short
        )
        yield ', "tokens": '
        yield from json_array(
            ", ".join(map(_quoted, map(self._name, run.token_ids, of_run)))
            for run, of_run in zip(short, texts, strict=True)
        )
        yield ', "top_logprobs": '
        yield from json_array(
            ", ".join(
                "null" if one is None else self._alternatives(one, text)
                for one, text in zip(run.each(num_top), of_run, strict=True)
            )
            for run, of_run in zip(short, texts, strict=True)
        )
        yield "}"

    def _alternatives(self, one: TokenLogprobs, text: str) -> str:
        shown = {self._name(token_id, its_text): logprob for token_id, its_text, logprob in self._with_top(one, text)}
        return f"{{{', '.join([f'{_quoted(name)}: {_number(logprob)}' for name, logprob in shown.items()])}}}"

    def _with_top(self, one: TokenLogprobs, text: str) -> Iterator[tuple[int, str, float]]:
        """Yield a token first, which reads as `text`, then the likeliest others, each with its log-probability."""
        others = zip(one.top_token_ids, one.top_logprobs, strict=True)
        return chain(
            ((one.token_id, text, one.logprob),),
            ((token_id, self._alone(token_id), value) for token_id, value in others if token_id != one.token_id),
        )

    def chat(self, runs: Sequence[Run], num_top: int, reading: Reading) -> Iterator[str]:
        """Yield them in the format of `/v1/chat/completions`; see `completion`."""
        yield '{"content": '
        yield from json_array(
            ", ".join(
                self._listed(one, text, num_top)
                for one, text in zip(run.each(num_top), reading.take(run.token_ids)[0], strict=True)
                if one is not None
            )
            for whole in runs
            for run in whole.batches()
        )
        yield "}"

    def _listed(self, one: TokenLogprobs, text: str, num_top: int) -> str:
        top = ", ".join(
            [
                f'{{"token": {_quoted(name)}, "logprob": {_number(logprob)}, "bytes": {_bytes(name)}}}'
                for name, logprob in (
                    (self._name(token_id, its_text), logprob)
                    for token_id, its_text, logprob in islice(self._with_top(one, text), num_top)
                )
            ]
        )
        return (
            f'{{"token": {_quoted(self._name(one.token_id, text))}, "logprob": {_number(one.logprob)},'
            f' "bytes": {_bytes(text)}, "top_logprobs": [{top}]}}'
        )

    def prompt(self, run: Run, num_top: int) -> Iterator[str]:
        """Return those of a prompt in the format of vLLM's own field."""
        reading = self.reading()
        return json_array(
            ", ".join(
                "null" if one is None else self._ranked(one, text)
                for one, text in zip(batch.each(num_top), reading.take(batch.token_ids)[0], strict=True)
            )
            for batch in run.batches()
        )

    def _ranked(self, one: TokenLogprobs, text: str) -> str:
        ranks = dict(zip(one.top_token_ids, range(1, 1 + len(one.top_token_ids)), strict=True))
        shown = [
            f'"{token_id}": {{"logprob": {_number(logprob)}, "rank": {ranks.get(token_id, one.rank)},'
            f' "decoded_token": {_quoted(its_text)}}}'
            for token_id, its_text, logprob in self._with_top(one, text)
        ]
        return f"{{{', '.join(shown)}}}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is shown in the response.

    Attributes:
        text: its text, if it is echoed.
        token_ids: its tokens.
        logprobs: of its tokens.
        num_cut: characters of the text before its tokens, if it is cut to its last ones.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: OutputLogprobs
    num_cut: int = 0

    def run(self, first: int = 0, last: int | None = None) -> Run:
        """Return tokens `first` to `last` as a run; prompt tokens have negative positions."""
        return Run(self.logprobs, first - len(self.token_ids), self.token_ids[first:last], follows=first > 0)


@dataclass(slots=True)
class _Shown:
    """How much of a choice has been shown."""

    reading: Reading
    num_tokens: int = 0
    num_echoed: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice: one event, or the whole.

    Attributes:
        text: its text.
        runs: tokens whose log-probabilities are shown.
        reading: of the choice, up to them.
        token_ids: new output tokens.
        prompt: the prompt, if its tokens or log-probabilities are shown here.
    """

    text: str
    runs: Sequence[Run]
    reading: Reading
    token_ids: Sequence[int] = ()
    prompt: Prompt | None = None


@dataclass
class Details:
    """What to show, and the prompts it refers to.

    Attributes:
        json: writes log-probabilities.
        n: outputs per prompt.
        prompts: in order; empty if they are not shown.
        top_logprobs: number of alternatives per token; None: no log-probabilities.
        prompt_logprobs: the same for the prompt, in vLLM's own field.
        token_ids: whether to show token ids.
        prompt_token_ids: whether to show those of the prompt.
        echo: whether text and log-probabilities begin with the prompt's.
        continuous_usage: whether each chunk of a stream has the usage of its choice so far.
        output: whether output follows the echo.
    """

    json: LogprobsJson
    n: int
    prompts: Sequence[Prompt] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    prompt_token_ids: bool = False
    echo: bool = False
    continuous_usage: bool = False
    output: bool = True
    _shown: dict[int, _Shown] = field(default_factory=dict)

    def echoed(self, index: int) -> Iterator[Piece]:
        """Yield the parts of a long prompt that precede the first piece of a choice, which has the rest of it."""
        if not self.echo or self.top_logprobs is None:
            return
        prompt, shown = self.prompts[index // self.n], self._of(index)
        while shown.num_echoed + BATCH < len(prompt.token_ids):
            first = shown.num_echoed
            shown.num_echoed += BATCH
            text = "" if first else prompt.text
            yield Piece(text, [prompt.run(first, shown.num_echoed)], shown.reading)

    def take(self, index: int, text: str, token_ids: Sequence[int], logprobs: OutputLogprobs | None) -> Piece:
        """Return the next piece of a choice; the first piece begins with the prompt if that is echoed."""
        shown = self._of(index)
        if not self.output:
            text, token_ids = "", ()
        runs: list[Run] = []
        prompt = self.prompts[index // self.n] if self.prompts and not shown.begun else None
        if prompt is not None and self.echo:
            if self.top_logprobs is not None:
                runs.append(prompt.run(shown.num_echoed))
            text = text if shown.num_echoed else prompt.text + text
        shown.begun = True
        if self.top_logprobs is not None and logprobs is not None:
            runs.append(Run(logprobs, shown.num_tokens, token_ids))
        shown.num_tokens += len(token_ids)
        return Piece(text, runs, shown.reading, token_ids, prompt)

    def _of(self, index: int) -> _Shown:
        shown = self._shown.get(index)
        if shown is None:
            if self.echo:
                prompt = self.prompts[index // self.n]
                reading = self.json.reading(prompt.text, prompt.num_cut)
            else:
                reading = self.json.reading()
            shown = self._shown[index] = _Shown(reading)
        return shown

    def completion_logprobs(self, piece: Piece) -> Iterator[str]:
        """Return log-probabilities in the format of `/v1/completions`."""
        if self.top_logprobs is None:
            return iter(("null",))
        return self.json.completion(piece.runs, self.top_logprobs, piece.reading)

    def chat_logprobs(self, piece: Piece) -> Iterator[str]:
        """Return log-probabilities in the format of `/v1/chat/completions`."""
        if self.top_logprobs is None:
            return iter(("null",))
        return self.json.chat(piece.runs, self.top_logprobs, piece.reading)

    def usage_so_far(self, index: int, more: Mapping[str, None]) -> str:
        """Return the field of a chunk with the usage of its choice, after a comma; empty: not shown.

        Args:
            index: of the choice.
            more: further fields.
        """
        if not self.continuous_usage:
            return ""
        prompt, completion = len(self.prompts[index // self.n].token_ids), self._of(index).num_tokens
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return f', "usage": {dumps(counts | dict(more))}'
