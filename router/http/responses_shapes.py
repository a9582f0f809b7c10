"""OpenAI's responses to `/v1/responses`.

The format is that of OpenAI's API reference (Responses: the response object, and streaming events) and of the types of
its Python package (`openai.types.responses`); vLLM uses the same shapes (vllm/entrypoints/openai/responses). A stream
numbers its events. Before the first delta come `response.created`, `response.in_progress`, `response.output_item.added`
and `response.content_part.added`; after the last one come the text, its part, its item and the response, each complete.
There is no `[DONE]`. As in vLLM, a stream cut by `max_output_tokens` also ends with `response.completed`, whose
response is `incomplete`; OpenAI has an event `response.incomplete` for that, on which the streams of its own package
raise.
"""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.errors import error_body, http_status
from lorrery.router.http.events import named_event
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
    """

    media_type = EVENT_STREAM

    def __init__(self, request_id: str, model: str, request: ResponsesRequest) -> None:
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
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
        self._reason = FinishReason.UNSPECIFIED

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the events before the text."""
        yield self._event("response.created", {"response": self._response})
        yield self._event("response.in_progress", {"response": self._response})
        item = {**self._item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        yield self._event("response.content_part.added", {**self._where, "part": _part("")})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a finish without text."""
        text = message.text
        if message.HasField("finish"):
            self._reason = FinishReason.of(message.finish.reason)
            if not text:
                return b""
        self._text.write(text)
        return (
            f"event: response.output_text.delta\n"
            f'data: {self._delta}, "delta": {quoted(text)}, "sequence_number": {self._number()}}}\n\n'
        ).encode()

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        text = self._text.getvalue()
        response = self._ended(text, self._reason, usages[0])
        (item,) = response["output"]
        return b"".join(
            [
                self._event("response.output_text.done", {**self._where, "text": text, "logprobs": []}),
                self._event("response.content_part.done", {**self._where, "part": _part(text)}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event("response.completed", {"response": response}),
            ]
        )

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
        reason = FinishReason.of(choice.finish.reason)
        yield json.dumps(self._ended(choice.text.getvalue(), reason, choice.usage))

    def _ended(self, text: str, reason: FinishReason, usage: types_pb2.Usage) -> dict[str, Any]:
        """Return the response at its end; one cut by `max_output_tokens` or by the context is incomplete."""
        is_whole = reason is not FinishReason.LENGTH
        status = "completed" if is_whole else "incomplete"
        return {
            **self._response,
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": [{**self._item, "status": status, "content": [_part(text)]}],
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


def _code(status: HTTPStatus) -> str:
    """Return OpenAI's error code of a failed response."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
