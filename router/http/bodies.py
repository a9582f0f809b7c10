"""Request bodies: strict JSON, without what parsers interpret differently or what is costly to parse.

Refused, beside invalid JSON: another content type (a page of another site could send such a body without a CORS
preflight), text that is not UTF-8, NaN and Infinity, duplicate names in an object, numbers of thousands of digits, and
nesting deeper than `nesting.MAX_LEVELS`.
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

from lorrery.router.http.nesting import too_deep

_MAX_QUOTED = 100


def json_route(admit: Callable[[Request], object]) -> type[APIRoute]:
    """Return the class of routes with a JSON body.

    Args:
        admit: authenticates the caller before anything is read or parsed; what it raises becomes the response.
    """

    class JsonRoute(APIRoute):
        """A route with a JSON body."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Return the handler with the check and the JSON parser."""
            serve = super().get_route_handler()

            async def served(request: Request) -> Response:
                admit(request)
                return await serve(JsonRequest(request.scope, request.receive))

            return served

    return JsonRoute


class JsonRequest(Request):
    """A request with a JSON body."""

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            HTTPException: it has another content type, is compressed, or is too long.
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
        """Return the parsed body.

        Raises:
            HTTPException: it cannot be parsed.
        """
        return parse(await self.body())


def parse(body: bytes) -> object:
    """Parse a body.

    Raises:
        HTTPException: it cannot be parsed.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        _refuse(f"the body is no UTF-8 text: byte {body[error.start]:#04x} at {error.start}")
    if (why := too_deep(body)) is not None:
        _refuse(f"the body {why}")
    try:
        found: object = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        return found
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
