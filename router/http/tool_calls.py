"""Tool calls of earlier turns, as chat templates read them.

In OpenAI's routes a call's arguments are text. Templates iterate over an object (`arguments.items()`) or write it as
JSON themselves, so vLLM parses the text first (vllm/entrypoints/chat_utils.py). As there, whatever is no JSON object
reads as an empty one: the call is a model's, and its client could not go on with the conversation otherwise.
"""

import json
from typing import Any

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.nesting import too_deep


def read_arguments(given: object, where: str) -> dict[str, Any]:
    """Return a call's arguments, given as JSON or as an object; without any, an empty object.

    Args:
        given: as clients send them.
        where: their path in the request, for errors.

    Raises:
        InvalidRequest: they are nested too deeply.
    """
    if isinstance(given, str):
        if (why := too_deep(given.encode(errors="replace"))) is not None:
            raise InvalidRequest(f"{where} {why}", field=where)
        return as_object(given)
    return given if isinstance(given, dict) else {}


def as_object(text: str) -> dict[str, Any]:
    """Return the object that a text is as JSON; an empty one if it is something else."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
