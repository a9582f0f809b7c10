"""One request of an engine's client: n outputs of one prompt, and what ends them early.

A client ends a request by cancelling its call, or by an `Abort` that names it. Cancelling ends the call. After an
`Abort` the call continues, and reports for each output that it was aborted and what it has so far.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorrery.router.generate import FAREWELL_SECONDS, GrpcCall, begin_stream
from lorrery.service.errors import Conflict, Overloaded, Reason
from lorrery.service.names import quoted
from lorrery.service.network import status
from lorrery.tokenizer.base import Tokenizer
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

_WORDS: dict[FinishReason | None, str] = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}

MAX_OUTPUTS = 128
"""Upper bound on the outputs of one request, as over HTTP."""


@dataclass
class Output:
    """One output of a request, as received so far."""

    index: int
    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[router_pb2.TokenLogprobs] = field(default_factory=list)
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    reason: FinishReason | None = None

    def add(self, message: router_pb2.GenerateResponse) -> None:
        """Append a message."""
        self.text += message.text
        self.token_ids.extend(message.token_ids)
        self.logprobs.extend(message.logprobs)
        if message.HasField("finish"):
            self.usage = message.finish.usage
            self.reason = FinishReason.of(message.finish.reason)

    def abort(self) -> None:
        """End the output as aborted, with the tokens that it has."""
        self.usage = types_pb2.Usage(prompt_tokens=self.prompt_tokens, completion_tokens=len(self.token_ids))
        self.reason = FinishReason.ABORTED

    def whole(self) -> router_pb2.GenerateResponse:
        """Return the whole output as one message."""
        return router_pb2.GenerateResponse(text=self.text, token_ids=self.token_ids, logprobs=self.logprobs)

    @property
    def word(self) -> str:
        """The finish reason in the engines' words."""
        return _WORDS.get(self.reason, "stop")


Write = Callable[[Output, router_pb2.GenerateResponse], Awaitable[Any]]
"""Takes a message after it was added to its output; after an abort, an empty one."""
Serve = Callable[[router_pb2.GenerateRequest, GrpcCall], Awaitable[None]]
"""Serves one output. Raises RequestError."""


class Open:
    """An open request.

    Args:
        messages: one per output.
        prompt_tokens: length of the prompt.
    """

    def __init__(self, messages: Sequence[router_pb2.GenerateRequest], prompt_tokens: int) -> None:
        self.outputs = [Output(index, prompt_tokens) for index in range(len(messages))]
        self.aborted = False
        self._messages = messages
        self._calls: list[GrpcCall] = []
        self._task: asyncio.Task[Any] | None = None
        self._has_begun = False
        self._write: asyncio.Future[None] | None = None

    @property
    def num_unstarted_tokens(self) -> int:
        """Prompt tokens of the outputs without a token."""
        return sum(output.prompt_tokens for output in self.outputs if not output.token_ids and output.reason is None)

    def abort(self) -> None:
        """Abort the request; no effect once it is over."""
        if self._task is None or self.aborted:
            return
        self.aborted = True
        for call in self._calls:
            call.aborted = True
        self._task.cancel()

    async def run(self, context: status.Context, serve: Serve, write: Write) -> None:
        """Serve all outputs concurrently, and write their messages.

        Raises:
            RequestError: one of them fails, and the others are ended; or an aborted request's reader takes nothing.
        """
        task = self._task = asyncio.current_task()
        assert task is not None
        writing = asyncio.Lock()  # gRPC takes one message at a time

        def call_of(output: Output) -> GrpcCall:
            async def take(message: router_pb2.GenerateResponse) -> None:
                async with writing:
                    output.add(message)
                    call.complete = output.reason is not None
                    self._write = asyncio.ensure_future(self._send(context, write, output, message))
                    await asyncio.shield(self._write)

            call = GrpcCall(context, take)
            return call

        self._calls = [call_of(output) for output in self.outputs]
        try:
            await self._serve(serve)
        except asyncio.CancelledError:
            if not self.aborted or task.uncancel() > 0:
                raise
            self._task = None
            await self._farewell(write)
        finally:
            self._task = None

    async def _send(
        self, context: status.Context, write: Write, output: Output, message: router_pb2.GenerateResponse
    ) -> None:
        if not self._has_begun:
            self._has_begun = True
            await begin_stream(context)
        await write(output, message)

    async def _farewell(self, write: Write) -> None:
        """Report every unfinished output as aborted.

        gRPC refuses a message while another is on its way, and would then never end the call: so no write is cancelled.
        """
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                if self._write is not None:
                    await self._write
                for output in self.outputs:
                    if output.reason is None:
                        output.abort()
                        await write(output, router_pb2.GenerateResponse())
        except TimeoutError:
            text = f"the request was aborted, and the reader took nothing for {FAREWELL_SECONDS:g} s"
            raise Overloaded(text, Reason.SLOW_READER) from None

    async def _serve(self, serve: Serve) -> None:
        if len(self._messages) == 1:
            await serve(self._messages[0], self._calls[0])
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for message, call in zip(self._messages, self._calls, strict=True):
                    tasks.create_task(_awaited(serve(message, call)))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others were cancelled because of it, or failed at the same time


class OpenRequests:
    """The open requests of one port, by API key and request id."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Open] = {}

    def add(self, key: str, request_id: str, request: Open) -> None:
        """Add a request.

        Raises:
            Conflict: one with this id is open, so an abort would be ambiguous.
        """
        if (key, request_id) in self._open:
            name = quoted(request_id)
            raise Conflict(
                f"request_id {name} is open already; give each request its own",
                Reason.REQUEST_EXISTS,
                field="request_id",
                value=name,
            )
        self._open[key, request_id] = request

    def remove(self, key: str, request_id: str) -> None:
        """Remove a request that is over."""
        del self._open[key, request_id]

    def abort(self, key: str, request_ids: Sequence[str]) -> int:
        """Abort the open requests among `request_ids`; return their number."""
        found = [request for name in request_ids if (request := self._open.get((key, name))) is not None]
        for request in found:
            request.abort()
        return len(found)

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def num_unstarted_tokens(self) -> int:
        """Prompt tokens of the outputs without a token."""
        return sum(request.num_unstarted_tokens for request in self._open.values())


def matched_stop(tokenizer: Tokenizer, output: Output, sampling: types_pb2.SamplingParams) -> int | str | None:
    """Return the stop token or stop string that ended an output; None: neither."""
    if output.reason is not FinishReason.STOP or not output.token_ids:
        return None
    if output.token_ids[-1] in sampling.stop_token_ids:
        return output.token_ids[-1]
    text = tokenizer.detokenizer().push(output.token_ids)
    found = [(text.find(stop) + len(stop), stop) for stop in sampling.stop_sequences if stop in text]
    return min(found, default=(0, None))[1]


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable
