"""Anthropic's responses to `/v1/messages`.

The format is that of Anthropic's API reference (Messages, and streaming messages) and of the types of its Python
package (`anthropic.types`); vLLM uses the same shapes (vllm/entrypoints/anthropic). A stream is `message_start`, one
text block (`content_block_start`, `content_block_delta` for each message of the generation, `content_block_stop`), then
`message_delta` with the stop reason and the whole usage, and `message_stop`. In the usage, `input_tokens` counts the
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
from lorrery.router.http.errors import error_body, http_status
from lorrery.router.http.events import named_event
from lorrery.router.logprobs import OutputLogprobs
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.finish_reason import FinishReason

_STOP_REASONS = {FinishReason.LENGTH: "max_tokens"}


class MessageShape:
    """The response format of `/v1/messages`.

    Args:
        request_id: of the response.
        model: name that the client gave.
        prompt_tokens: of the conversation.
    """

    media_type = EVENT_STREAM

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._finish = router_pb2.Finish()

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the events before the text."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(types_pb2.Usage(prompt_tokens=self._prompt_tokens))
        yield named_event("message_start", {"message": {**self._head, **begun, "usage": usage}})
        yield named_event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        yield named_event("ping", {})

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`; empty for a finish without text."""
        if message.HasField("finish"):
            self._finish = message.finish
            if not message.text:
                return b""
        return (
            'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0,'
            f' "delta": {{"type": "text_delta", "text": {quoted(message.text)}}}}}\n\n'
        ).encode()

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        return b"".join(
            [
                named_event("content_block_stop", {"index": 0}),
                named_event("message_delta", {"delta": _ending(self._finish), "usage": _usage(usages[0])}),
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
        content = [{"type": "text", "text": choice.text.getvalue()}]
        yield json.dumps({**self._head, "content": content, **_ending(choice.finish), "usage": _usage(choice.usage)})


def _ending(finish: router_pb2.Finish) -> dict[str, Any]:
    """Return why a message ends; a stop token that is not one of its stop sequences counts as `end_turn`."""
    if finish.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_sequence}
    return {"stop_reason": _STOP_REASONS.get(FinishReason.of(finish.reason), "end_turn"), "stop_sequence": None}


def _usage(usage: types_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
