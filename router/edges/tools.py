"""Calls of tools: read from an output as it grows, shown in chats, and read again from earlier turns.

An output that calls tools is text in the form that its `Form` describes; `CallReader` finds the calls in it, and
`ChatCalls` shows them as vLLM does in OpenAI's chats.

In OpenAI's routes the arguments of an earlier call are text. Templates iterate over an object (`arguments.items()`) or
write it as JSON themselves, so vLLM parses the text first (vllm/entrypoints/chat_utils.py). As there, whatever is no
JSON object reads as an empty one: the call is a model's, and its client could not go on with the conversation
otherwise.
"""

import json
import re
from collections.abc import Callable, Iterator
from hashlib import blake2b
from json import dumps
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from lorrery.router.http.bodies import Bounds, too_much
from lorrery.router.http.forms import Form
from lorrery.service.errors import InvalidRequest

_LETTERS = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
_HEAD = re.compile(r'(?:\s*\}\s*,|\s*\[)\s*\{\s*"name"\s*:\s*("' + _LETTERS + r'")\s*,\s*"parameters"\s*:\s*(?=\{)')
_MOST_HEAD_CHARACTERS = 4096
_BLANKS = " \t\r\n"


def _beginning() -> re.Pattern[str]:
    """Return a pattern for the beginnings of an array's first head: of its parts, each follows a whole one."""
    pattern = ""
    for part in reversed(("[", "{", '"name"', ":", "string", ",", '"parameters"', ":", "{")):
        if part == "string":
            pattern = rf'"{_LETTERS}(?:\\(?:u[0-9a-fA-F]{{0,3}})?|"{pattern})?'
        else:
            for letter in reversed(part):
                pattern = f"{re.escape(letter)}(?:{pattern})?"
        pattern = rf"\s*(?:{pattern})?"
    return re.compile(pattern)


_BEGINNING = _beginning()


class CallPiece(NamedTuple):
    """A part of an output.

    Attributes:
        text: of the arguments of a call, or of the text.
        call: the number of the call, from 0; None: text.
        name: of the tool, in the first piece of a call.
    """

    text: str
    call: int | None = None
    name: str | None = None


