"""JSON bodies of any length, written piece by piece while the rest of the router goes on.

A body comes as parts of its text, which are made as they are asked for. One that is whole before a piece is full has a
content length; a longer one goes in chunks, no faster than its reader takes them, so that it never lies in memory as a
whole. HTTP/1.0 has no chunks; there it has to.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorrery.chassis.turns import Turns

PIECE_CHARACTERS = 1 << 16
"""A piece is sent once it has so many."""
BATCH = 64
"""So many elements of a list make a part."""

T = TypeVar("T")


async def send_json(scope: Scope, send: Send, parts: Iterable[str], turns: Turns) -> None:
    """Send an answer whose body is these parts; between them the loop goes on where a turn is over."""
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
    """An answer that is made as it is sent.

    Args:
        parts: of its text.
        turns: of all such answers.
    """

    def __init__(self, parts: Iterable[str], turns: Turns) -> None:
        super().__init__()
        self._parts = parts
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        await send_json(scope, send, self._parts, self._turns)


def batches(elements: Sequence[T]) -> Iterator[Sequence[T]]:
    """Return a sequence in runs of `BATCH`."""
    return (elements[at : at + BATCH] for at in range(0, len(elements), BATCH))


def array(parts: Iterable[str]) -> Iterator[str]:
    """Return an array; each part has one element or more, with what stands between them."""
    yield "["
    for number, part in enumerate(parts):
        yield f", {part}" if number else part
    yield "]"


def array_of(elements: Iterable[object]) -> Iterator[str]:
    """Return an array of what JSON can say, which is asked for as it is shown."""
    source = iter(elements)
    return array(json.dumps(batch)[1:-1] for batch in iter(lambda: list(islice(source, BATCH)), []))
