"""Outputs that are drawn take turns: one at a time, and those of one request not before those of another."""

import asyncio
import threading
from typing import Any

import pytest

from lorrery.router.access import Access
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.reader import RequestReader
from lorrery.service.errors import InvalidRequest
from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.v1 import router_pb2


class Watched(SharedConstraint):
    """A constraint that says when it draws, and takes until it is let go."""

    def __init__(self, name: str, log: list[str], **form: Any) -> None:
        super().__init__(router_pb2.Constraint(**(form or {"text": name})))
        self.name, self.log, self.go, self.began = name, log, threading.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def draw(self, seed: int) -> str | None:
        self.log.append(self.name)
        self._loop.call_soon_threadsafe(self.began.set)
        assert self.go.wait(60)
        self.log.append(f"{self.name} done")
        return super().draw(seed)


ACCESS = Access(Settings())


@pytest.fixture
def reader() -> RequestReader:
    settings = Settings()
    return RequestReader(settings, BuiltinTokenizer(), Access(settings))


def begin(reader: RequestReader, constraint: SharedConstraint) -> "asyncio.Task[Any]":
    message = router_pb2.GenerateRequest(text="x")
    return asyncio.create_task(reader.read(message, ACCESS.caller("", ()), constraint))


async def test_outputs_of_two_requests_alternate(reader: RequestReader) -> None:
    log: list[str] = []
    many, one = Watched("many", log), Watched("one", log)
    one.go.set()
    tasks = [begin(reader, many) for _ in range(4)]
    await many.began.wait()
    tasks.append(begin(reader, one))
    await asyncio.sleep(0)
    assert log == ["many"]
    many.go.set()
    requests = await asyncio.gather(*tasks)
    assert log.index("one") == 2  # behind the one that drew when it came
    assert all(
        first.removesuffix(" done") == second.removesuffix(" done")
        for first, second in zip(log[::2], log[1::2], strict=True)
    )
    assert all(request.output_token_ids_u32 for request in requests)


async def test_a_call_that_is_cancelled_draws_to_its_end_alone(reader: RequestReader) -> None:
    log: list[str] = []
    gone, next_one = Watched("gone", log, regex="("), Watched("next", log)
    next_one.go.set()
    task = begin(reader, gone)
    await gone.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = begin(reader, next_one)
    await asyncio.sleep(0)
    assert log == ["gone"]
    gone.go.set()
    await other
    assert log == ["gone", "gone done", "next", "next done"]


async def test_what_cannot_be_met_ends_its_turn(reader: RequestReader) -> None:
    wrong = SharedConstraint(router_pb2.Constraint(regex="("))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"constraint\.regex has a pattern"):
            await begin(reader, wrong)
    good = await begin(reader, SharedConstraint(router_pb2.Constraint(regex="a")))
    assert good.output_token_ids_u32
