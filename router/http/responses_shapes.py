"""OpenAI's responses to `/v1/responses`.

The format is that of OpenAI's API reference (Responses: the response object, and streaming events) and of the types of
its Python package (`openai.types.responses`); vLLM uses the same shapes (vllm/entrypoints/openai/responses). A stream
numbers its events. Before the first delta come `response.created`, `response.in_progress`, `response.output_item.added`
and `response.content_part.added`; after the last one come the text, its part, its item and the response, each complete.
An output that calls tools has an item for each call instead of the message, whose arguments come as
`response.function_call_arguments.delta`. There is no `[DONE]`. As in vLLM, a stream cut by `max_output_tokens` also
ends with `response.completed`, whose response is `incomplete`; OpenAI has an event `response.incomplete` for that, on
which the streams of its own package raise.
"""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.call_reader import CallPiece, CallReader, call_id, read_whole
from lorrery.router.http.errors import error_body, http_status
from lorrery.router.http.events import named_event
from lorrery.router.http.forms import Form
from lorrery.router.http.openai_shapes import unix_seconds
from lorrery.router.http.responses_requests import ResponsesRequest
from lorrery.router.logprobs import OutputLogprobs
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.finish_reason import FinishReason


class ResponseShape:
    """The response format of `/v1/responses`.

    Args:
        request_id: of the response.
        model: name that the client gave.
        request: the request, many of whose fields the response repeats.
        form: of the output; only one with calls of tools changes how it is shown.
    """

    media_type = EVENT_STREAM

    def __init__(self, request_id: str, model: str, request: ResponsesRequest, form: Form | None = None) -> None:
        self._request_id = request_id
        self._reader = CallReader(form.tool, form.parsed) if form is not None and form.calls_tools else None
        self._calls: list[dict[str, Any]] = []  # items, in order
        self._response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": unix_seconds(),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": request.text_format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
        self._item = {"id": f"msg_{request_id}", "type": "message", "role": "assistant"}
        self._where = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        self._delta = json.dumps({"type": "response.output_text.delta", **self._where, "logprobs": []})[:-1]
        self._num_events = 0
        self._text = StringIO()
        self._has_begun = False  # whether the message has been introduced
        self._reason = FinishReason.UNSPECIFIED

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the events before the text."""
        yield self._event("response.created", {"response": self._response})
        yield self._event("response.in_progress", {"response": self._response})
        if self._reader is None:
            yield from self._begin_message()

    def _begin_message(self) -> Iterator[bytes]:
        self._has_begun = True
        item = {**self._item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        yield self._event("response.content_part.added", {**self._where, "part": _part("")})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a finish without text."""
        text = message.text
        is_last = message.HasField("finish")
        if is_last:
            self._reason = FinishReason.of(message.finish.reason)
        if self._reader is not None:
            pieces = self._reader.push(text)
            return b"".join(self._pieces(pieces + self._reader.end() if is_last else pieces))
        return b"" if is_last and not text else self._text_delta(text)

    def _text_delta(self, text: str) -> bytes:
        self._text.write(text)
        return (
            f"event: response.output_text.delta\n"
            f'data: {self._delta}, "delta": {quoted(text)}, "sequence_number": {self._number()}}}\n\n'
        ).encode()

    def _pieces(self, pieces: Sequence[CallPiece]) -> Iterator[bytes]:
        """Yield the events of an output that may call tools."""
        for piece in pieces:
            if piece.call is None:
                if not self._has_begun:
                    yield from self._begin_message()
                yield self._text_delta(piece.text)
                continue
            if piece.name is not None:
                yield from self._end_call("completed")
                self._calls.append(self._call(piece.call, piece.name, ""))
                added = {"output_index": piece.call, "item": self._calls[-1]}
                yield self._event("response.output_item.added", added)
            call = self._calls[-1]
            call["arguments"] += piece.text
            where = {"item_id": call["id"], "output_index": piece.call}
            yield self._event("response.function_call_arguments.delta", {**where, "delta": piece.text})

    def _end_call(self, status: str) -> Iterator[bytes]:
        if not self._calls:
            return
        call, number = self._calls[-1], len(self._calls) - 1
        call["status"] = status
        done = {"item_id": call["id"], "output_index": number, "name": call["name"], "arguments": call["arguments"]}
        yield self._event("response.function_call_arguments.done", done)
        yield self._event("response.output_item.done", {"output_index": number, "item": call})

    def _call(self, number: int, name: str, arguments: str) -> dict[str, Any]:
        ids = {"id": call_id("fc_", self._request_id, number), "call_id": call_id("call_", self._request_id, number)}
        facts = {"name": name, "arguments": arguments, "status": "in_progress"}
        return {"type": "function_call", **ids, **facts}

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        return b"".join(self._last_events(usages[0]))

    def _last_events(self, usage: types_pb2.Usage) -> Iterator[bytes]:
        if self._calls:
            yield from self._end_call(_status(self._reason))
        else:
            if not self._has_begun:
                yield from self._begin_message()
            text = self._text.getvalue()
            yield self._event("response.output_text.done", {**self._where, "text": text, "logprobs": []})
            yield self._event("response.content_part.done", {**self._where, "part": _part(text)})
            item = self._message(text, self._reason)
            yield self._event("response.output_item.done", {"output_index": 0, "item": item})
        output = self._calls or [self._message(self._text.getvalue(), self._reason)]
        yield self._event("response.completed", {"response": self._ended(output, self._reason, usage)})

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        told = error_body(error)["error"]
        failed = {"code": _code(http_status(error)), "message": told["message"]}
        facts = {name: told[name] for name in ("code", "message", "param")}
        response = {**self._response, "status": "failed", "error": failed}
        return self._event("error", facts) + self._event("response.failed", {"response": response})

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        (choice,) = choices
        assert choice.finish is not None
        reason, text = FinishReason.of(choice.finish.reason), choice.text.getvalue()
        output: list[dict[str, Any]] = []
        if self._reader is not None:
            text, calls = read_whole(self._reader, text)
            output = [self._call(number, *call) | {"status": "completed"} for number, call in enumerate(calls)]
        if output:
            output[-1]["status"] = _status(reason)
        yield json.dumps(self._ended(output or [self._message(text, reason)], reason, choice.usage))

    def _message(self, text: str, reason: FinishReason) -> dict[str, Any]:
        return {**self._item, "status": _status(reason), "content": [_part(text)]}

    def _ended(self, output: list[dict[str, Any]], reason: FinishReason, usage: types_pb2.Usage) -> dict[str, Any]:
        """Return the response at its end; one cut by `max_output_tokens` or by the context is incomplete."""
        is_whole = reason is not FinishReason.LENGTH
        return {
            **self._response,
            "status": _status(reason),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return named_event(kind, {**fields, "sequence_number": self._number()})

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _code(status: HTTPStatus) -> str:
    """Return OpenAI's error code of a failed response."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
