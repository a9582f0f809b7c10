"""Conversations as one text, by a Jinja template, rendered as Hugging Face's transformers render it.

The template is the operator's, its messages are a client's: it runs in a sandbox that reads no attribute which begins
with an underscore and changes nothing that it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NoReturn, cast

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorrery.chassis.errors import InvalidRequest, SettingsError

PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The shipped tokenizer's, and that of a file without one: `role: content`, a line each."""

_TODAY = date(2024, 7, 26)
"""What templates take for today: a prompt is the same on every day. Llama 3's have this date where none is given."""


class ChatTemplate:
    """A chat template.

    Args:
        source: in Jinja's language.
        special_tokens: by the variables' names, such as `bos_token`.
        where: names it in errors.

    Raises:
        SettingsError: it cannot be read.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _TODAY.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"{where}: the chat template cannot be read: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object]) -> str:
        """Return the conversation as one text.

        Raises:
            InvalidRequest: the template refuses it, or fails on it.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": list(messages)}
        try:
            return self._template.render(values)
        except Exception as error:  # the template is a program: it may fail in any way
            raise InvalidRequest(
                f"messages do not go with the chat template: {error}; see the template for what it takes",
                field="messages",
            ) from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: object) -> str:
    """Jinja's own escapes what HTML does not allow, which a prompt does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **cast("dict[str, Any]", options))
