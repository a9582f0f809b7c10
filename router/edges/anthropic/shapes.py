"""Anthropic's responses to `/v1/messages`, as vLLM gives them.

Fields and events are those of vLLM 0.32 (vllm/entrypoints/anthropic/serving.py); what a field is for is in Anthropic's
API reference. A stream is `message_start`, then each block of content (`content_block_start`, `content_block_delta` for
each message of the generation that has text, `content_block_stop`), then `message_delta` with the stop reason and the
whole usage, and `message_stop`. An output that calls tools has a block for each call, whose input comes as
`input_json_delta`. In the usage, `cache_read_input_tokens` counts the prompt tokens that were in the prefix cache,
`cache_creation_input_tokens` those that are in it now, and `input_tokens` the others. The split is known at the end
only: `message_start` counts all of them as `input_tokens`.
"""

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.router.edges.anthropic.errors import anthropic_body
from lorrery.router.edges.as_chat import named_event
from lorrery.router.edges.tools import CallPiece, CallReader, as_object, call_id, read_whole
from lorrery.router.http.answer import EVENT_STREAM, Collected
from lorrery.router.http.errors import error_body
from lorrery.router.http.forms import Form
from lorrery.router.http.openai_shapes import created_cache_tokens
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

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
