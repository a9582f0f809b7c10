"""One HTTP response, made of one or more generations: collected, or streamed as server-sent events.

Nothing is sent before the first token: clients take the first byte as the first token, and an error before it can still
have a status of its own. An event is one message of a generation, which is one token unless the router is late. A
client that disconnects ends its generations.

A JSON body may have any length, and is written piece by piece without blocking the event loop: a lazy sequence of text
parts. A body that ends within the first piece has a content length; a longer one is sent in chunks as fast as its
reader takes them, so it is never in memory as a whole. HTTP/1.0 has no chunks, so there it is.
"""

import asyncio
import contextlib
import json
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorrery.router.http.errors import error_response
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.service.tasks import Turns
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

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


def json_array(parts: Iterable[str]) -> Iterator[str]:
    """Yield a JSON array; each part has one or more elements, with the separators between them."""
    yield "["
    for number, part in enumerate(parts):
        yield f", {part}" if number else part
    yield "]"


def array_of(elements: Iterable[object]) -> Iterator[str]:
    """Yield a JSON array of elements, which are taken lazily."""
    source = iter(elements)
    return json_array(json.dumps(batch)[1:-1] for batch in iter(lambda: list(islice(source, BATCH)), []))


EVENT_STREAM = "text/event-stream; charset=utf-8"
_BEGUN_AT_ONCE = 16
"""Outputs of one response that begin in one turn; each takes about a tenth of a millisecond."""
WRITER = "writer"
"""Key of a request's `BodyWriter` in the ASGI state."""


class BodyWriter(Protocol):
    """Writes parts of a body without ASGI's `send`, which is a dozen coroutines deep and may wait."""

    @property
    def is_ready(self) -> bool:
        """Whether the reader keeps up."""
        ...

    def write_now(self, body: bytes) -> None:
        """Write a part that is not the last; call only while `is_ready`."""
        ...


class Shape(Protocol):
    """The response format of one kind of client.

    Attributes:
        media_type: of a stream.
    """

    @property
    def media_type(self) -> str: ...  # noqa: D102  above

    def echo(self, index: int) -> Iterable[bytes]:
        """Yield the events before a choice's first message, lazily."""
        ...

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """Return the event for one message of a choice; `logprobs`: of its tokens, if requested."""
        ...

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """Return the events after the last token of the last choice; `usages`: one per choice, in order."""
        ...

    def error_events(self, error: RequestError) -> bytes:
        """Return the events that report an error after the stream has begun."""
        ...

    def whole(self, choices: "Sequence[Collected]") -> Iterable[str]:
        """Yield the body of an unstreamed response, JSON in parts, lazily."""
        ...


@dataclass
class Collected:
    """The whole output of one choice, some ten bytes per token.

    Attributes:
        text: the text.
        token_ids: the tokens.
        logprobs: of the tokens; None: not requested.
        finish: set at the end.
    """

    text: StringIO = field(default_factory=StringIO)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: OutputLogprobs | None = None
    finish: router_pb2.Finish | None = None

    @property
    def usage(self) -> types_pb2.Usage:
        """Usage of the choice."""
        assert self.finish is not None
        return self.finish.usage


def finish_word(reason: FinishReason) -> str:
    """Return OpenAI's name of a finish reason."""
    return {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}.get(reason, "stop")


class ChoiceCall:
    """The `generate.Call` of one choice of a response.

    Args:
        write: takes each message, in order.
        write_now: takes a message without waiting, if it can.
        fault_rules: of the request.

    Attributes:
        logprobs: of its tokens, if requested.
    """

    aborted = complete = refused_together = deadline_has_passed = False  # HTTP has no deadlines
    logprobs: OutputLogprobs | None = None

    def __init__(
        self,
        write: Callable[[router_pb2.GenerateResponse], Awaitable[None]],
        write_now: Callable[[router_pb2.GenerateResponse], bool],
        fault_rules: Sequence[str],
    ) -> None:
        self.write = write
        self.write_now = write_now
        self.fault_rules = fault_rules

    def take_logprobs(self, logprobs: OutputLogprobs) -> bool:
        """See `generate.Call`."""
        self.logprobs = logprobs
        return True

    def time_remaining(self) -> float | None:
        """Return None: HTTP has no deadlines."""
        return None


Generate = Callable[[ChoiceCall], Awaitable[None]]
"""Serves one choice. Raises RequestError."""


