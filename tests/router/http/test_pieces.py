"""Long answers are made while they are written, in pieces, and the loop goes on in between."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lorrery.router.http.answer import BATCH, PIECE_CHARACTERS, JsonParts, array_of
from lorrery.service.tasks import Turns

PART = "x" * 1000


class Client:
    """An ASGI client that notes how much had been made when a part came, and in which round of the loop."""

    def __init__(self) -> None:
        self.num_made = self.num_rounds = 0
        self.headers: dict[bytes, bytes] = {}
        self.bodies: list[bytes] = []
        self.seen: list[tuple[int, int]] = []

    def parts(self, number: int) -> Iterator[str]:
        for _ in range(number):
            self.num_made += 1
            yield PART

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        else:
            self.bodies.append(message["body"])
            self.seen.append((self.num_made, self.num_rounds))

    async def ask(self, number: int, version: str = "1.1", turns: Turns | None = None) -> None:
        async def count() -> None:
            while True:
                self.num_rounds += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        answer = JsonParts(self.parts(number), turns or Turns(0.0))
        await answer({"type": "http", "http_version": version}, self._receive, self.send)
        counting.cancel()
        assert b"".join(self.bodies) == PART.encode() * number

    async def _receive(self) -> Any:
        raise NotImplementedError


async def test_a_short_answer_has_a_length_and_one_piece() -> None:
    client = Client()
    await client.ask(3)
    assert client.headers == {b"content-type": b"application/json", b"content-length": b"3000"}
    assert len(client.bodies) == 1


async def test_a_long_answer_is_written_while_it_is_made_and_others_go_on_in_between() -> None:
    client = Client()
    await client.ask(1000)
    assert b"content-length" not in client.headers
    assert max(map(len, client.bodies)) < PIECE_CHARACTERS + len(PART)
    made = [num_made for num_made, _ in client.seen]
    assert made[0] * len(PART) < PIECE_CHARACTERS + len(PART)
    assert made == sorted(set(made[:-1])) + made[-1:]
    assert client.num_rounds >= 1000  # a turn that is over at once ends with each part


async def test_http_1_0_gets_its_length_and_others_go_on_too() -> None:
    client = Client()
    await client.ask(200, "1.0")
    assert client.headers[b"content-length"] == b"200000"
    assert len(client.bodies) == 1
    assert client.num_rounds >= 200


@pytest.mark.parametrize("number", [0, 1, BATCH - 1, BATCH, 3 * BATCH + 1])
def test_an_array_comes_in_parts_of_few_elements(number: int) -> None:
    elements: list[object] = [{"a": [at, None]} for at in range(number)]
    parts = list(array_of(elements))
    assert json.loads("".join(parts)) == elements
    assert max(part.count("{") for part in parts) <= BATCH
