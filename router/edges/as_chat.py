"""What OpenAI's Responses and Anthropic's Messages share: generation as of a chat, content blocks, named events.

What is to be generated is asked for as a chat is, as in vLLM, so its parameters are checked and have effect as a chat's
do.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lorrery.router.http.openai_requests import ChatRequest
from lorrery.service.errors import InvalidRequest, NeverFits
from lorrery.service.names import quoted

_SAID = [{"role": "user", "content": ""}]
"""Stands for the conversation, which is read elsewhere."""


def as_chat(given: Mapping[str, Any]) -> ChatRequest:
    """Return a chat without its conversation.

    Args:
        given: its fields; those that are null are left out.

    Raises:
        InvalidRequest: a field has a value that it may not have in a chat.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return ChatRequest.model_validate({**fields, "messages": _SAID})
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise InvalidRequest(f"{field}: {wrong['msg']}", field=field) from None


def check_fits(prompt_tokens: int, max_model_len: int) -> None:
    """Check that a conversation fits into the context, with vLLM's message.

    Raises:
        NeverFits: it does not.
    """
    if prompt_tokens > max_model_len:
        raise NeverFits(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
            f" {prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the"
            " length of the input prompt.",
            field="input_tokens",
            value=prompt_tokens,
            limit=max_model_len,
        )


BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a line of Claude Code's that differs in each request. vLLM leaves it out, so that prefixes are cached."""


def without_billing_header(text: str) -> str:
    """Return what a system says, without Claude Code's line on billing."""
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def not_text(kind: str, where: str, field: str | None = None) -> InvalidRequest:
    """Return the error for content of a type that models of text do not read.

    Args:
        kind: its type.
        where: its path in the request.
        field: what the error names as the parameter at fault, as vLLM does; None: nothing.
    """
    facts = {} if field is None else {"field": field}
    return InvalidRequest(f"{where} is of type {quoted(kind)}; the model reads text alone; leave it out", **facts)


def named_event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return one event; `kind` is both its name and its `type`."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
