"""What is to be generated for a response or a message: it is asked for as a chat is, as in vLLM.

So its parameters are checked and have effect as a chat's do.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lorrery.router.http.openai_requests import ChatRequest
from lorrery.service.errors import InvalidRequest, NeverFits

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


def created_cache_tokens(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """Return how many tokens of a prompt are new in the prefix cache: those of whole blocks that were not there.

    Args:
        prompt_tokens: of the prompt.
        cached_tokens: of them, those that were there.
        block_size: of the cache; 0: there is none.
    """
    return max(0, prompt_tokens // block_size * block_size - cached_tokens) if block_size else 0
