"""What OpenAI's Responses and Anthropic's Messages share: text in content blocks."""

from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted

OPENAI_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content that OpenAI's routes read, as vLLM's do (vllm/entrypoints/chat_utils.py), and the field of each with
its text."""

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
