"""Anthropic's conventions on its routes: the header of the key, and the format of errors.

The format is that of Anthropic's API reference (errors, authentication): a key is in `x-api-key`, an error is `{"type":
"error", "error": {"type", "message"}, "request_id"}`, and every response has the header `request-id`. The list of
models is one route for both APIs: a request with `anthropic-version` comes from an Anthropic client.
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.router.http.edge import REQUEST_ID

PREFIX = "/v1/messages"
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def anthropic_body(status: HTTPStatus, message: str, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    kind = _TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def is_anthropics(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API."""
    path = f"{scope['path']}/"
    if path.startswith(f"{_MODELS}/"):
        return any(name == _VERSION for name, _ in scope["headers"])
    return path.startswith(f"{PREFIX}/")


def as_anthropic_has_it(app: ASGIApp) -> ASGIApp:
    """Wrap an app so that Anthropic's routes use its errors and header, and accept its key header.

    Args:
        app: returns errors in OpenAI's format, each as one body part.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_anthropics(scope):
            await app(scope, receive, send)
            return
        request_id: str = scope["state"][REQUEST_ID]
        start: Message = {}

        async def shaped(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                start["headers"] = [*message.get("headers", ()), (b"request-id", request_id.encode("latin-1"))]
                if not _is_error(start):
                    await send(start)
                return
            if _is_error(start):
                message["body"] = _shaped(start["status"], message["body"], request_id)
                length = (b"content-length", str(len(message["body"])).encode())
                start["headers"] = [*(one for one in start["headers"] if one[0] != b"content-length"), length]
                await send(start)
            await send(message)

        names = dict(scope["headers"])
        if (key := names.get(b"x-api-key")) is not None and b"authorization" not in names:
            scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key)]
        await app(scope, receive, shaped)

    return served


def _is_error(start: Message) -> bool:
    """Return whether a response is an error in JSON; that to a CORS preflight is plain text."""
    return start["status"] >= HTTPStatus.BAD_REQUEST and (b"content-type", b"application/json") in start["headers"]


def _shaped(status: int, content: bytes, request_id: str) -> bytes:
    return json.dumps(anthropic_body(HTTPStatus(status), json.loads(content)["error"]["message"], request_id)).encode()
