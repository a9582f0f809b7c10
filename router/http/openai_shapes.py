"""OpenAI's answers, as vLLM makes them.

What matters to clients, and is easily got wrong: a chunk carries one token, the role comes with the first and the
finish reason with the last; usage has a chunk of its own, without choices, and only if it is asked for; the last event
is `[DONE]`.
"""

import json
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import DONE, EVENT_STREAM, Collected, data, finish_word
from lorrery.router.http.errors import error_body
from lorrery.router.http.openai_details import Details, Piece
from lorrery.v1 import router_pb2, types_pb2


class CompletionShape:
    """How `/v1/completions` answers.

    Args:
        request_id: of the whole answer.
        model: as the client named it.
        n: outputs of each prompt.
        include_usage: whether a stream ends with its usage.
        details: what else to show; None: text alone.
    """

    media_type = EVENT_STREAM
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, request_id: str, model: str, n: int, include_usage: bool, details: Details | None = None
    ) -> None:
        self._n = n
        self._details = details
        self._head = {"id": request_id, "created": unix_seconds(), "model": model}
        head = json.dumps({"id": request_id, "object": self.chunk_kind, "created": self._head["created"]})[:-1]
        self._prefix = f'data: {head}, "model": {json.dumps(model)}, "choices": [{{"index": '
        self._include_usage = include_usage

    def event(self, index: int, message: router_pb2.GenerateResponse) -> bytes:
        """See `Shape`."""
        if self._details is not None:
            return self._detailed_event(self._details, index, message)
        finish = finish_word(message)
        reason = "null" if finish is None else f'"{finish}"'
        return (
            f"{self._prefix}{index}, {self._delta(index, quoted(message.text))},"
            f' "logprobs": null, "finish_reason": {reason}}}]}}\n\n'
        ).encode()

    def _detailed_event(self, details: Details, index: int, message: router_pb2.GenerateResponse) -> bytes:
        piece = details.take(index, message.text, message.token_ids, message.logprobs)
        choice, about = self._detailed(
            index, json.loads(f"{{{self._delta(index, quoted(piece.text))}}}"), piece, finish_word(message)
        )
        return data(json.dumps(self._content(self.chunk_kind, [choice]) | about))

    def _detailed(
        self, index: int, text: dict[str, Any], piece: Piece, finish: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a choice with its details, and what stands beside the choices."""
        return {
            "index": index,
            **text,
            "logprobs": piece.completion_logprobs(),
            "finish_reason": finish,
            **piece.own,
            **piece.about_prompt,
        }, {}

    def _delta(self, index: int, text: str) -> str:
        return f'"text": {text}'

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        if not self._include_usage:
            return DONE
        content = self._content(self.chunk_kind, []) | {"usage": self._usage(usages)}
        return data(json.dumps(content)) + DONE

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return data(json.dumps(error_body(error))) + DONE

    def whole(self, choices: Sequence[Collected]) -> object:
        """See `Shape`."""
        listed: list[dict[str, Any]] = []
        beside: dict[str, Any] = {}
        for index, choice in enumerate(choices):
            text, finish = "".join(choice.text), _word(choice)
            if self._details is None:
                whole = {"index": index, **self._whole_delta(text), "logprobs": None, "finish_reason": finish}
            else:
                piece = self._details.take(index, text, choice.token_ids, choice.logprobs)
                whole, about = self._detailed(index, self._whole_delta(piece.text), piece, finish)
                beside |= about
            listed.append(whole)
        usage = self._usage([choice.usage for choice in choices])
        return self._content(self.kind, listed) | beside | {"usage": usage}

    def _usage(self, usages: Sequence[types_pb2.Usage]) -> dict[str, Any]:
        return usage_of(usages, self._n, output=self._details is None or self._details.output)

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class ChatShape(CompletionShape):
    """How `/v1/chat/completions` answers."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, n: int, include_usage: bool, details: Details | None = None
    ) -> None:
        super().__init__(request_id, model, n, include_usage, details)
        self._introduced: set[int] = set()

    def _delta(self, index: int, text: str) -> str:
        if index in self._introduced:
            return f'"delta": {{"content": {text}}}'
        self._introduced.add(index)
        return f'"delta": {{"role": "assistant", "content": {text}}}'

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _detailed(
        self, index: int, text: dict[str, Any], piece: Piece, finish: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        choice = {"index": index, **text, "logprobs": piece.chat_logprobs(), "finish_reason": finish, **piece.own}
        return choice, piece.about_prompt


def _word(choice: Collected) -> str | None:
    assert choice.finish is not None
    return finish_word(router_pb2.GenerateResponse(finish=choice.finish))


def usage_of(usages: Sequence[types_pb2.Usage], n: int, *, output: bool = True) -> dict[str, Any]:
    """Return the usage of an answer.

    Args:
        usages: of each output, in order.
        n: outputs of each prompt, which counts once.
        output: whether what was produced counts.
    """
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    cached = sum(usage.cached_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages) if output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def unix_seconds() -> int:
    """Return the time of day, which answers are stamped with; nothing is decided by it."""
    return int(time.time())
