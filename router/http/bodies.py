"""Bodies of requests: JSON without what different readers read differently, or what costs a reader too much.

Refused beside what is no JSON at all: another content type (a page of another site could send such a body without the
browser's asking), text that is no UTF-8, NaN and Infinity, a name that an object has twice, numbers of thousands of
digits, and nesting deeper than Python's parser goes.
"""

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

_MAX_QUOTED = 100


def json_route(admit: Callable[[Request], object]) -> type[APIRoute]:
    """Return the class of routes whose body is JSON.

    Args:
        admit: checks who asks, before anything is read or parsed for it; what it raises is the answer.
    """

    class JsonRoute(APIRoute):
        """Such a route."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Return what serves it."""
            serve = super().get_route_handler()

            async def served(request: Request) -> Response:
                admit(request)
                return await serve(JsonRequest(request.scope, request.receive))

            return served

    return JsonRoute


class JsonRequest(Request):
    """A request whose body is JSON."""

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            HTTPException: it announces another kind of content, or is compressed or too long.
        """
        coding = self.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-encoding is {coding[:_MAX_QUOTED]!r}; bodies are not decompressed here; send it as it is",
                {"accept-encoding": "identity"},
            )
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-type is {kind[:_MAX_QUOTED]!r}; this route reads 'application/json'",
            )
        return await super().body()

    async def json(self) -> object:
        """Return the content of the body.

        Raises:
            HTTPException: it cannot be read.
        """
        return parse(await self.body())


def parse(body: bytes) -> object:
    """Return the content of a body.

    Raises:
        HTTPException: it cannot be read.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        _refuse(f"the body is no UTF-8 text: byte {body[error.start]:#04x} at {error.start}")
    try:
        found: object = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        return found
    except RecursionError:
        _refuse("the body is nested too deeply; send fewer levels")
    except json.JSONDecodeError as error:
        _refuse(f"the body is no JSON: {error.msg}, at character {error.pos}")
    except ValueError:
        _refuse("the body has a number of too many digits; send a shorter one")


def _no_constant(name: str) -> NoReturn:
    _refuse(f"the body is no JSON: {name} is no number there")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        _refuse(f"an object of the body has {twice[:_MAX_QUOTED]!r} twice; send it once")
    return found


def _refuse(why: str) -> NoReturn:
    raise HTTPException(HTTPStatus.BAD_REQUEST, why)
