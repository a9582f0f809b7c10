"""What an answer of OpenAI's routes shows beside its text: log-probabilities, token ids, the prompt.

Tokens of log-probabilities are shown as text, each by itself: what is only a part of a character reads as U+FFFD, and
its `bytes` are those of that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lorrery.router.logprobs import NEVER, OutputLogprobs, TokenLogprobs, Words
from lorrery.tokenizer.base import NUM_WORDS, Tokenizer
from lorrery.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose tokens matter to the answer."""

    text: str
    token_ids: Sequence[int]


@dataclass
class Details:
    """What to show, and of which prompts.

    Attributes:
        tokenizer: for the text of a token.
        n: outputs of each prompt.
        prompts: in order; none where they do not matter.
        seed: of the request, for what is shown of prompts.
        top_logprobs: how many alternatives to show; None: no log-probabilities.
        prompt_logprobs: the same of the prompt, in vLLM's own field.
        as_token_ids: tokens are called `token_id:N`.
        token_ids: whether to show token ids.
        echo: whether text and log-probabilities begin with the prompt's.
        output: whether there is output behind the echo.
    """

    tokenizer: Tokenizer
    n: int
    prompts: Sequence[Prompt] = ()
    seed: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    as_token_ids: bool = False
    token_ids: bool = False
    echo: bool = False
    output: bool = True
    _offsets: dict[int, int] = field(default_factory=dict)

    def take(
        self, index: int, text: str, token_ids: Sequence[int], found: Iterable[router_pb2.TokenLogprobs]
    ) -> "Piece":
        """Return what to show of the next piece of a choice; the first begins with the prompt where it is echoed."""
        first = index not in self._offsets
        if not self.output:
            text, token_ids, found = "", (), ()
        offset = self._offsets.get(index, 0)
        tokens = [
            TokenLogprobs(token_id, one.logprob, tuple(zip(one.top_token_ids, one.top_logprobs, strict=True)))
            for token_id, one in zip(token_ids, found, strict=False)
        ]
        about_prompt: dict[str, Any] = {}
        if first and self.prompts:
            prompt = self.prompts[index // self.n]
            if self.echo:
                text = prompt.text + text
                if self.top_logprobs is not None:
                    tokens = [*self._of_prompt(prompt, self.top_logprobs), *tokens]
            if self.token_ids:
                about_prompt["prompt_token_ids"] = list(prompt.token_ids)
            if self.prompt_logprobs is not None:
                about_prompt["prompt_logprobs"] = self._prompt_logprobs(prompt, self.prompt_logprobs)
        self._offsets[index] = offset + sum(len(self.token_text(one.token_id)) for one in tokens)
        own = {"token_ids": list(token_ids)} if self.token_ids else {}
        return Piece(self, text, tokens if self.top_logprobs is not None else None, offset, own, about_prompt)

    def _of_prompt(self, prompt: Prompt, num_top: int) -> list[TokenLogprobs]:
        first = -len(prompt.token_ids)
        logprobs = OutputLogprobs(Words(self.tokenizer.word_ids), self.seed, self.tokenizer.eos_id)
        return [logprobs.at(at, token, num_top) for at, token in enumerate(prompt.token_ids, first)]

    def _prompt_logprobs(self, prompt: Prompt, num_top: int) -> list[dict[str, Any] | None]:
        """Return vLLM's log-probabilities of a prompt; its first token follows nothing, so has none."""

        def shown(one: TokenLogprobs) -> dict[str, Any]:
            ranks = {token_id: rank for rank, (token_id, _) in enumerate(one.top, 1)}
            unlisted = NUM_WORDS + 1 if one.logprob == NEVER else 1
            return {
                str(token_id): {
                    "logprob": logprob,
                    "rank": ranks.get(token_id, unlisted),
                    "decoded_token": self.token_text(token_id),
                }
                for token_id, logprob in ((one.token_id, one.logprob), *one.top)
            }

        return [shown(one) if at else None for at, one in enumerate(self._of_prompt(prompt, num_top))]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        detokenizer = self.tokenizer.detokenizer()
        return detokenizer.push((token_id,)) + detokenizer.flush()

    def token_name(self, token_id: int) -> str:
        """Return what log-probabilities call a token."""
        return f"token_id:{token_id}" if self.as_token_ids else self.token_text(token_id)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice: one event, or the whole of it.

    Attributes:
        details: says how tokens are shown.
        text: of it.
        tokens: how likely each was; None: that is not shown.
        offset: characters before them.
        own: further fields of the choice.
        about_prompt: further fields about its prompt.
    """

    details: Details
    text: str
    tokens: Sequence[TokenLogprobs] | None
    offset: int
    own: dict[str, Any]
    about_prompt: dict[str, Any]

    def completion_logprobs(self) -> dict[str, Any] | None:
        """Return them as `/v1/completions` shows them; the first token of a prompt follows nothing, so has none."""
        if self.tokens is None:
            return None
        details = self.details
        texts = [details.token_text(one.token_id) for one in self.tokens]
        known = [None if details.echo and not self.offset and not at else one for at, one in enumerate(self.tokens)]
        return {
            "tokens": [details.token_name(one.token_id) for one in self.tokens],
            "token_logprobs": [one and one.logprob for one in known],
            "top_logprobs": [one and self._alternatives(one) for one in known],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=self.offset)) if texts else [],
        }

    def _alternatives(self, one: TokenLogprobs) -> dict[str, float]:
        name = self.details.token_name
        return {name(one.token_id): one.logprob} | {name(token_id): logprob for token_id, logprob in one.top}

    def chat_logprobs(self) -> dict[str, Any] | None:
        """Return them as `/v1/chat/completions` shows them."""
        if self.tokens is None:
            return None
        return {
            "content": [
                {
                    **self._named(one.token_id, one.logprob),
                    "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in one.top],
                }
                for one in self.tokens
            ],
            "refusal": None,
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.details.token_text(token_id)
        return {"token": self.details.token_name(token_id), "logprob": logprob, "bytes": list(text.encode())}
