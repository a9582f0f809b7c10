"""OpenAI's responses, as vLLM makes them.

Details that clients rely on: a chunk carries one token, the role comes with the first token and the finish reason with
the last; usage has its own chunk, without choices, and only if requested; the last event is `[DONE]`. The usage so
far is one of the details of a chunk; chunks without details are text put together from ready parts.
"""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import DONE, EVENT_STREAM, Collected, data, finish_word
from lorrery.router.http.chat_calls import NO_CONTENT, NO_DELTA, ChatCalls
from lorrery.router.http.errors import error_body
from lorrery.router.http.forms import Form
from lorrery.router.http.openai_details import Details, Piece
from lorrery.router.logprobs import OutputLogprobs
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.finish_reason import FinishReason

_GOES_ON = '"finish_reason": null, "stop_reason": null'


class CompletionShape:
    """The response format of `/v1/completions`.

    Args:
        request_id: of the whole response.
        model: name that the client gave.
        n: outputs per prompt.
        include_usage: whether a stream ends with its usage.
        details: what to show beside the text; None: text only.
        stop_token_ids: tokens that end an output.
        form: of the outputs; only one with calls of tools changes how a chat shows them.
    """

    media_type = EVENT_STREAM
    kind = "text_completion"
    chunk_kind = "text_completion"
    prompt_in_choice = True
    """Whether details of a prompt are in each choice, or beside the choices."""

    def __init__(
        self,
        request_id: str,
        model: str,
        n: int,
        include_usage: bool,
        details: Details | None = None,
        stop_token_ids: Collection[int] = (),
        form: Form | None = None,
    ) -> None:
        self._n = n
        self._form = form if form is not None and form.calls_tools else None
        self._calls_of: dict[int, ChatCalls] = {}  # by output
        self._details = details
        self._stop_token_ids = stop_token_ids
        self._introduced: set[int] = set()  # outputs whose role a chat has shown
        self._head = {"id": request_id, "created": unix_seconds(), "model": model}
        head = json.dumps({"id": request_id, "object": self.chunk_kind, "created": self._head["created"]})[:-1]
        self._prefix = f'data: {head}, "model": {json.dumps(model)}, "choices": [{{"index": '
        self._include_usage = include_usage

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`."""
        if self._details is not None:
            for piece in self._details.echoed(index):
                yield self._detailed_event(self._details, index, piece, self._delta(index, piece.text), _GOES_ON)

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`."""
        is_last = message.HasField("finish")
        if self._details is None:
            delta = self._delta(index, message.text, last=is_last)
            if delta == NO_DELTA and not is_last:
                return b""  # as in vLLM: nothing of a call is certain yet
            ending = self._ending(index, message.finish, message.token_ids) if is_last else _GOES_ON
            return f'{self._prefix}{index}, {delta}, "logprobs": null, {ending}}}]}}\n\n'.encode()
        piece = self._details.take(index, message.text, message.token_ids, logprobs)
        delta = self._delta(index, piece.text, last=is_last)
        ending = self._ending(index, message.finish, message.token_ids) if is_last else _GOES_ON
        return self._detailed_event(self._details, index, piece, delta, ending)

    def _ending(self, index: int, finish: router_pb2.Finish, token_ids: Sequence[int]) -> str:
        """Return a choice's fields about its end, after its last text; `token_ids`: up to the last."""
        reason = FinishReason.of(finish.reason)
        stopped_by: str | int | None = finish.stop_sequence or None
        if reason is FinishReason.STOP and not stopped_by and token_ids and token_ids[-1] in self._stop_token_ids:
            stopped_by = token_ids[-1]
        return f'"finish_reason": "{self._finish_word(index, reason)}", "stop_reason": {json.dumps(stopped_by)}'

    def _finish_word(self, index: int, reason: FinishReason) -> str:
        del index
        return finish_word(reason)

    def _detailed_event(self, details: Details, index: int, piece: Piece, delta: str, ending: str) -> bytes:
        choice = "".join(self._detailed(details, delta, piece, ending))
        beside = f"{''.join(self._beside(details, piece))}{details.usage_so_far(index)}"
        return f"{self._prefix}{index}, {choice}}}]{beside}}}\n\n".encode()

    def _detailed(self, details: Details, text: str, piece: Piece, ending: str) -> Iterator[str]:
        """Yield the fields of a choice with its details."""
        yield f'{text}, "logprobs": '
        yield from self._logprobs(details, piece)
        yield f", {ending}"
        yield from details.own(piece)
        if self.prompt_in_choice:
            yield from details.about_prompt(piece)

    def _beside(self, details: Details, piece: Piece) -> Iterator[str]:
        """Return the fields beside the choices."""
        return iter(()) if self.prompt_in_choice else details.about_prompt(piece)

    def _logprobs(self, details: Details, piece: Piece) -> Iterator[str]:
        return details.completion_logprobs(piece)

    def _delta(self, index: int, text: str, *, last: bool = False) -> str:
        """Return a choice's field with more text; `last`: whether its output ends there."""
        del index, last
        return f'"text": {quoted(text)}'

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        if not self._include_usage:
            return DONE
        content = self._content(self.chunk_kind, []) | {"usage": self._usage(usages)}
        return data(json.dumps(content)) + DONE

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return data(json.dumps(error_body(error))) + DONE

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        yield f'{json.dumps(self._head | {"object": self.kind})[:-1]}, "choices": ['
        beside: list[tuple[Details, Piece]] = []
        for index, choice in enumerate(choices):
            assert choice.finish is not None
            yield f'{", " if index else ""}{{"index": {index}, '
            if self._details is None:
                text = self._whole_text(index, choice.text.getvalue())
                yield f'{text}, "logprobs": null, {self._ending(index, choice.finish, choice.token_ids)}'
            else:
                piece = self._details.take(index, choice.text.getvalue(), choice.token_ids, choice.logprobs)
                text = self._whole_text(index, piece.text)
                ending = self._ending(index, choice.finish, choice.token_ids)
                yield from self._detailed(self._details, text, piece, ending)
                beside.append((self._details, piece))
            yield "}"
        yield "]"
        for details, piece in beside[-1:]:
            yield from self._beside(details, piece)
        yield f', "usage": {json.dumps(self._usage([choice.usage for choice in choices]))}}}'

    def _usage(self, usages: Sequence[types_pb2.Usage]) -> dict[str, Any]:
        return usage_of(usages, self._n, output=self._details is None or self._details.output)

    def _whole_text(self, index: int, text: str) -> str:
        """Return a choice's field with its whole text."""
        del index
        return f'"text": {quoted(text)}'

    def _content(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class ChatShape(CompletionShape):
    """The response format of `/v1/chat/completions`; arguments are those of `CompletionShape`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prompt_in_choice = False

    def _delta(self, index: int, text: str, *, last: bool = False) -> str:
        said = f'"content": {quoted(text)}' if self._form is None else self._calls(self._form, index).delta(text, last)
        if index in self._introduced:
            return f'"delta": {{{said}}}'
        self._introduced.add(index)
        return f'"delta": {{"role": "assistant", {said or NO_CONTENT}}}'

    def _whole_text(self, index: int, text: str) -> str:
        said = f'"content": {quoted(text)}' if self._form is None else self._calls(self._form, index).whole(text)
        return f'"message": {{"role": "assistant", {said}}}'

    def _finish_word(self, index: int, reason: FinishReason) -> str:
        # As in OpenAI's API, an output that calls the tool which its request names ends with "stop".
        called = self._form is not None and self._form.tool is None and self._calls(self._form, index).num_calls > 0
        return "tool_calls" if called and finish_word(reason) == "stop" else finish_word(reason)

    def _calls(self, form: Form, index: int) -> ChatCalls:
        calls = self._calls_of.get(index)
        if calls is None:
            calls = self._calls_of[index] = ChatCalls(form, f"{self._head['id']}-{index}")
        return calls

    def _logprobs(self, details: Details, piece: Piece) -> Iterator[str]:
        return details.chat_logprobs(piece)


def usage_of(usages: Sequence[types_pb2.Usage], n: int, *, output: bool = True) -> dict[str, Any]:
    """Return the usage of a response.

    Args:
        usages: of each output, in order.
        n: outputs per prompt; each prompt counts once.
        output: whether produced tokens count.
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
    """Return the Unix time that responses are stamped with; no decision depends on it."""
    return int(time.time())
