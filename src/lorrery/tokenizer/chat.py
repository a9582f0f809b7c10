"""Renders conversations as one text, by a Jinja template, as Hugging Face's transformers does.

The template is the operator's, its messages are a client's: it runs in a sandbox that reads no attribute beginning with
an underscore and mutates none of its inputs, and stops at the longest text that could be a prompt: a loop over a
client's tools may write them many times, and JSON with an indent may be a hundred times as long as the client's.

As in vLLM, a template that does not name the role `developer` gets such messages as `system`, and then all of those as
one, which comes first: many templates take no other. The parts of a content become lines of one text, or follow one
another directly if the template has a loop over parts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorrery.service.errors import InvalidRequest, SettingsError
from lorrery.tokenizer.base import TextTooLongError

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
"""Template of the shipped tokenizer, and of a file without one: `role: content`, one line each."""

_TODAY = date(2024, 7, 26)
"""Date for templates, so that a prompt does not depend on the day. Llama 3's templates default to this date."""

_MOST_CHARACTERS = "most characters"
"""Variable with the limit of a rendering; no template can spell it."""

_END_MARK = "\U000f4a7c "
"""Follows the content of a final message that is to be continued, so that its end can be found in the text: a character
of a private plane, and a space, by which a template shows whether it strips the content."""


class ChatTemplate:
    """A chat template.

    Args:
        source: in Jinja's language.
        special_tokens: by the variables' names, such as `bos_token`.
        where: its origin, for errors.

    Raises:
        SettingsError: it cannot be parsed.
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
        self._between_parts = "" if _has_loop_over_parts(environment.parse(source)) else "\n"
        self._knows_developers = any(f"{quote}developer{quote}" in source for quote in "'\"")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_characters: int,
        variables: Mapping[str, object],
        *,
        to_be_continued: bool = False,
    ) -> str:
        """Render the conversation as one text; see `Tokenizer.chat_prompt`.

        Args:
            messages: at least one; each has a text as its content, or a list of texts, its parts, or of other parts.
            most_characters: of the text.
            variables: of the template.
            to_be_continued: end with the content of the last message.

        Raises:
            InvalidRequest: the template rejects it, or fails on it, or does not show the content to be continued.
            TextTooLongError: the text has more than `most_characters`.
        """
        conversation = [self._in_one_part(message) for message in messages]
        if not self._knows_developers and any(message["role"] == "developer" for message in conversation):
            conversation = _instructions_first(conversation)
        if not to_be_continued:
            return self._render(conversation, most_characters, variables)
        *before, last = conversation
        content = last["content"]
        marked = [*before, {**last, "content": content + _END_MARK}]
        return _until_mark(self._render(marked, most_characters + len(_END_MARK), variables), content)

    def _in_one_part(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message["content"]
        if isinstance(content, str) or not all(isinstance(part, str) for part in content):
            return message  # parts that are no texts are the template's to read
        between = "\n" if message["role"] == "tool" else self._between_parts
        return {**message, "content": between.join(filter(None, content))}

    def _render(
        self, conversation: list[Mapping[str, Any]], most_characters: int, variables: Mapping[str, object]
    ) -> str:
        values = {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": conversation}
        values[_MOST_CHARACTERS] = most_characters
        try:
            return _joined(self._template.generate(values), most_characters)
        except TextTooLongError:
            raise
        except Exception as error:  # the template is a program and may fail in any way
            raise InvalidRequest(
                f"messages do not go with the chat template: {error}; see the template for what it takes",
                field="messages",
            ) from None


def _has_loop_over_parts(template: nodes.Template) -> bool:
    """Return whether a template has a loop over the parts of a message's content."""
    for loop in template.find_all(nodes.For):
        parts: nodes.Node | None = loop.iter
        while isinstance(parts, nodes.Filter):
            parts = parts.node
        if isinstance(parts, nodes.Getattr) and parts.attr == "content":
            return True
        if isinstance(parts, nodes.Getitem) and isinstance(parts.arg, nodes.Const) and parts.arg.value == "content":
            return True
        if isinstance(parts, nodes.Name) and parts.name == "content":
            return True
    return False


def _instructions_first(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose messages of developers are of the system, and all of those the first one."""
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    instructions = [message for message in renamed if message["role"] == "system"]
    if renamed[0] is instructions[0] and len(instructions) == 1:
        return renamed
    text = "\n\n".join(message["content"] for message in instructions if message["content"])
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": text}, *others]


def _until_mark(text: str, content: str) -> str:
    """Return a text up to the mark after `content`; if the template has stripped that, its end is stripped."""
    before, mark, after = text.rpartition(_END_MARK.rstrip())
    if not mark or content.strip() not in before:
        raise InvalidRequest(
            "continue_final_message is set, and the chat template does not show the whole content of the last message;"
            " see the template for what it takes",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _to_json(
    context: Context, value: object, ensure_ascii: bool = False, indent: int | None = None, **options: object
) -> str:
    """Return JSON without escaping for HTML, which Jinja's own filter does."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **cast("dict[str, Any]", options))
    if indent is None:  # not much longer than what the client sent, and ten times as fast in one piece
        return encoder.encode(value)
    return _joined(encoder.iterencode(value), context[_MOST_CHARACTERS])


def _joined(pieces: Iterable[str], most_characters: int) -> str:
    """Return pieces as one text. Raises TextTooLongError as soon as they have more than `most_characters`."""
    found: list[str] = []
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > most_characters:
            raise TextTooLongError
        found.append(piece)
    return "".join(found)
