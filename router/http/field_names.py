"""Errors in a client's words: the handler writes fields and calls as gRPC does, HTTP's clients have other names."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from lorrery.chassis.errors import RequestError


class Names(NamedTuple):
    """What a kind of client calls things, by the handler's name.

    Attributes:
        words: for messages, where they are about that field or always write it as a name, and for `param`.
        params: for `param` alone, where a message means the word.
    """

    words: Mapping[str, str]
    params: Mapping[str, str] = {}

    def param(self, field: str) -> str:
        """Return what the client calls a field; an element's index stays."""
        name, bracket, index = field.partition("[")
        return f"{self.params.get(name) or self.words.get(name, name)}{bracket}{index}"


_ADAPTERS = "GET /v1/models"
_EMPTY = "prompt is empty; give text or token_ids"
_MENTIONED = ("ListAdapters", _EMPTY, "max_new_tokens")
"""Messages about other fields, or none, write these."""

COMPLETION = Names(
    {
        "ListAdapters": _ADAPTERS,
        _EMPTY: "prompt is empty; give text or tokens",
        "adapter_id": "model",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "request_id": "x-request-id",
        "stop_sequences": "stop",
        "tenant_id": "user",
        "text": "prompt",
        "token_ids": "prompt",
        "top_logprobs": "logprobs",
    }
)
"""Of OpenAI's completions, and llm-mock's `/generate`."""


def of_prompt(number: int) -> Names:
    """Return what a completion with a list of prompts calls things, in errors about one of them."""
    place = f"prompt[{number}]"
    words = {_EMPTY: f"{place} is empty; give text or tokens", "text": place, "token_ids": place}
    return Names({**COMPLETION.words, **words}, {"prompt": place})


CHAT = Names(
    {
        **COMPLETION.words,
        _EMPTY: "messages make an empty prompt; give text",
        "text": "messages",
        "token_ids": "messages",
        "top_logprobs": "top_logprobs",
    },
    {"prompt": "messages"},
)
LORA = Names({"ListAdapters": _ADAPTERS, "adapter_id": "lora_name"})
"""Of vLLM's routes that load adapters."""

_SLORA_PARAMETERS = (
    *("do_sample", "presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k"),
    *("ignore_eos", "max_new_tokens", "stop_sequences"),
)
SLORA = Names(
    {
        "ListAdapters": _ADAPTERS,
        _EMPTY: "inputs is empty; give a text",
        "adapter_id": "lora_dir",
        "request_id": "req_id",
        "text": "inputs",
    },
    {"prompt": "inputs", **{name: f"parameters.{name}" for name in _SLORA_PARAMETERS}},
)
"""Of S-LoRA's routes; messages about its sampling parameters are S-LoRA's."""


@contextmanager
def named(names: Names) -> Iterator[None]:
    """Raise errors of what runs within again, in a client's words."""
    try:
        yield
    except RequestError as error:
        told = _renamed(error, names)
        if told is None:
            raise
        raise told from error


def _renamed(error: RequestError, names: Names) -> RequestError | None:
    """Return a copy, for a refusal may be kept for others; None: nothing has another name."""
    field, message, words = error.facts.get("field", ""), str(error), names.words
    given = [name for name in (*_MENTIONED, field.partition("[")[0]) if name in words]
    if given:
        message = re.sub(
            rf"(?<!['\w])({'|'.join(map(re.escape, given))})(?!['\w])", lambda found: words[found[1]], message
        )
    param = names.param(field)
    if (message, param) == (str(error), field):
        return None
    copy = type(error).__new__(type(error), message)
    vars(copy).update(vars(error))
    copy.facts = error.facts | ({"field": param} if field else {})
    return copy
