"""JSON bodies of any length, written piece by piece without blocking the event loop.

A body is a lazy sequence of text parts. A body that ends within the first piece has a content length; a longer one is
sent in chunks as fast as its reader takes them, so it is never in memory as a whole. HTTP/1.0 has no chunks, so there
it is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorrery.service.tasks import Turns

PIECE_CHARACTERS = 1 << 16
"""Size at which a piece is sent."""
BATCH = 64
"""List elements per part."""

T = TypeVar("T")


async def send_json(scope: Scope, send: Send, parts: Iterable[str], turns: Turns) -> None:
    """Send a response whose body consists of `parts`; yields to the event loop whenever its turn is over."""
    in_chunks = scope.get("http_version") != "1.0"
    begun = False
    turn = turns.begin()
    gathered: list[str] = []
    num_characters = 0
    for part in parts:
        gathered.append(part)
        num_characters += len(part)
        if in_chunks and num_characters >= PIECE_CHARACTERS:
            if not begun:
                begun = True
                await _start(send)
            await send({"type": "http.response.body", "body": "".join(gathered).encode(), "more_body": True})
            gathered, num_characters = [], 0
        if turn.is_over:
            await turn.pass_on()
    last = "".join(gathered).encode()
    if not begun:
        await _start(send, len(last))
    await send({"type": "http.response.body", "body": last})


async def _start(send: Send, length: int | None = None) -> None:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


class JsonParts(Response):
    """A response that is generated while it is sent.

    Args:
        parts: of its text.
        turns: shared by all such responses.
    """

    def __init__(self, parts: Iterable[str], turns: Turns) -> None:
        super().__init__()
        self._parts = parts
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application."""
        await send_json(scope, send, self._parts, self._turns)


def batches(elements: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield slices of `BATCH` elements."""
    return (elements[at : at + BATCH] for at in range(0, len(elements), BATCH))


def array(parts: Iterable[str]) -> Iterator[str]:
    """Yield a JSON array; each part has one or more elements, with the separators between them."""
    yield "["
    for number, part in enumerate(parts):
        yield f", {part}" if number else part
    yield "]"


def array_of(elements: Iterable[object]) -> Iterator[str]:
    """Yield a JSON array of elements, which are taken lazily."""
    source = iter(elements)
    return array(json.dumps(batch)[1:-1] for batch in iter(lambda: list(islice(source, BATCH)), []))
