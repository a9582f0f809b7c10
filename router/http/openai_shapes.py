"""OpenAI's responses, as vLLM makes them, with every field that vLLM writes though it be null.

Details that clients rely on: a chunk carries one token, a chat's role comes in an event of its own before the first
token, and the finish reason with the last; usage has its own chunk, without choices, and only if requested; the last
event is `[DONE]`. The usage so far is one of the details of a chunk; chunks without details are text put together from
ready parts.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from types import MappingProxyType
from typing import Any

from lorrery.router.edges.tools import ChatCalls
from lorrery.router.http.answer import DONE, EVENT_STREAM, Collected, array_of, data, finish_word
from lorrery.router.http.errors import error_body
from lorrery.router.http.forms import Form
from lorrery.router.http.token_details import Details, Piece
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import RequestError
from lorrery.service.installed import VERSION
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

_FINGERPRINT = f'"system_fingerprint": "lorrery-{VERSION}"'
_AFTER_USAGE = '"kv_transfer_params": null, "ec_transfer_params": null, "metrics": null'


class CompletionShape:
    """The response format of `/v1/completions`.

    Args:
        request_id: of the whole response.
        model: name that the client gave.
        n: outputs per prompt.
        include_usage: whether a stream ends with its usage.
        details: what to show beside the text; None: text only.
        stop_token_ids: tokens that end an output.
    """

    media_type = EVENT_STREAM
    kind = "text_completion"
    chunk_kind = "text_completion"
    goes_on = '"finish_reason": null, "stop_reason": null'
    """A chunk's fields about the end of its output, before that."""

    usage_nulls: Mapping[str, None] = MappingProxyType({})
    """Further fields of the usage so far."""

    def __init__(
        self,
        request_id: str,
        model: str,
        n: int,
        include_usage: bool,
        details: Details | None = None,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self._n = n
        self._details = details
        self._stop_token_ids = stop_token_ids
        self._head = {"id": request_id, "created": unix_seconds(), "model": model}
        head = json.dumps({"id": request_id, "object": self.chunk_kind, "created": self._head["created"]})[:-1]
        self._prefix = f'data: {head}, "model": {json.dumps(model)}, "choices": [{{"index": '
        self._include_usage = include_usage

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`."""
        if self._details is not None:
            for piece in self._details.echoed(index):
                yield self._detailed_event(self._details, index, piece, self._delta(index, piece.text), self.goes_on)

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`."""
        is_last = message.HasField("finish")
        details = self._details
        if details is None:
            delta = self._delta(index, message.text, last=is_last)
            ending = self._ending(index, message.finish, message.token_ids) if is_last else self.goes_on
            beside = f", {_FINGERPRINT}" if is_last and not self._include_usage else ""
            event = f'{self._prefix}{index}, {delta}, "logprobs": null, {ending}, {self._no_tokens}}}]{beside}}}'
            return f"{event}\n\n".encode()
        piece = details.take(index, message.text, message.token_ids, logprobs)
        delta = self._delta(index, piece.text, last=is_last)
        ending = self._ending(index, message.finish, message.token_ids) if is_last else self.goes_on
        return self._detailed_event(details, index, piece, delta, ending, last=is_last)

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

    _no_tokens = '"prompt_token_ids": null, "token_ids": null'

    def _detailed_event(
        self, details: Details, index: int, piece: Piece, delta: str, ending: str, *, last: bool = False
    ) -> bytes:
        parts = [f'{self._prefix}{index}, {delta}, "logprobs": ', *self._logprobs(details, piece), f", {ending}, "]
        parts += self._tokens(details, piece)
        beside = f", {_FINGERPRINT}" if last and not self._include_usage else ""
        return f"{''.join(parts)}}}]{beside}{details.usage_so_far(index, self.usage_nulls)}}}\n\n".encode()

    def _tokens(self, details: Details, piece: Piece) -> Iterator[str]:
        """Yield a chunk's fields with tokens."""
        shown = piece.prompt if details.prompt_token_ids else None
        yield '"prompt_token_ids": '
        yield from ("null",) if shown is None else array_of(shown.token_ids)
        yield ', "token_ids": '
        yield from array_of(piece.token_ids) if details.token_ids else ("null",)

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
        content = json.dumps({**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage(usages)})
        return data(f"{content[:-1]}, {_FINGERPRINT}}}") + DONE

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return data(json.dumps(error_body(error))) + DONE

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        yield f'{json.dumps(self._head | {"object": self.kind})[:-1]}, "choices": ['
        details, last = self._details, None
        for index, choice in enumerate(choices):
            assert choice.finish is not None
            yield f'{", " if index else ""}{{"index": {index}, '
            text = choice.text.getvalue()
            if details is not None:
                last = details.take(index, text, choice.token_ids, choice.logprobs)
                text = last.text
            yield f'{self._whole_text(index, text)}, "logprobs": '
            yield from ("null",) if details is None or last is None else self._logprobs(details, last)
            yield f', {self._ending(index, choice.finish, choice.token_ids)}, "token_ids": '
            shows = details is not None and details.token_ids and last is not None
            yield from array_of(last.token_ids) if shows and last is not None else ("null",)
            yield from self._in_choice(last)
            yield ', "routed_experts": null}'
        usage = self._usage([choice.usage for choice in choices], whole=True)
        yield f'], "service_tier": null, {_FINGERPRINT}, "usage": {json.dumps(usage)}, '
        yield from self._beside(last)
        yield f"{_AFTER_USAGE}}}"

    def _in_choice(self, piece: Piece | None) -> Iterator[str]:
        """Yield the further fields of a choice."""
        yield from self._about_prompt(piece)

    def _beside(self, piece: Piece | None) -> Iterator[str]:
        """Yield the further fields beside the choices, each before a comma."""
        del piece
        return iter(())

    def _about_prompt(self, piece: Piece | None) -> Iterator[str]:
        """Yield the fields about a prompt, each after a comma."""
        details, prompt = self._details, None if piece is None else piece.prompt
        yield ', "prompt_logprobs": '
        if details is None or prompt is None or details.prompt_logprobs is None:
            yield "null"
        else:
            yield from details.json.prompt(prompt.run(), details.prompt_logprobs)
        yield ', "prompt_token_ids": '
        if details is None or prompt is None or not self._shows_prompt(details):
            yield "null"
        else:
            yield from array_of(prompt.token_ids)

    def _shows_prompt(self, details: Details) -> bool:
        """Return whether the tokens of a prompt are shown."""
        return details.token_ids

    def _usage(self, usages: Sequence[types_pb2.Usage], *, whole: bool = False) -> dict[str, Any]:
        usage = usage_of(usages, self._n)
        # As in vLLM, of several prompts it is the last that counts here, and the first in a stream.
        usage["prompt_tokens_details"] = {"cached_tokens": usages[-1 if whole else 0].cached_tokens}
        if whole:
            usage["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
            usage["completion_tokens_details"] = None
        return usage

    def _whole_text(self, index: int, text: str) -> str:
        """Return a choice's field with its whole text."""
        del index
        return f'"text": {quoted(text)}'


class ChatShape(CompletionShape):
    """The response format of `/v1/chat/completions`.

    Args:
        request_id: of the whole response.
        model: name that the client gave.
        n: outputs.
        include_usage: whether a stream ends with its usage.
        details: what to show beside the text; None: text only.
        stop_token_ids: tokens that end an output.
        form: of the outputs; only one with calls of tools changes how they are shown.
        role: whose turn the output is.
        echo: text that precedes each output.
        prompt_text: the rendered prompt, if it is to be shown.
        block_size: tokens per block of the prefix cache, 0 without one; None: usage has no details of the prompt.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    goes_on = '"finish_reason": null'
    usage_nulls: Mapping[str, None] = MappingProxyType({"completion_tokens_details": None})
    _no_tokens = '"token_ids": null'

    def __init__(
        self,
        request_id: str,
        model: str,
        n: int,
        include_usage: bool,
        details: Details | None = None,
        stop_token_ids: Collection[int] = (),
        form: Form | None = None,
        *,
        role: str = "assistant",
        echo: str = "",
        prompt_text: str | None = None,
        block_size: int | None = 0,
    ) -> None:
        super().__init__(request_id, model, n, include_usage, details, stop_token_ids)
        self._form = form if form is not None and form.calls_tools else None
        self._calls_of: dict[int, ChatCalls] = {}  # by output
        self._role, self._echo, self._prompt_text = role, echo, prompt_text
        self._block_size = block_size
        self._said = ""  # by the event in the making

    def echo(self, index: int) -> Iterator[bytes]:
        """See `Shape`: the event with the role, and the one with the text that is echoed."""
        details = self._details
        usage = "" if details is None else details.usage_so_far(index, self.usage_nulls)
        delta = f'"delta": {{"role": {quoted(self._role)}, "content": ""}}, "logprobs": null, {self.goes_on}'
        tokens = "null"
        if details is not None and details.token_ids and details.prompts:
            tokens = "".join(array_of(details.prompts[index // self._n].token_ids))
        prompt = f'"prompt_token_ids": {tokens}, "prompt_text": {json.dumps(self._prompt_text)}'
        yield f"{self._prefix}{index}, {delta}}}]{usage}, {prompt}}}\n\n".encode()
        if self._echo:
            delta = f'"delta": {{"content": {quoted(self._echo)}}}, "logprobs": null, {self.goes_on}'
            yield f"{self._prefix}{index}, {delta}}}]{usage}}}\n\n".encode()

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`: of a call, its name has an event of its own, and there is none where nothing is certain yet."""
        if self._form is None:
            return super().event(index, message, logprobs)
        is_last = message.HasField("finish")
        *before, self._said = self._calls(self._form, index).deltas(message.text, is_last)
        if not (self._said or is_last or self._details):
            return b""
        events = (
            f'{self._prefix}{index}, "delta": {{{said}}}, "logprobs": null, {self.goes_on}, {self._no_tokens}}}]}}\n\n'
            for said in before
        )
        return "".join(events).encode() + super().event(index, message, logprobs)

    def _tokens(self, details: Details, piece: Piece) -> Iterator[str]:
        yield '"token_ids": '
        yield from array_of(piece.token_ids) if details.token_ids else ("null",)

    def _delta(self, index: int, text: str, *, last: bool = False) -> str:
        del index, last
        if self._form is None:
            return f'"delta": {{"content": {quoted(text)}}}'
        return f'"delta": {{{self._said}}}'

    def _whole_text(self, index: int, text: str) -> str:
        content, calls = (self._echo + text, "") if self._form is None else self._calls(self._form, index).whole(text)
        nulls = '"refusal": null, "annotations": null, "audio": null, "function_call": null'
        said = f'"role": {quoted(self._role)}, "content": {quoted(content)}, {nulls}{calls}, "reasoning": null'
        return f'"message": {{{said}}}'

    def _in_choice(self, piece: Piece | None) -> Iterator[str]:
        del piece
        return iter(())

    def _beside(self, piece: Piece | None) -> Iterator[str]:
        yield "".join(self._about_prompt(piece)).removeprefix(", ")
        yield f', "prompt_text": {json.dumps(self._prompt_text)}, '

    def _finish_word(self, index: int, reason: FinishReason) -> str:
        # As in OpenAI's API, an output that calls the tool which its request names ends with "stop".
        called = self._form is not None and self._form.tool is None and self._calls(self._form, index).num_calls > 0
        return "tool_calls" if called and finish_word(reason) == "stop" else finish_word(reason)

    def _shows_prompt(self, details: Details) -> bool:
        return details.token_ids and self._block_size is not None

    def _usage(self, usages: Sequence[types_pb2.Usage], *, whole: bool = False) -> dict[str, Any]:
        usage = super()._usage(usages, whole=whole)
        details = usage["prompt_tokens_details"]
        if self._block_size is None:
            return usage | {"prompt_tokens_details": None}
        prompt, cached = usages[0].prompt_tokens, usages[0].cached_tokens
        details["created_cache_tokens"] = created_cache_tokens(prompt, cached, self._block_size)
        return usage

    def _calls(self, form: Form, index: int) -> ChatCalls:
        calls = self._calls_of.get(index)
        if calls is None:
            calls = self._calls_of[index] = ChatCalls(form, f"{self._head['id']}-{index}")
        return calls

    def _logprobs(self, details: Details, piece: Piece) -> Iterator[str]:
        return details.chat_logprobs(piece)


def usage_of(usages: Sequence[types_pb2.Usage], n: int) -> dict[str, Any]:
    """Return the usage of a response.

    Args:
        usages: of each output, in order.
        n: outputs per prompt; each prompt counts once.
    """
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def unix_seconds() -> int:
    """Return the Unix time that responses are stamped with; no decision depends on it."""
    return int(time.time())


def created_cache_tokens(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """Return how many tokens of a prompt are new in the prefix cache: those of whole blocks that were not there.

    Args:
        prompt_tokens: of the prompt.
        cached_tokens: of them, those that were there.
        block_size: of the cache; 0: there is none.
    """
    return max(0, prompt_tokens // block_size * block_size - cached_tokens) if block_size else 0
