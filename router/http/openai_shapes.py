"""OpenAI's answers, as vLLM makes them.

What matters to clients, and is easily got wrong: a chunk carries one token, the role comes with the first and the
finish reason with the last; usage has a chunk of its own, without choices, and only if it is asked for; the last event
is `[DONE]`.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import DONE, Collected, data, finish_word
from lorrery.router.http.errors import error_body
from lorrery.v1 import router_pb2, types_pb2


class CompletionShape:
    """How `/v1/completions` answers.

    Args:
        request_id: of the whole answer.
        model: as the client named it.
        n: outputs of each prompt.
        include_usage: whether a stream ends with its usage.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, request_id: str, model: str, n: int, include_usage: bool) -> None:
        self._n = n
        self._head = {"id": request_id, "created": unix_seconds(), "model": model}
        head = json.dumps({"id": request_id, "object": self.chunk_kind, "created": self._head["created"]})[:-1]
        self._prefix = f'data: {head}, "model": {json.dumps(model)}, "choices": [{{"index": '
        self._include_usage = include_usage

    def event(self, index: int, message: router_pb2.GenerateResponse) -> bytes:
        """See `Shape`."""
        finish = finish_word(message)
        reason = "null" if finish is None else f'"{finish}"'
        return (
            f"{self._prefix}{index}, {self._delta(index, json.dumps(message.text))},"
            f' "logprobs": null, "finish_reason": {reason}}}]}}\n\n'
        ).encode()

    def _delta(self, index: int, text: str) -> str:
        return f'"text": {text}'

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        if not self._include_usage:
            return DONE
        content = self._content(self.chunk_kind, []) | {"usage": usage_of(usages, self._n)}
        return data(json.dumps(content)) + DONE

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return data(json.dumps(error_body(error))) + DONE

    def whole(self, choices: Sequence[Collected]) -> object:
        """See `Shape`."""
        listed = [
            {
                "index": index,
                **self._whole_delta("".join(choice.text)),
                "logprobs": None,
                "finish_reason": _word(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return self._content(self.kind, listed) | {"usage": usage_of([choice.usage for choice in choices], self._n)}

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class ChatShape(CompletionShape):
    """How `/v1/chat/completions` answers."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, n: int, include_usage: bool) -> None:
        super().__init__(request_id, model, n, include_usage)
        self._introduced: set[int] = set()

    def _delta(self, index: int, text: str) -> str:
        if index in self._introduced:
            return f'"delta": {{"content": {text}}}'
        self._introduced.add(index)
        return f'"delta": {{"role": "assistant", "content": {text}}}'

    def _whole_delta(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


def _word(choice: Collected) -> str | None:
    assert choice.finish is not None
    return finish_word(router_pb2.GenerateResponse(finish=choice.finish))


def usage_of(usages: Sequence[types_pb2.Usage], n: int) -> dict[str, Any]:
    """Return the usage of an answer.

    Args:
        usages: of each output, in order.
        n: outputs of each prompt, which counts once.
    """
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    cached = sum(usage.cached_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def unix_seconds() -> int:
    """Return the time of day, which answers are stamped with; nothing is decided by it."""
    return int(time.time())
