"""What responses of OpenAI's routes show beside the text: log-probabilities, token ids, the prompt, usage so far.

Log-probabilities are computed when they are written. They follow from the token, its position and the seed, so a long
response only has to keep its tokens until then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps

from lorrery.router.http.pieces import BATCH
from lorrery.router.http.token_json import LogprobsJson, Reading, Run
from lorrery.router.logprobs import OutputLogprobs


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
