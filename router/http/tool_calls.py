"""Tool calls of earlier turns, as chat templates read them.

In OpenAI's routes a call's arguments are text. Templates iterate over an object (`arguments.items()`) or write it as
JSON themselves, so vLLM parses the text first (vllm/entrypoints/chat_utils.py). As there, whatever is no JSON object
reads as an empty one: the call is a model's, and its client could not go on with the conversation otherwise.
"""

import json
from typing import Any

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.nesting import too_deep


def read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant's turn, each with its arguments as an object.

    Args:
        calls: as OpenAI's clients send them.
        where: their path in the request, for errors.

    Raises:
        InvalidRequest: one of them is no call of a function, or is nested too deeply.
    """
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} is no list; give a list of calls, or leave it out", field=where)
    return [_read(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _read(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(
            f"{where} is no call of a function; give the type 'function', and a function with name and arguments",
            field=where,
        )
    arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


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
