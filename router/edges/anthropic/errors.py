"""The format of errors on Anthropic's routes, as vLLM has it, and what else their responses have in the head.

What a route refuses is `{"type": "error", "error": {"type", "message"}}`, with vLLM's names of types; a body that is
malformed, and a route that there is not, are refused as everywhere. Every response has the header `request-id`, where
Anthropic's package looks for it. The list of models is one route for both APIs: a request with `anthropic-version`
comes from an Anthropic client.
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.router.http.edge import REQUEST_ID

PREFIX = "/v1/messages"
PASSED_OVER = "passed_over"
"""Key in a request's ASGI state: paths of blocks that are passed over, for a header `warning`."""
_MOST_NAMED = 8
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"


def anthropic_body(kind: str, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_anthropics(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API."""
    path = f"{scope['path']}/"
    if path.startswith(f"{_MODELS}/"):
        return any(name == _VERSION for name, _ in scope["headers"])
    return path.startswith(f"{PREFIX}/")


def as_anthropic_has_it(app: ASGIApp) -> ASGIApp:
    """Wrap an app so that Anthropic's routes have its errors and headers.

    Args:
        app: returns errors in OpenAI's format, each as one body part.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_anthropics(scope):
            await app(scope, receive, send)
            return
        start: Message = {}

        async def shaped(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                start["headers"] = [*message.get("headers", ()), *_further_headers(scope["state"])]
                if not _is_error(start):
                    await send(start)
                return
            if _is_error(start):
                message["body"] = _shaped(message["body"])
                length = (b"content-length", str(len(message["body"])).encode())
                start["headers"] = [*(one for one in start["headers"] if one[0] != b"content-length"), length]
                await send(start)
            await send(message)

        await app(scope, receive, shaped)

    return served


def _further_headers(state: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    request_id: str = state[REQUEST_ID]
    headers = [(b"request-id", request_id.encode("latin-1"))]
    if passed_over := state.get(PASSED_OVER):
        said = f"passed over: {', '.join(passed_over[:_MOST_NAMED])}".replace("\\", "/").replace('"', "'")
        headers.append((b"warning", f'299 lorrery "{said}"'.encode("ascii", "backslashreplace")))
    return headers


def _is_error(start: Message) -> bool:
    """Return whether a response is an error in JSON; that to a CORS preflight is plain text."""
    return start["status"] >= HTTPStatus.BAD_REQUEST and (b"content-type", b"application/json") in start["headers"]


def _shaped(content: bytes) -> bytes:
    """Return an error as Anthropic's routes give it; one about the form of the body, or from no route, as it is."""
    error = json.loads(content).get("error")
    if not isinstance(error, dict) or error["type"] == HTTPStatus.BAD_REQUEST.phrase:
        return content
    return json.dumps(anthropic_body(error["type"], error["message"])).encode()
