"""Request bodies, parsed as vLLM's server parses them, but not what is costly to parse.

Another content type is refused: a page of another site could send such a body without a CORS preflight.
"""

import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lorrery.router.http.nesting import too_deep


def json_route(admit: Callable[[Request], object]) -> type[APIRoute]:
    """Return the class of routes with a JSON body.

    Args:
        admit: authenticates the caller before anything is read or parsed; what it raises becomes the response.
    """

    class JsonRoute(APIRoute):
        """A route with a JSON body."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Return the handler with the check and the JSON parser."""
            serve, has_body = super().get_route_handler(), self.body_field is not None

            async def served(request: Request) -> Response:
                admit(request)
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if has_body and kind != "application/json":
                    raise RequestValidationError(["Unsupported Media Type: Only 'application/json' is allowed"])
                return await serve(JsonRequest(request.scope, request.receive))

            return served

    return JsonRoute


class JsonRequest(Request):
    """A request with a JSON body."""

    async def json(self) -> object:
        """Return the parsed body.

        Raises:
            HTTPException: it is nested too deeply.
            ValueError: it cannot be parsed, of which FastAPI makes the response.
        """
        body = await self.body()
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        if (why := too_deep(text.encode(errors="surrogatepass"))) is not None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body {why}")
        found: object = json.loads(text)
        return found