class Answer(Response):
    """The response to one HTTP request whose parameters are known.

    Args:
        choices: each serves one choice, in order.
        shape: the response format.
        turns: shared by all long responses.
        stream: whether to send events, or one body.
        fault_rules: of the request.
    """

    def __init__(
        self,
        choices: Sequence[Generate],
        shape: Shape,
        turns: Turns,
        *,
        stream: bool,
        fault_rules: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._choices = choices
        self._shape = shape
        self._turns = turns
        self._stream = stream
        self._fault_rules = fault_rules
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generations, as an ASGI application."""
        task = asyncio.current_task()
        assert task is not None
        gone = False
        refused: Response | None = None

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watcher = asyncio.create_task(watch(), name="http disconnect")
        try:
            if self._stream:
                await self._events(send, scope["state"].get(WRITER))
            else:
                await self._whole(scope, send)
        except RequestError as error:
            if self._begun:
                await self._send(send, self._shape.error_events(error), last=True)
                return
            refused = error_response(error)
        except asyncio.CancelledError:
            if not gone or task.uncancel() > 0:
                raise
            return
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        if refused is not None:
            await refused(scope, receive, send)

    async def _whole(self, scope: Scope, send: Send) -> None:
        choices = [Collected() for _ in self._choices]

        def collect(index: int) -> ChoiceCall:
            choice = choices[index]

            def write_now(message: router_pb2.GenerateResponse) -> bool:
                choice.text.write(message.text)
                choice.token_ids.extend(message.token_ids)
                return True

            async def write(message: router_pb2.GenerateResponse) -> None:
                write_now(message)
                if message.HasField("finish"):
                    choice.finish, choice.logprobs = message.finish, call.logprobs

            call = ChoiceCall(write, write_now, self._fault_rules)
            return call

        await self._run(collect)
        await send_json(scope, send, self._shape.whole(choices), self._turns)

    async def _events(self, send: Send, writer: BodyWriter | None) -> None:
        usages = [types_pb2.Usage()] * len(self._choices)
        event = self._shape.event
        is_alone = len(self._choices) == 1
        taking_turns, turn = asyncio.Lock(), self._turns.begin()

        def stream(index: int) -> ChoiceCall:
            begun = False

            async def write(message: router_pb2.GenerateResponse) -> None:
                nonlocal begun
                if message.HasField("finish"):
                    usages[index] = message.finish.usage
                if is_alone:
                    if not begun:
                        begun = True
                        await self._echo(send, index)
                    await self._send(send, event(index, message, call.logprobs))
                    return
                # The outputs of one response share its turns: however many they are, others have theirs.
                async with taking_turns:
                    if turn.is_over:
                        await turn.pass_on()
                    if not begun:
                        begun = True
                        await self._echo(send, index)
                    if message.HasField("finish") or not written(message):
                        await self._send(send, event(index, message, call.logprobs))

            def written(message: router_pb2.GenerateResponse) -> bool:
                if not begun or not self._begun or writer is None or not writer.is_ready:
                    return False  # checked before the event is made, because shapes count what they have shown
                writer.write_now(event(index, message, call.logprobs))
                return True

            def write_now(message: router_pb2.GenerateResponse) -> bool:
                return is_alone and written(message)

            call = ChoiceCall(write, write_now, self._fault_rules)
            return call

        await self._run(stream)
        await self._send(send, self._shape.last_events(usages), last=True)

    async def _echo(self, send: Send, index: int) -> None:
        turn = self._turns.begin()
        for event in self._shape.echo(index):
            await self._send(send, event)
            if turn.is_over:
                await turn.pass_on()

    async def _run(self, call_of: Callable[[int], ChoiceCall]) -> None:
        if len(self._choices) == 1:
            await self._choices[0](call_of(0))
            return
        calls: list[ChoiceCall] = []

        async def one(generate: Generate, call: ChoiceCall) -> None:
            try:
                await generate(call)
            except RequestError:
                for other in calls:  # before they are cancelled
                    other.refused_together = not self._begun
                raise

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, generate in enumerate(self._choices):
                    calls.append(call_of(index))
                    tasks.create_task(one(generate, calls[-1]))
                    if len(calls) % _BEGUN_AT_ONCE == 0:
                        await self._turns.next()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others were cancelled because of it, or failed at the same time

    async def _send(self, send: Send, events: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (b"content-type", self._shape.media_type.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": events, "more_body": not last})


def data(text: str) -> bytes:
    """Return one event; OpenAI's clients strip the blank after the colon."""
    return f"data: {text}\n\n".encode()


DONE = data("[DONE]")
