"""Tool calls of earlier turns, as chat templates read them.

In OpenAI's routes a call's arguments are text. Templates iterate over an object (`arguments.items()`) or write it as
JSON themselves, so vLLM parses the text first (vllm/entrypoints/chat_utils.py). As there, whatever is no JSON object
reads as an empty one: the call is a model's, and its client could not go on with the conversation otherwise.
"""

import json
from typing import Any

from lorrery.router.http.nesting import Bounds, too_much
from lorrery.service.errors import InvalidRequest

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
