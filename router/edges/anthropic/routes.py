"""Anthropic's routes, as vLLM answers them: their responses, and the format of their errors.

Fields and events are those of vLLM 0.32 (vllm/entrypoints/anthropic/serving.py); what a field is for is in Anthropic's
API reference. A stream is `message_start`, then each block of content (`content_block_start`, `content_block_delta` for
each message of the generation that has text, `content_block_stop`), then `message_delta` with the stop reason and the
whole usage, and `message_stop`. An output that calls tools has a block for each call, whose input comes as
`input_json_delta`. In the usage, `cache_read_input_tokens` counts the prompt tokens that were in the prefix cache,
`cache_creation_input_tokens` those that are in it now, and `input_tokens` the others. The split is known at the end
only: `message_start` counts all of them as `input_tokens`.

What a route refuses is `{"type": "error", "error": {"type", "message"}}`, with vLLM's names of types; a body that is
malformed, and a route that there is not, are refused as everywhere. Every response has the header `request-id`, where
Anthropic's package looks for it. The list of models is one route for both APIs: a request with `anthropic-version`
comes from an Anthropic client.
"""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.router.edges.anthropic.requests import Conversation, MessagesRequest
from lorrery.router.edges.as_chat import check_fits, named_event
from lorrery.router.edges.tools import CallPiece, CallReader, as_object, call_id, read_whole
from lorrery.router.field_names import named
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, REQUEST_ID, Edge
from lorrery.router.http.errors import MESSAGES, error_body, json_response
from lorrery.router.http.forms import Form
from lorrery.router.http.generating import check_room, outputs
from lorrery.router.http.openai_requests import ChatRequest
from lorrery.router.http.openai_shapes import created_cache_tokens
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

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


_EMPTY = {"type": "text", "text": ""}
_STREAM_ERROR = "internal_error"
"""Type of an error after a stream has begun, whatever it is."""


