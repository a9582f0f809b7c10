"""An engine's request that is aborted while a message of it is on its way."""

import asyncio
from typing import Any, cast

import pytest

from lorrery.router.edges.engines.generation import Open, Output
from lorrery.service.errors import Overloaded
from lorrery.v1 import router_pb2

NEWS = router_pb2.GenerateResponse(token_ids=[1])


class Context:
    """A call whose reader takes messages when told to.

    Like gRPC's, it refuses a message while another is on its way, even if whoever wrote that no longer waits.
    """

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.on_its_way: asyncio.Task[Any] | None = None
        self.received: list[tuple[int, int, bool]] = []

    def time_remaining(self) -> None:
        """Return the seconds left: any."""

    async def send_initial_metadata(self, _: object) -> None:
        """Send what is not a message."""
        await self._send(None)

    async def write(self, output: Output, _: router_pb2.GenerateResponse) -> None:
        """Send a message: which output, how many tokens it has, and whether it is over."""
        await self._send((output.index, len(output.token_ids), output.reason is not None))

    async def _send(self, message: Any) -> None:
        if self.on_its_way is not None and not self.on_its_way.done():
            raise RuntimeError("TOO_MANY_OPERATIONS")

        async def arrive() -> None:
            await self.has_room.wait()
            if message is not None:
                self.received.append(message)

        self.on_its_way = asyncio.create_task(arrive())
        await asyncio.shield(self.on_its_way)


async def forever(_: object, call: Any) -> None:
    """Serve an output that does not end by itself."""
    while True:
        await call.write(NEWS)
        await asyncio.sleep(0)


async def turns(number: int) -> None:
    """Let the others run."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("num_before", [0, 1, 7, 8, 9, 40])
async def test_what_is_on_its_way_arrives_and_then_the_end(num_outputs: int, num_before: int) -> None:
    context, request = Context(), Open([router_pb2.GenerateRequest()] * num_outputs, 8)
    running = asyncio.create_task(request.run(cast("Any", context), forever, context.write))
    context.has_room.set()
    await turns(num_before)
    context.has_room.clear()
    await turns(9)
    request.abort()
    await turns(9)
    context.has_room.set()
    await running
    news, ends = context.received[:-num_outputs], context.received[-num_outputs:]
    counts = [sum(index == one for index, *_ in news) for one in range(num_outputs)]
    assert ends == [(index, counts[index], True) for index in range(num_outputs)]
    assert [output.usage.completion_tokens for output in request.outputs] == counts


async def test_a_reader_that_does_not_take_the_end_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorrery.router.edges.engines.generation.FAREWELL_SECONDS", 0.05)
    context, request = Context(), Open([router_pb2.GenerateRequest()], 8)
    running = asyncio.create_task(request.run(cast("Any", context), forever, context.write))
    await turns(9)
    request.abort()
    with pytest.raises(Overloaded, match=r"took nothing for 0\.05 s"):
        await running
