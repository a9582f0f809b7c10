"""Content blocks, of which only text is read; for OpenAI's Responses and Anthropic's Messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lorrery.chassis.errors import InvalidRequest
from lorrery.chassis.names import quoted

OPENAI_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content that OpenAI's routes read, as vLLM's do (vllm/entrypoints/chat_utils.py), and the field of each with
its text."""


class Block(BaseModel):
    """A block of content; which further fields it has depends on its type."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    def field(self, name: str) -> object:
        """Return a further field; None: absent."""
        return (self.model_extra or {}).get(name)


Blocks = Annotated[list[Block], Field(fail_fast=True)]
Content = str | Blocks


def text_of(content: str | Sequence[Block] | None, where: str, kinds: Mapping[str, str]) -> str:
    """Return the text of some content.

    Args:
        content: of a message.
        where: its path in the request, for errors.
        kinds: block types that have text, and the field of each with it.

    Raises:
        InvalidRequest: a block is of another type, or has no text.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(_text(block, f"{where}[{number}]", kinds) for number, block in enumerate(content))


def _text(block: Block, where: str, kinds: Mapping[str, str]) -> str:
    if block.type not in kinds:
        raise unread(block.type, where, kinds)
    field = kinds[block.type]
    text: str | None = getattr(block, field)
    if text is None:
        raise InvalidRequest(f"{where}.{field} is missing; a block of type {quoted(block.type)} has one", field=where)
    return text


def unread(kind: str, where: str, kinds: Iterable[str]) -> InvalidRequest:
    """Return the error for a block of an unsupported type."""
    read = " or ".join(quoted(one) for one in kinds)
    return InvalidRequest(
        f"{where}.type is {quoted(kind)}; the model reads text alone, {read}; leave the block out",
        field=f"{where}.type",
        value=quoted(kind),
    )