class MessageShape:
    """The response format of `/v1/messages`.

    Args:
        request_id: of the response.
        model: name that the client gave.
        prompt_tokens: of the conversation.
        form: of the output; only one with calls of tools changes how it is shown.
        block_size: of the prefix cache; 0: there is none.
        requires_call: whether a call is required. As in vLLM, an output then ends for a call even without tools.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        form: Form | None = None,
        *,
        block_size: int = 0,
        requires_call: bool = False,
    ) -> None:
        self._reader = CallReader(form.tool, form.parsed) if form is not None and form.calls_tools else None
        self._block: int | None = None  # the call of the open block, -1 for text
        self._num_blocks = 0
        self._arguments: list[str] = []  # of the latest call
        self._request_id = request_id
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._block_size = block_size
        self._requires_call = requires_call
        self._finish = router_pb2.Finish()

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the event before the text."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        yield named_event("message_start", {"message": {**self._head, **begun, "usage": usage}})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a token without text."""
        is_last = message.HasField("finish")
        if is_last:
            self._finish = message.finish
        if self._reader is not None:
            pieces = self._reader.push(message.text)
            return b"".join(self._blocks(pieces + self._reader.end() if is_last else pieces))
        if self._block is None or not message.text:
            return b"".join(self._blocks([CallPiece(message.text)] if message.text else []))
        return (
            'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0,'
            f' "delta": {{"type": "text_delta", "text": {quoted(message.text)}}}}}\n\n'
        ).encode()

    def _blocks(self, pieces: Sequence[CallPiece]) -> Iterator[bytes]:
        """Yield the events of an output; each call, and text, is a block."""
        for piece in pieces:
            block = -1 if piece.call is None else piece.call
            if block != self._block:
                yield from self._end_block()
                self._block = block
                start = _EMPTY if piece.name is None else self._call(block, piece.name, {})
                yield named_event("content_block_start", {"index": self._num_blocks, "content_block": start})
                self._arguments = []
            delta = {"type": "text_delta", "text": piece.text}
            if piece.call is not None:
                delta = {"type": "input_json_delta", "partial_json": piece.text}
                self._arguments.append(piece.text)
            if piece.text:
                yield named_event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _end_block(self) -> Iterator[bytes]:
        if self._block is not None:
            yield named_event("content_block_stop", {"index": self._num_blocks})
            self._num_blocks += 1

    def _call(self, call: int, name: str, given: object) -> dict[str, Any]:
        return {
            "type": "tool_use",
            "id": call_id("chatcmpl-tool-", self._request_id, call),
            "name": name,
            "input": given,
        }

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        ending = self._ending(self._finish, "".join(self._arguments))
        return b"".join(
            [
                *self._end_block(),
                named_event("message_delta", {"delta": ending, "usage": self._usage(usages[0])}),
                named_event("message_stop", {}),
            ]
        )

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        told = anthropic_body(_STREAM_ERROR, error_body(error)["error"]["message"])
        return f"event: error\ndata: {json.dumps(told)}\n\n".encode()

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`; as in vLLM, without fields that are null."""
        (choice,) = choices
        assert choice.finish is not None
        text, calls = choice.text.getvalue(), list[tuple[str, str]]()
        if self._reader is not None:
            text, calls = read_whole(self._reader, text)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
        content += [self._call(call, name, as_object(given)) for call, (name, given) in enumerate(calls)]
        ending = self._ending(choice.finish, calls[-1][1] if calls else "")
        shown = {name: value for name, value in ending.items() if value is not None}
        yield json.dumps({**self._head, "content": content, **shown, "usage": self._usage(choice.usage)})

    def _usage(self, usage: types_pb2.Usage) -> dict[str, Any]:
        created = created_cache_tokens(usage.prompt_tokens, usage.cached_tokens, self._block_size)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
        }

    def _ending(self, finish: router_pb2.Finish, arguments: str) -> dict[str, Any]:
        """Return why the message ends; a stop token that is not one of its stop sequences counts as `end_turn`.

        Args:
            finish: of the generation.
            arguments: of its last call.
        """
        reason = FinishReason.of(finish.reason)
        if reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reason is FinishReason.ABORTED:
            return {"stop_reason": None, "stop_sequence": None}
        has_called = self._reader is not None and self._reader.num_calls > 0
        if finish.stop_sequence and not (has_called and _is_json(arguments)):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_sequence}
        is_call = has_called or self._requires_call
        return {"stop_reason": "tool_use" if is_call else "end_turn", "stop_sequence": None}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def routes(edge: Edge) -> APIRouter:
    """Return Anthropic's routes."""
    router = APIRouter(prefix=PREFIX, tags=["Anthropic"], route_class=json_route(edge.admit, edge.bodies))
    names = MESSAGES._replace(max_model_len=edge.max_model_len)

    async def encoded(request: Conversation, chat: ChatRequest, http: Request) -> list[int]:
        edge.check_tool_choice(request.choice)
        turns = request.turns(http.scope["state"].setdefault(PASSED_OVER, []))
        variables = chat.variables(excludes_tools=edge.excludes_tools and request.choice == "none")
        with named(names):
            prompt = await edge.handler.encode_chat(turns, lambda: edge.caller(http), variables=variables)
        check_fits(len(prompt), edge.max_model_len)
        return prompt

    @router.post("", responses=EITHER)
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        await edge.check_model(http, request.model)
        chat = request.chat()
        chat.check()
        check_room(chat, edge.max_model_len)
        prompt = await encoded(request, chat, http)
        form = edge.counting(request.form(chat, edge.tool_call_probability), "other", stream=request.stream)
        request_id = f"chatcmpl-{edge.request_id(http)}"
        tenant = edge.tenant(request.user if isinstance(request.user, str) else None)
        wanted = outputs(chat.messages([prompt], request_id, tenant), 1, chat.seed)
        shape = MessageShape(
            request_id,
            request.model,
            len(prompt),
            form,
            block_size=edge.cached_block_size,
            requires_call=request.choice == "required",
        )
        return edge.answer(http, wanted, shape, stream=request.stream, names=[names], form=form)

    @router.post("/count_tokens")
    async def count_tokens(request: Conversation, http: Request) -> Response:
        """Return how many tokens a conversation has, by the chat template."""
        await edge.check_model(http, request.model)
        count = len(await encoded(request, request.chat(), http))
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    return router
