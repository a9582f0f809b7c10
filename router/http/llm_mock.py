"""llm-mock's `/generate`, the same as that of vLLM's first API server (dongmingli-Ben/llm-mock, commit f07dd39).

The text of a response begins with its prompt. A stream is a sequence of JSON objects, each with the whole text so far
and followed by a NUL.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted

from lorrery.router.http.answer import Collected
from lorrery.router.http.errors import error_body
from lorrery.router.http.openai_requests import CompletionRequest
from lorrery.router.http.pieces import array
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.v1 import router_pb2, types_pb2


class LlmMockRequest(CompletionRequest):
    """The body of llm-mock's `/generate`: a prompt, and vLLM's sampling parameters beside it."""

    prompt: str


class LlmMockShape:
    """llm-mock's response format.

    Args:
        prompt: precedes each text.
        n: number of texts.
    """

    media_type = "application/octet-stream"

    def __init__(self, prompt: str, n: int) -> None:
        self._quoted = [quoted(prompt)[:-1]] * n  # texts so far: each event repeats all of them

    def echo(self, index: int) -> Iterable[bytes]:
        """See `Shape`."""
        return ()

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`."""
        self._quoted[index] += quoted(message.text)[1:-1]
        return ('{"text": [' + '", '.join(self._quoted) + '"]}\0').encode()

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        return b""

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return json.dumps(error_body(error)).encode() + b"\0"

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        yield '{"text": '
        yield from array(
            text + quoted(choice.text.getvalue())[1:] for text, choice in zip(self._quoted, choices, strict=True)
        )
        yield "}"
