"""OpenAI's requests and answers, as vLLM understands and makes them.

What matters to clients, and is easily got wrong: a chunk carries one token, the role comes with the first and the
finish reason with the last; usage has a chunk of its own, without choices, and only if it is asked for; the last event
is `[DONE]`. Fields that are unknown here, and those that are null, are passed over; one that would change the output
and cannot be honoured is refused.
"""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from lorrery.chassis.errors import InvalidRequest, RequestError
from lorrery.router.http.answer import DONE, Collected, data, finish_word
from lorrery.router.http.errors import error_body
from lorrery.v1 import router_pb2, types_pb2

MAX_CHOICES = 128
"""Most outputs of one HTTP request, over all its prompts."""

Tokens = list[Annotated[int, Field(ge=0, le=0xFFFFFFFF)]]


class StreamOptions(BaseModel):
    """What a stream tells beside its output."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(BaseModel):
    """The fields that all of OpenAI's generating routes have."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 and -1: all tokens")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    user: str | None = Field(default=None, description="the tenant, where no API keys are asked for")

    unsupported: ClassVar[tuple[str, ...]] = ()
    """Fields that would change the output in a way that is not to be had."""

    def options(self) -> StreamOptions:
        """Return the options of its stream."""
        return self.stream_options or StreamOptions()

    def sampling(self, max_tokens: int | None) -> types_pb2.SamplingParams:
        """Return what it asks of the sampler.

        Raises:
            InvalidRequest: it asks for what is not to be had.
        """
        for name in self.unsupported:
            if value := getattr(self, name):
                raise InvalidRequest(f"{name} is not to be had here; leave it out", field=name, value=value)
        sampling = types_pb2.SamplingParams(do_sample=self.temperature is None or self.temperature > 0)
        if max_tokens is not None:
            sampling.max_new_tokens = max_tokens
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos"):
            value = getattr(self, name)
            if value is not None and not (name == "temperature" and value == 0):
                setattr(sampling, name, value)
        if self.top_k:
            sampling.top_k = self.top_k
        if self.stop:
            sampling.stop_sequences.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        if self.min_tokens:
            if self.min_tokens != max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}; it must be 0 or max_tokens, which is {max_tokens}",
                    field="min_tokens",
                    value=self.min_tokens,
                    limit=max_tokens,
                )
            sampling.ignore_eos = True
        return sampling


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | Tokens | list[Tokens]
    max_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    unsupported: ClassVar[tuple[str, ...]] = ("echo", "suffix", "logprobs")

    def prompts(self) -> list[str] | list[list[int]]:
        """Return its prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = self.prompt
        return [prompts] if prompts and isinstance(prompts[0], int) else prompts


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: str
    content: str | list[ContentPart] | None = None

    def text(self) -> str:
        """Return what is said."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    logprobs: bool | None = None

    unsupported: ClassVar[tuple[str, ...]] = ("logprobs",)

    def prompt(self) -> str:
        """Return the conversation as one text."""
        turns = "".join(f"{message.role}: {message.text()}\n" for message in self.messages)
        return turns + "assistant:"


class CompletionShape:
    """How `/v1/completions` answers.

    Args:
        request_id: of the whole answer.
        model: as the client named it.
        options: what a stream tells beside its output.
        n: outputs of each prompt.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, request_id: str, model: str, options: StreamOptions, n: int) -> None:
        self._n = n
        self._head = {"id": request_id, "created": unix_seconds(), "model": model}
        head = json.dumps({"id": request_id, "object": self.chunk_kind, "created": self._head["created"]})[:-1]
        self._prefix = f'data: {head}, "model": {json.dumps(model)}, "choices": [{{"index": '
        self._include_usage = bool(options.include_usage)

    def event(self, index: int, message: router_pb2.GenerateResponse) -> bytes:
        """See `Shape`."""
        finish = finish_word(message)
        reason = "null" if finish is None else f'"{finish}"'
        return (
            f"{self._prefix}{index}, {self._delta(index, json.dumps(message.text))},"
            f' "logprobs": null, "finish_reason": {reason}}}]}}\n\n'
        ).encode()

    def _delta(self, index: int, text: str) -> str:
        return f'"text": {text}'

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        if not self._include_usage:
            return DONE
        content = self._content(self.chunk_kind, []) | {"usage": usage_of(usages, self._n)}
        return data(json.dumps(content)) + DONE

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return data(json.dumps(error_body(error))) + DONE

    def whole(self, choices: Sequence[Collected]) -> object:
        """See `Shape`."""
        listed = [
            {
                "index": index,
                **self._whole_delta("".join(choice.text)),
                "logprobs": None,
                "finish_reason": _word(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return self._content(self.kind, listed) | {"usage": usage_of([choice.usage for choice in choices], self._n)}

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class ChatShape(CompletionShape):
    """How `/v1/chat/completions` answers."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, options: StreamOptions, n: int) -> None:
        super().__init__(request_id, model, options, n)
        self._introduced: set[int] = set()

    def _delta(self, index: int, text: str) -> str:
        if index in self._introduced:
            return f'"delta": {{"content": {text}}}'
        self._introduced.add(index)
        return f'"delta": {{"role": "assistant", "content": {text}}}'

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


def _word(choice: Collected) -> str | None:
    assert choice.finish is not None
    return finish_word(router_pb2.GenerateResponse(finish=choice.finish))


def usage_of(usages: Sequence[types_pb2.Usage], n: int) -> dict[str, Any]:
    """Return the usage of an answer.

    Args:
        usages: of each output, in order.
        n: outputs of each prompt, which counts once.
    """
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    cached = sum(usage.cached_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def unix_seconds() -> int:
    """Return the time of day, which answers are stamped with; nothing is decided by it."""
    return int(time.time())


def new_id(prefix: str, asked: str | None) -> str:
    """Return the id of an answer; `asked`: the client's `x-request-id`."""
    return f"{prefix}-{asked or uuid4().hex}"
