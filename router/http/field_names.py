"""Errors in a client's words: the handler names fields as gRPC does, and some of HTTP's clients call them otherwise."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lorrery.chassis.errors import RequestError

COMPLETION: Mapping[str, str] = {
    "adapter_id": "model",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "text": "prompt",
    "token_ids": "prompt",
}
"""Of OpenAI's completions; chats have no `prompt`."""
CHAT: Mapping[str, str] = {**COMPLETION, "text": "messages", "token_ids": "messages"}
LORA: Mapping[str, str] = {"adapter_id": "lora_name"}
"""Of vLLM's routes that load adapters."""

SLORA: Mapping[str, str] = {
    "ListAdapters": "/v1/models",
    "adapter_id": "lora_dir",
    "request_id": "req_id",
    "text": "inputs",
}
"""Of S-LoRA's routes; its sampling parameters have the handler's names."""

_MENTIONED = ("ListAdapters", "max_new_tokens")
"""Messages about other fields mention them."""


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors of what runs within again, with fields by these names (the handler's -> the client's)."""
    try:
        yield
    except RequestError as error:
        told = _renamed(error, names)
        if told is None:
            raise
        raise told from error


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError | None:
    """Return a copy, for a refusal may be kept for others; None: nothing has another name."""
    field = error.facts.get("field", "")
    own = field.partition("[")[0]
    given = [name for name in {own, *_MENTIONED} if name in names]
    if not given:
        return None
    pattern = re.compile(rf"(?<!['\w])({'|'.join(given)})(?!['\w])")

    def instead(found: re.Match[str]) -> str:
        return names[found[1]]

    copy = type(error).__new__(type(error), pattern.sub(instead, str(error)))
    vars(copy).update(vars(error))
    copy.facts = dict(error.facts)
    if field:
        copy.facts["field"] = pattern.sub(instead, field)
    return copy
