"""OpenAI's responses to `/v1/responses`, as vLLM gives them.

Fields and events are those of vLLM 0.32 (vllm/entrypoints/openai/responses/protocol.py, streaming_events.py); what a
field is for is in OpenAI's API reference. A stream numbers its events: `response.created`, `response.in_progress`, then
each item of the output, and `response.completed` with the whole. An item begins with `response.output_item.added` once
it has text, or is a call whose name is known, and ends with `response.output_item.done`; between them are the parts of
its text, or of its call's arguments. There is no `[DONE]`. As in vLLM, a stream cut by `max_output_tokens` also ends
with `response.completed`, whose response is `incomplete`; OpenAI has an event `response.incomplete` for that, on which
the streams of its own package raise.
"""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pydantic import BaseModel

from lorrery.router.edges.as_chat import named_event
from lorrery.router.edges.responses.requests import ResponsesRequest
from lorrery.router.edges.responses.tools import Called
from lorrery.router.edges.tools import CallPiece, CallReader, call_id, read_whole
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.errors import error_body, http_status
from lorrery.router.http.forms import Form
from lorrery.router.http.openai_shapes import created_cache_tokens, unix_seconds
from lorrery.router.http.token_details import LogprobsJson, Run
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason


class ResponseShape:
    """The response format of `/v1/responses`.

    Args:
        request_id: of the response.
        model: name that the client gave.
        request: the request, many of whose fields the response repeats.
        max_output_tokens: most tokens that the output can have.
        is_greedy: whether each token is the likeliest.
        block_size: of the prefix cache; 0: there is none.
        logprobs: writes log-probabilities.
        prompt: its text and tokens, if the response is to show them, and those of its output; None: it is not.
        form: of the output; only one with calls of tools changes how it is shown.
        reads_calls: whether the engine reads calls of tools; one that does shows an empty output as no message.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        request_id: str,
        model: str,
        request: ResponsesRequest,
        *,
        max_output_tokens: int,
        is_greedy: bool,
        block_size: int,
        logprobs: LogprobsJson,
        prompt: tuple[str, Sequence[int]] | None = None,
        form: Form | None = None,
        reads_calls: bool = False,
    ) -> None:
        self._request_id = request_id
        self._reader = CallReader(form.tool, form.parsed) if form is not None and form.calls_tools else None
        self._reads_calls = reads_calls
        self._tools = request.called
        self._logprobs = logprobs
        self._reading = logprobs.reading()
        self._num_top = request.top_logprobs_shown
        self._response = {
            "id": request_id,
            "created_at": unix_seconds(),
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": _shown(request.tool_choice),
            "tools": _shown(request.tools),
            "top_p": 1.0 if request.top_p is None or is_greedy else request.top_p,
            "background": False,
            "max_output_tokens": max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": _shown(request.reasoning),
            "service_tier": request.service_tier,
            "status": "in_progress",
            "text": _shown(request.text),
            "top_logprobs": self._num_top,
            "truncation": request.truncation,
            "usage": None,
            "user": request.user,
            "presence_penalty": request.presence_penalty or 0.0,
            "frequency_penalty": request.frequency_penalty or 0.0,
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
        }
        self._message_id = f"msg_{request_id.removeprefix('resp_')}"
        kind = {"type": "response.output_text.delta"}
        where = json.dumps({**kind, "content_index": 0, "item_id": self._message_id, "output_index": 0})
        self._delta = f"event: response.output_text.delta\ndata: {where[:-1]}, "
        self._num_events = 0
        self._block_size = block_size
        self._prompt = prompt
        self._num_tokens = 0
        self._shown = Collected()  # the output, if it is to be shown
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._call: dict[str, Any] | None = None  # the call that goes on
        self._text: StringIO | None = None  # of the message that goes on
        self._text_logprobs: list[dict[str, Any]] = []  # of its tokens, if they are wanted
        self._reason = FinishReason.UNSPECIFIED

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the events before the output."""
        yield self._event("response.created", {"response": self._response})
        yield self._event("response.in_progress", {"response": self._response})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a token without text."""
        is_last = message.HasField("finish")
        if is_last:
            self._reason = FinishReason.of(message.finish.reason)
        pieces = [CallPiece(message.text)] if message.text else []
        if self._reader is not None:
            pieces = self._reader.push(message.text)
            if is_last:
                pieces += self._reader.end()
        shown: list[dict[str, Any]] = []
        if self._num_top is not None and logprobs is not None:
            shown = self._listed(logprobs, message.token_ids)
        events = b"".join(self._pieces(pieces, shown))
        self._num_tokens += len(message.token_ids)
        if self._prompt is not None:
            self._shown.text.write(message.text)
            self._shown.token_ids.extend(message.token_ids)
        return events

    def _pieces(self, pieces: Sequence[CallPiece], logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        for piece in pieces:
            if piece.call is None:
                if self._text is None:
                    yield from self._begin_message()
                yield self._text_delta(piece.text, logprobs)
                continue
            if piece.name is not None:
                yield from self._end_item()
                self._call = self._begun_call(piece.call, piece.name)
                yield self._item_event("added", self._shown_call(self._call, "in_progress", begun=True))
            assert self._call is not None
            self._call["arguments"] += piece.text
            if piece.text and not self._called(self._call).is_custom:
                yield self._call_event("function_call_arguments.delta", {"delta": piece.text})

    def _begin_message(self) -> Iterator[bytes]:
        self._text = StringIO()
        yield self._item_event("added", self._message([], "in_progress"))
        yield self._part_event("content_part.added", {"part": _part("", [])})

    def _text_delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        assert self._text is not None
        self._text.write(text)
        self._text_logprobs += logprobs
        shown = json.dumps([_without_bytes(one) for one in logprobs]) if logprobs else "[]"
        return (
            f'{self._delta}"delta": {quoted(text)}, "logprobs": {shown}, "sequence_number": {self._number()}}}\n\n'
        ).encode()

    def _end_item(self) -> Iterator[bytes]:
        """Yield the events that end the item that goes on, if any does."""
        if self._text is not None:
            text, self._text = self._text.getvalue(), None
            part = _part(text, self._text_logprobs or None)
            item = self._message([part])
            yield self._part_event("output_text.done", {"text": text, "logprobs": []})
            yield self._part_event("content_part.done", {"part": part})
        elif self._call is not None:
            item = self._shown_call(self._call, "completed")
            if item["type"] == "function_call":
                told = {"arguments": item["arguments"], "name": item["name"]}
                yield self._call_event("function_call_arguments.done", told)
            else:
                if item["input"]:
                    yield self._call_event("custom_tool_call_input.delta", {"delta": item["input"]})
                yield self._call_event("custom_tool_call_input.done", {"input": item["input"]})
            self._call = None
        else:
            return
        yield self._item_event("done", item)
        self._output.append(item)

    def _begun_call(self, number: int, name: str) -> dict[str, Any]:
        called = self._tools.get(name, Called(name))
        prefix = "ctc_" if called.is_custom else "fc_"
        return {
            "id": call_id(prefix, self._request_id, number),
            "call_id": call_id("chatcmpl-tool-", self._request_id, number),
            "full_name": name,
            "arguments": "",
        }

    def _called(self, call: dict[str, Any]) -> Called:
        return self._tools.get(call["full_name"], Called(call["full_name"]))

    def _shown_call(self, call: dict[str, Any], status: str, *, begun: bool = False) -> dict[str, Any]:
        """Return a call as an item; `begun`: without its arguments."""
        called = self._called(call)
        arguments = "" if begun else call["arguments"]
        ids = {"id": call["id"], "call_id": call["call_id"], "name": called.name}
        item = {**ids, "async": None, "caller": None, "namespace": called.namespace}
        if called.is_custom:
            return {**item, "type": "custom_tool_call", "input": "" if begun else called.input_of(arguments)}
        return {**item, "type": "function_call", "arguments": arguments, "status": status}

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        events = list(self._end_item())
        response = self._ended(self._output, self._shown, self._reason, usages[0])
        return b"".join([*events, self._event("response.completed", {"response": response})])

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        told = error_body(error)["error"]
        failed = {"code": _code(http_status(error)), "message": told["message"]}
        response = {**self._response, "status": "failed", "error": failed}
        facts = {"code": told["type"], "message": told["message"], "param": told["param"]}
        return self._event("error", facts) + self._event("response.failed", {"response": response})

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        (choice,) = choices
        assert choice.finish is not None
        text, calls = choice.text.getvalue(), list[tuple[str, str]]()
        if self._reader is not None:
            text, calls = read_whole(self._reader, text)
        logprobs: list[Any] | None = None
        if self._num_top is not None and choice.logprobs is not None and choice.token_ids:
            logprobs = self._listed(choice.logprobs, choice.token_ids)
        output: list[dict[str, Any]] = []
        if text or not (calls or self._reads_calls):
            output.append(self._message([_part(text, logprobs)] if text else []))
        for number, (name, arguments) in enumerate(calls):
            call = self._begun_call(number, name) | {"arguments": arguments}
            output.append(self._shown_call(call, "completed"))
        yield json.dumps(self._ended(output, choice, FinishReason.of(choice.finish.reason), choice.usage))

    def _listed(self, logprobs: OutputLogprobs, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the log-probabilities of the next tokens."""
        run = Run(logprobs, self._num_tokens, token_ids)
        content = "".join(self._logprobs.chat([run], self._num_top or 0, self._reading))
        listed: list[dict[str, Any]] = json.loads(content)["content"]
        return listed

    def _message(self, content: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
        said = {"role": "assistant", "content": content, "status": status, "phase": None}
        return {"id": self._message_id, "type": "message", **said}

    def _ended(
        self, output: list[dict[str, Any]], shown: Collected, reason: FinishReason, usage: types_pb2.Usage
    ) -> dict[str, Any]:
        """Return the response at its end; one cut by `max_output_tokens` or by the context is incomplete.

        Args:
            output: its items.
            shown: what was generated, if that is to be shown.
            reason: why it ended.
            usage: of the response.
        """
        is_whole = reason is not FinishReason.LENGTH
        created = created_cache_tokens(usage.prompt_tokens, usage.cached_tokens, self._block_size)
        messages: dict[str, Any] = {}
        if self._prompt is not None:
            messages = {
                "input_messages": [_raw(*self._prompt)],
                "output_messages": [_raw(shown.text.getvalue(), shown.token_ids)],
            }
        inputs = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": created}
        outputs = {"reasoning_tokens": 0, "tool_output_tokens": 0}
        return {
            **self._response,
            **messages,
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {**inputs, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {
                    **outputs,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item_event(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", {"output_index": len(self._output), "item": item})

    def _part_event(self, what: str, fields: dict[str, Any]) -> bytes:
        where = {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{what}", {**where, **fields})

    def _call_event(self, what: str, fields: dict[str, Any]) -> bytes:
        assert self._call is not None
        where = {"item_id": self._call["id"], "output_index": len(self._output)}
        return self._event(f"response.{what}", {**where, **fields})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return named_event(kind, {**fields, "sequence_number": self._number()})

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _shown(value: object) -> object:
    """Return a field of the request as the response repeats it."""
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value


def _part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _without_bytes(logprob: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability as the parts of a stream have it."""
    kept = {name: logprob[name] for name in ("token", "logprob")}
    return {
        **kept,
        "top_logprobs": [{"token": one["token"], "logprob": one["logprob"]} for one in logprob["top_logprobs"]],
    }


def _raw(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def _code(status: HTTPStatus) -> str:
    """Return OpenAI's error code of a failed response."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
