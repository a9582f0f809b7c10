"""Request bodies, parsed as vLLM's server parses them, but not what is costly to parse.

A large body is counted piece by piece, in turns with everything else on the event loop, and is refused where it holds
more than a valid one could: parsed values take up to a hundred times its memory. Counted are texts, objects and arrays,
of which a million take a hundred megabytes and seconds to validate; all values with numbers, which cost a tenth of
that; and levels. A chat template that indents JSON writes a line for each bracket, as long as its depth: 0.8 MB of
brackets nested 900 deep became 2 GB of text. The tools and schemas of real clients are nested under 30 levels deep.

Parsing what is left cannot be interrupted, and takes a tenth of a second at most; large bodies are parsed one after
another, with as much time for others after each.

Another content type is refused: a page of another site could send such a body without a CORS preflight.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from itertools import accumulate
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lorrery.service.network.server import RECEIVE_BYTES
from lorrery.service.tasks import Turns

MAX_LEVELS = 64
PIECE_BYTES = 1 << 18
"""Counting in so much takes a few milliseconds."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{},'))
_STEPS = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class Bounds(NamedTuple):
    """How much of it there may be.

    Attributes:
        parts: texts, names of members among them, objects and arrays.
        values: of all kinds.
        why: where these numbers come from, for messages.
    """

    parts: int
    values: int
    why: str = ""

    @classmethod
    def of(cls, max_req_input_len: int, http_max_outputs: int) -> "Bounds":
        """Return the bounds on a request's body.

        A message of a conversation has five parts and makes three tokens or more; of prompts there may be one for each
        output, and of token ids for the longest prompt, beside 256 for each output.
        """
        return cls(
            2 * max_req_input_len + 16 * http_max_outputs,
            max_req_input_len + 256 * http_max_outputs,
            f" (max_req_input_len is {max_req_input_len}, http_max_outputs {http_max_outputs})",
        )


def too_much(json: bytes, bounds: Bounds) -> Iterator[str | None]:
    """Yield for each piece of some JSON why the whole is too much, as the predicate of a sentence; None: it is not yet.

    What is no JSON may be judged either way.
    """
    rest, level, num_quotes, num_brackets, num_values = b"", 0, 0, 0, 1
    for at in range(0, len(json), PIECE_BYTES):
        piece = rest + json[at : at + PIECE_BYTES]
        num_rest = (
            len(piece) - len(piece.rstrip(b"\\"))
        ) % 2  # a backslash that escapes what the next piece begins with
        rest, piece = piece[len(piece) - num_rest :], piece[: len(piece) - num_rest]
        # Escaped backslashes go first, so that the next one escapes what follows it.
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
        is_inside, here = num_quotes % 2, marks.count(b'"')
        num_quotes += here
        if num_quotes <= 2 * bounds.parts:
            outside = b"".join(marks.split(b'"')[is_inside::2])
            brackets = outside.translate(None, b",")
            levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=level))
            level, deepest = levels[-1], max(levels)
            if deepest > MAX_LEVELS:
                yield f"is nested {deepest} levels deep; at most {MAX_LEVELS} are read; send fewer levels"
                return
            num_brackets += len(brackets)
            num_values += len(outside) - len(brackets) + sum(map(brackets.count, (b"[", b"{")))
        for what, number, most in (
            ("texts, objects and arrays", (num_quotes + num_brackets) // 2, bounds.parts),
            ("values", num_values, bounds.values),
        ):
            if number > most:
                yield f"has over {most} {what}{bounds.why}; send fewer, in several requests"
                return
        yield None


_MAX_DIGITS = 400
"""Of a number in a large body; the largest float has 309. Reading a number takes the square of its length."""


class BodyReader:
    """Parses the bodies of all requests.

    Args:
        bounds: on each.
        turns: of long work.
        wide_bytes: most characters of a body with some beyond ASCII, of which each may take four bytes, several times.
    """

    def __init__(self, bounds: Bounds, turns: Turns, wide_bytes: int = RECEIVE_BYTES) -> None:
        self._wide_bytes = wide_bytes
        self._bounds = bounds
        self._turns = turns
        self._one_at_a_time = asyncio.Lock()

    async def read(self, body: bytes) -> object:
        """Return a parsed body, or the error that says why it is none.

        It raises none, because an error's traceback would keep the body until the next garbage collection.
        """
        if (encoding := json.detect_encoding(body)) != "utf-8":
            try:
                body = body.decode(encoding, "surrogatepass").encode(errors="surrogatepass")
            except ValueError as error:
                return _without_body(error)
        if len(body) <= PIECE_BYTES:
            why = next(filter(None, too_much(body, self._bounds)), None)
            return _parsed(body) if why is None else _refused(why)
        async with self._one_at_a_time:
            num_escapes = body.count(rb"\u")
            is_wide = num_escapes > 0 or not body.isascii()
            if is_wide and (num_characters := len(body) - 5 * num_escapes) > self._wide_bytes:
                most = f"at most {self._wide_bytes} are read where some are beyond ASCII"
                return _refused(f"has {num_characters} characters; {most}; send fewer")
            turn = self._turns.begin()
            for why in too_much(body, self._bounds):
                if why is not None:
                    return _refused(why)
                if turn.is_over:
                    await turn.pass_on()
            began = time.monotonic()
            found = _parsed(body, _int, _float)
            await asyncio.sleep(time.monotonic() - began)
            return found


def _refused(why: str) -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, f"the body {why}")


def _parsed(
    body: bytes, read_int: Callable[[str], int] | None = None, read_float: Callable[[str], float] | None = None
) -> object:
    try:
        found: object = json.loads(body.decode(errors="surrogatepass"), parse_int=read_int, parse_float=read_float)
        return found
    except ValueError as error:
        return _without_body(error)


def _without_body(error: ValueError) -> ValueError:
    """Return an error that says the same as a parser's, which has all that it was to parse."""
    if not isinstance(error, json.JSONDecodeError):
        return ValueError(str(error))
    found = json.JSONDecodeError(error.msg, "", 0)
    found.pos = error.pos
    return found


def _int(digits: str) -> int:
    return int(_checked(digits))


def _float(digits: str) -> float:
    return float(_checked(digits))


def _checked(digits: str) -> str:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return digits


def json_route(admit: Callable[[Request], object], reader: BodyReader) -> type[APIRoute]:
    """Return the class of routes with a JSON body.

    Args:
        admit: authenticates the caller before anything is read or parsed; what it raises becomes the response.
        reader: of the bodies.
    """

    class JsonRequest(Request):
        """A request with a JSON body."""

        async def body(self) -> bytes:
            """Read the body; return its first byte, whose presence is all that FastAPI wants of it and keeps."""
            self._whole = await super().body()
            del self._body
            return self._whole[:1]

        async def json(self) -> object:
            """Return the parsed body.

            Raises:
                HTTPException: it holds too much.
                ValueError: it cannot be parsed, of which FastAPI makes the response.
            """
            whole = [self._whole]
            del self._whole
            found = await reader.read(whole.pop())
            if isinstance(found, Exception):
                raise found
            return found

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
