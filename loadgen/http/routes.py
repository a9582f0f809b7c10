"""Request bodies and event formats of each route.

* `openai`: `/v1/completions`; the prompt as text or token ids. * `openai-chat`: `/v1/chat/completions`; the prompt as
messages. An adapter is named as the model (vLLM's convention). * `slora`: S-LoRA's `/generate_stream`, `lora_dir` names
the adapter; its events have neither usage nor token counts.

Greedy (temperature 0, `do_sample` false), with the seed of the gRPC client for the same request, so that a Lorrery
server gives the same output over every protocol.
"""

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Protocol

import numpy as np

from lorrery.loadgen.http.answer import Answer
from lorrery.loadgen.reception import Ask
from lorrery.loadgen.workload.prompts import (
    FIRST_WORD_ID,
    TokenIds,
    output_seed,
    own_token_ids,
    prompt_token_ids,
    shared_token_ids,
)
from lorrery.loadgen.workload.request import WorkloadRequest


class Route(Protocol):
    """One route of one kind of server."""

    path: str
    has_asked_length: bool
    """Whether an output that ignores end-of-sequence is certain to have the requested length."""

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        """Return the body of a request; `model`: the base model's name."""
        ...

    def read(self, event: Mapping[str, Any], answer: Answer) -> None:
        """Record an event that is not an error.

        Raises:
            LookupError, TypeError, AttributeError: it is not of this route.
        """
        ...


class Completions:
    """OpenAI's text completions.

    Args:
        prompt_ids: send prompts as token ids.
    """

    path = "/v1/completions"
    has_asked_length = False

    def __init__(self, *, prompt_ids: bool = False) -> None:
        self._prompt_ids = prompt_ids

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        """See `Route.body`."""
        prompt: str | list[int]
        prompt = prompt_token_ids(ask.request, ask.seed).tolist() if self._prompt_ids else "".join(_texts(ask))
        return {"prompt": prompt, "max_tokens": ask.max_new_tokens, **_common(ask, model)}

    def read(self, event: Mapping[str, Any], answer: Answer) -> None:
        """See `Route.read`: a chunk without text, as LiteLLM's proxy ends its streams, brings no token."""
        for choice in event["choices"]:
            if (text := choice.get("text")) is not None:
                answer.token_event(text, choice.get("finish_reason"))
            elif "delta" in choice:
                raise LookupError("a chunk of a chat")
            elif reason := choice.get("finish_reason"):
                answer.finish_reason = reason
        _read_usage(event, answer)


class Chat:
    """OpenAI's chat completions: the shared part is the system message, each turn a user message.

    Messages are stripped, because many chat templates strip them or add blanks themselves: an answer sent back then has
    the same tokens as when it was received.
    """

    path = "/v1/chat/completions"
    has_asked_length = False

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        """See `Route.body`."""
        shared, *said = _texts(ask)
        messages = [{"role": "system", "content": shared.strip()}] if shared else []
        roles = ("user", "assistant")
        messages += [{"role": roles[number % 2], "content": text.strip()} for number, text in enumerate(said)]
        return {"messages": messages, "max_completion_tokens": ask.max_new_tokens, **_common(ask, model)}

    def read(self, event: Mapping[str, Any], answer: Answer) -> None:
        """See `Route.read`: a chunk with only a role brings no token."""
        for choice in event["choices"]:
            delta = choice["delta"]
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if not text and delta.get("tool_calls"):
                text = str(delta["tool_calls"])
            if text or "role" not in delta:
                answer.token_event(text, choice.get("finish_reason"))
            elif reason := choice.get("finish_reason"):
                answer.finish_reason = reason
        _read_usage(event, answer)


class Slora:
    """S-LoRA's own route."""

    path = "/generate_stream"
    has_asked_length = True

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        """See `Route.body`."""
        return {
            "model_dir": model,
            "lora_dir": ask.request.adapter_id,
            "inputs": "".join(_texts(ask)),
            "parameters": {
                "do_sample": False,
                "ignore_eos": ask.ignore_eos,
                "max_new_tokens": ask.max_new_tokens,
            },
        }

    def read(self, event: Mapping[str, Any], answer: Answer) -> None:
        """See `Route.read`; `finished` is -1 if S-LoRA aborted the request."""
        finished = event["finished"]
        if finished == -1:
            answer.fail("ABORTED", "the server gave the request up (finished is -1)")
            return
        answer.token_event(event["token"]["text"] or "", "finished" if finished else None)


def _common(ask: Ask, model: str) -> dict[str, Any]:
    seed = output_seed(ask.request, ask.seed)
    body: dict[str, Any] = {
        "model": ask.request.adapter_id or model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": seed - 2**64 if seed >= 2**63 else seed,  # vLLM takes a signed 64-bit seed
    }
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.request.tenant_id:
        body["user"] = ask.request.tenant_id
    if ask.request.priority:
        body["priority"] = ask.request.priority
    if ask.request.cache_salt:
        body["cache_salt"] = ask.request.cache_salt
    return body


def _read_usage(event: Mapping[str, Any], answer: Answer) -> None:
    usage = event.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        counts = usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError("usage")
        answer.usage = counts


def _texts(ask: Ask) -> list[str]:
    """Return the shared part (may be empty), then the earlier questions and answers in turn, and the new question."""
    turn = ask.request.turn
    texts = ["" if turn is None else _text(shared_token_ids(turn, ask.seed))]
    for earlier in () if turn is not None and turn.alone else ask.history:
        texts += [_own_text(earlier.request, ask.seed), "".join(earlier.reception.text)]
    return [*texts, _own_text(ask.request, ask.seed)]


def _own_text(request: WorkloadRequest, seed: int) -> str:
    if request.turn is not None and request.turn.text:
        return request.turn.text
    return _text(own_token_ids(request, seed))


def _text(token_ids: TokenIds) -> str:
    words = _words()
    return "".join([words[number] for number in (token_ids - np.uint32(FIRST_WORD_ID)).tolist()])


@functools.cache
def _words() -> Sequence[str]:
    """Return the words with a leading blank, which makes each one token in the usual tokenizers."""
    text = resources.files("lorrery.tokenizer").joinpath("words.txt").read_text(encoding="utf-8")
    return [" " + word for word in text.split()]