class CallReader:
    """Turns the text of one output into pieces.

    Args:
        tool: whose arguments the output is; None: it may call any, or none.
        parsed: called after each reading, with whether it found part of a call.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(self, tool: str | None, parsed: Callable[[bool], None] = lambda called: None) -> None:
        self._tool = tool
        self._parsed = parsed
        self.num_calls = 0
        self._held = ""
        self._is_text = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[CallPiece]:
        """Take more text; return what is certain now."""
        pieces = self._read(text)
        self._parsed(any(piece.call is not None for piece in pieces))
        return pieces

    def _read(self, text: str) -> list[CallPiece]:
        if self._is_text:
            return [CallPiece(text)] if text and not self.num_calls else []
        if self._tool is not None:
            return self._arguments_of(self._tool, text)
        self._held += text
        pieces: list[CallPiece] = []
        while self._held:
            if self._depth:
                pieces.append(CallPiece(self._take_arguments(), self.num_calls - 1))
            elif (head := _HEAD.match(self._held)) is not None and head.end() < len(self._held):
                self._held = self._held[head.end() :]
                self.num_calls += 1
                pieces.append(CallPiece(self._take_arguments(), self.num_calls - 1, json.loads(head[1])))
            else:
                if not self._may_begin():
                    pieces += self.end()
                break
        return pieces

    def end(self) -> list[CallPiece]:
        """Return what is left at the end: what cannot become a call is text, unless calls precede it."""
        is_part_of_call = bool(self._held.strip()) and self._may_begin()
        held, self._held, self._is_text = self._held, "", True
        return [CallPiece(held)] if held and not self.num_calls and not is_part_of_call else []

    def _arguments_of(self, tool: str, text: str) -> list[CallPiece]:
        if self.num_calls:
            return [CallPiece(text, 0)] if text else []
        text = text.lstrip(_BLANKS)  # a vocabulary may begin each text with a blank
        if not text:
            return []
        self.num_calls = 1
        return [CallPiece(text, 0, tool)]

    def _may_begin(self) -> bool:
        """Return whether the held text may be the beginning of an array of calls, or of another call."""
        if len(self._held) > _MOST_HEAD_CHARACTERS:
            return False
        return self.num_calls > 0 or _BEGINNING.fullmatch(self._held) is not None

    def _take_arguments(self) -> str:
        """Take the held text up to the end of the call's arguments, an object."""
        for place, letter in enumerate(self._held, 1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                else:
                    self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
            if not self._depth:
                taken, self._held = self._held[:place], self._held[place:]
                return taken
        taken, self._held = self._held, ""
        return taken


def read_whole(reader: CallReader, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a whole output, and its calls: the name of each tool, and its arguments as JSON."""
    said, calls = "", list[tuple[str, str]]()
    for piece in reader.push(text) + reader.end():
        if piece.call is None:
            said += piece.text
        else:
            assert piece.name is not None
            calls.append((piece.name, piece.text))
    return said, calls


def call_id(prefix: str, output: str, call: int) -> str:
    """Return the id of a call; `output`: the id of the output that makes it, `call`: its number there."""
    return f"{prefix}{blake2b(f'{output} {call}'.encode(), digest_size=12).hexdigest()}"


class ChatCalls:
    """The fields of one output's message, or of its growing parts.

    Args:
        form: of the output.
        output_id: unlike any other output's.
    """

    def __init__(self, form: Form, output_id: str) -> None:
        self._reader = CallReader(form.tool, form.parsed)
        self._output_id = output_id

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._reader.num_calls

    def deltas(self, text: str, last: bool) -> list[str]:
        """Return the fields of each delta for more text, at least one, which may be empty.

        Args:
            text: that follows.
            last: whether the output ends there.
        """
        pieces = self._reader.push(text)
        if last:
            pieces += self._reader.end()
        content = "".join(piece.text for piece in pieces if piece.call is None)
        calls = [shown for piece in pieces if piece.call is not None for shown in self._call_deltas(piece)]
        said = [f'"content": {quoted(content)}'] if content else []
        return [*said, *(f'"content": null, "tool_calls": [{call}]' for call in calls)] or [""]

    def _call_deltas(self, piece: CallPiece) -> Iterator[str]:
        """Yield the parts of a call: its name, and more of its arguments."""
        assert piece.call is not None
        if piece.name is not None:
            identity = {"id": call_id("chatcmpl-tool-", self._output_id, piece.call), "type": "function"}
            yield dumps(identity | {"index": piece.call, "function": {"name": piece.name}})
        if piece.text:
            yield f'{{"index": {piece.call}, "function": {{"arguments": {quoted(piece.text)}}}}}'

    def whole(self, text: str) -> tuple[str, str]:
        """Return the content of a message for its whole text, and its field with calls after a comma; empty: none."""
        content, calls = read_whole(self._reader, text)
        if not calls:
            return content, ""
        shown = [
            {
                "id": call_id("chatcmpl-tool-", self._output_id, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
        return content, f', "tool_calls": {dumps(shown)}'


_MAX_CHARACTERS = 1 << 20
"""Arguments of all calls of a conversation, which the template writes into its prompt."""
_BOUNDS = Bounds(parts=1 << 15, values=1 << 17)
"""Of one call."""


class ArgumentsReader:
    """Reads the arguments of the calls of one conversation."""

    def __init__(self) -> None:
        self._num_characters = 0

    def read(self, given: object, where: str) -> dict[str, Any]:
        """Return a call's arguments, given as JSON or as an object; without any, an empty object.

        Args:
            given: as clients send them.
            where: their path in the request, for errors.

        Raises:
            InvalidRequest: they are nested too deeply, or too much.
        """
        if not isinstance(given, str):
            return given if isinstance(given, dict) else {}
        self._num_characters += len(given)
        why = f"brings the arguments of all calls to over {_MAX_CHARACTERS} characters; send fewer"
        if self._num_characters <= _MAX_CHARACTERS:
            why = next(filter(None, too_much(given.encode(errors="replace"), _BOUNDS)), "")
        if why:
            raise InvalidRequest(f"{where} {why}", field=where)
        return as_object(given)


def as_object(text: str) -> dict[str, Any]:
    """Return the object that a text is as JSON; an empty one if it is something else."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
