"""Anthropic's responses to `/v1/messages`.

The format is that of Anthropic's API reference (Messages, and streaming messages) and of the types of its Python
package (`anthropic.types`); vLLM uses the same shapes (vllm/entrypoints/anthropic). A stream is `message_start`, one
text block (`content_block_start`, `content_block_delta` for each message of the generation, `content_block_stop`), then
`message_delta` with the stop reason and the whole usage, and `message_stop`. An output that calls tools has a block for
each call instead, whose input comes as `input_json_delta`. In the usage, `input_tokens` counts the
uncached prompt tokens and `cache_read_input_tokens` the cached ones. The split is known at the end only:
`message_start` counts all of them as `input_tokens`.
"""

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.anthropic_errors import anthropic_body
from lorrery.router.http.call_reader import CallPiece, CallReader, call_id, read_whole
from lorrery.router.http.errors import error_body, http_status
from lorrery.router.http.events import named_event
from lorrery.router.http.forms import Form
from lorrery.router.http.tool_calls import as_object
from lorrery.router.logprobs import OutputLogprobs
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.finish_reason import FinishReason

_EMPTY = {"type": "text", "text": ""}
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens"}


class MessageShape:
    """The response format of `/v1/messages`.

    Args:
        request_id: of the response.
        model: name that the client gave.
        prompt_tokens: of the conversation.
        form: of the output; only one with calls of tools changes how it is shown.
    """

    media_type = EVENT_STREAM

    def __init__(self, request_id: str, model: str, prompt_tokens: int, form: Form | None = None) -> None:
        self._reader = CallReader(form.tool, form.parsed) if form is not None and form.calls_tools else None
        self._block: int | None = None  # the call of the open block, -1 for text
        self._num_blocks = 0
        self._request_id = request_id
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._finish = router_pb2.Finish()

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the events before the text."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(types_pb2.Usage(prompt_tokens=self._prompt_tokens))
        yield named_event("message_start", {"message": {**self._head, **begun, "usage": usage}})
        if self._reader is None:
            yield named_event("content_block_start", {"index": 0, "content_block": _EMPTY})
        yield named_event("ping", {})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a finish without text."""
        is_last = message.HasField("finish")
        if is_last:
            self._finish = message.finish
        if self._reader is not None:
            pieces = self._reader.push(message.text)
            return b"".join(self._blocks(pieces + self._reader.end() if is_last else pieces))
        if is_last and not message.text:
            return b""
        return (
            'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0,'
            f' "delta": {{"type": "text_delta", "text": {quoted(message.text)}}}}}\n\n'
        ).encode()

    def _blocks(self, pieces: Sequence[CallPiece]) -> Iterator[bytes]:
        """Yield the events of an output that may call tools; each call, and text, is a block."""
        for piece in pieces:
            block = -1 if piece.call is None else piece.call
            if block != self._block:
                yield from self._end_block()
                self._block = block
                start = _EMPTY if piece.name is None else self._call(block, piece.name, {})
                yield named_event("content_block_start", {"index": self._num_blocks, "content_block": start})
            delta = {"type": "text_delta", "text": piece.text}
            if piece.call is not None:
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            yield named_event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _end_block(self) -> Iterator[bytes]:
        if self._block is not None:
            yield named_event("content_block_stop", {"index": self._num_blocks})
            self._num_blocks += 1

    def _call(self, call: int, name: str, given: object) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id("toolu_", self._request_id, call), "name": name, "input": given}

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        stops = [named_event("content_block_stop", {"index": 0})] if self._reader is None else self._end_block()
        return b"".join(
            [
                *stops,
                named_event("message_delta", {"delta": self._ending(self._finish), "usage": _usage(usages[0])}),
                named_event("message_stop", {}),
            ]
        )

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        told = anthropic_body(http_status(error), error_body(error)["error"]["message"], self._request_id)
        return f"event: error\ndata: {json.dumps(told)}\n\n".encode()

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        (choice,) = choices
        assert choice.finish is not None
        text = choice.text.getvalue()
        content = [{"type": "text", "text": text}] if self._reader is None else self._content(self._reader, text)
        ending, usage = self._ending(choice.finish), _usage(choice.usage)
        yield json.dumps({**self._head, "content": content, **ending, "usage": usage})

    def _content(self, reader: CallReader, text: str) -> list[dict[str, Any]]:
        """Return the blocks of an output that may call tools."""
        said, calls = read_whole(reader, text)
        blocks = [{"type": "text", "text": said}] if said or not calls else []
        return blocks + [self._call(call, name, as_object(given)) for call, (name, given) in enumerate(calls)]

    def _ending(self, finish: router_pb2.Finish) -> dict[str, Any]:
        """Return why the message ends; a stop token that is not one of its stop sequences counts as `end_turn`."""
        if finish.stop_sequence:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_sequence}
        reason = _STOP_REASONS.get(FinishReason.of(finish.reason), "end_turn")
        if reason == "end_turn" and self._reader is not None and self._reader.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: types_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
