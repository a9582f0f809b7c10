"""What an answer of OpenAI's routes shows beside its text: log-probabilities, token ids, the prompt.

What is shown of a token is worked out when it is written: it follows from the token, its place and the seed, so that a
long answer keeps no more than its tokens until then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lorrery.router.http.pieces import BATCH, array_of
from lorrery.router.http.token_json import LogprobsJson, Run
from lorrery.router.logprobs import OutputLogprobs


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose tokens matter to the answer.

    Attributes:
        text: of it.
        token_ids: its tokens.
        logprobs: says how likely they are.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: OutputLogprobs

    def run(self, first: int = 0, last: int | None = None) -> Run:
        """Return some of its tokens; those of a prompt have negative places."""
        return Run(self.logprobs, first - len(self.token_ids), self.token_ids[first:last], follows=first > 0)


@dataclass(slots=True)
class _Shown:
    """How much of a choice has been shown."""

    num_tokens: int = 0
    num_characters: int = 0
    num_echoed: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice: one event, or the whole of it.

    Attributes:
        text: of it.
        runs: of tokens whose log-probabilities are shown.
        offset: characters before them.
        token_ids: of the output, new ones.
        prompt: where its tokens or log-probabilities are shown here.
    """

    text: str
    runs: Sequence[Run]
    offset: int
    token_ids: Sequence[int] = ()
    prompt: Prompt | None = None


@dataclass
class Details:
    """What to show, and of which prompts.

    Attributes:
        json: how log-probabilities are written.
        n: outputs of each prompt.
        prompts: in order; none where they do not matter.
        top_logprobs: how many alternatives to show; None: no log-probabilities.
        prompt_logprobs: the same of the prompt, in vLLM's own field.
        token_ids: whether to show token ids.
        echo: whether text and log-probabilities begin with the prompt's.
        output: whether there is output behind the echo.
    """

    json: LogprobsJson
    n: int
    prompts: Sequence[Prompt] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    echo: bool = False
    output: bool = True
    _shown: dict[int, _Shown] = field(default_factory=dict)

    def echoed(self, index: int) -> Iterator[Piece]:
        """Return what of a long prompt is shown before the first piece of a choice, which has the rest of it."""
        if not self.echo or self.top_logprobs is None:
            return
        prompt, shown = self.prompts[index // self.n], self._of(index)
        while shown.num_echoed + BATCH < len(prompt.token_ids):
            first = shown.num_echoed
            shown.num_echoed += BATCH
            yield self._piece(shown, "" if first else prompt.text, [prompt.run(first, shown.num_echoed)])

    def take(self, index: int, text: str, token_ids: Sequence[int], logprobs: OutputLogprobs | None) -> Piece:
        """Return what to show of the next piece of a choice; the first begins with the prompt where it is echoed."""
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
        return self._piece(shown, text, runs, token_ids, prompt)

    def _of(self, index: int) -> _Shown:
        return self._shown.setdefault(index, _Shown())

    def _piece(
        self,
        shown: _Shown,
        text: str,
        runs: Sequence[Run],
        token_ids: Sequence[int] = (),
        prompt: Prompt | None = None,
    ) -> Piece:
        offset = shown.num_characters
        shown.num_characters += self.json.num_characters(runs)
        return Piece(text, runs, offset, token_ids, prompt)

    def completion_logprobs(self, piece: Piece) -> Iterator[str]:
        """Return log-probabilities as `/v1/completions` shows them."""
        if self.top_logprobs is None:
            return iter(("null",))
        return self.json.completion(piece.runs, self.top_logprobs, piece.offset)

    def chat_logprobs(self, piece: Piece) -> Iterator[str]:
        """Return log-probabilities as `/v1/chat/completions` shows them."""
        return iter(("null",)) if self.top_logprobs is None else self.json.chat(piece.runs, self.top_logprobs)

    def own(self, piece: Piece) -> Iterator[str]:
        """Return further fields of a choice, each behind a comma."""
        if self.token_ids:
            yield ', "token_ids": '
            yield from array_of(piece.token_ids)

    def about_prompt(self, piece: Piece) -> Iterator[str]:
        """Return further fields about its prompt, each behind a comma."""
        if piece.prompt is None:
            return
        if self.token_ids:
            yield ', "prompt_token_ids": '
            yield from array_of(piece.prompt.token_ids)
        if self.prompt_logprobs is not None:
            yield ', "prompt_logprobs": '
            yield from self.json.prompt(piece.prompt.run(), self.prompt_logprobs)
