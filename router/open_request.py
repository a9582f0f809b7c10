"""One open request: the tokens received for it, how many of them are on their way to the client, and their text.

Its handler sleeps on one future, which a frame with tokens for it, or a flush, completes (`session.py`). Where the edge
can write without waiting, messages before the last are written at once, and the handler sleeps on.

Stop strings are matched twice. The worker matches one if the model produces it in the tokenizer's own tokenisation; it
then computes no further step. Text with other token boundaries is matched here, by characters. Either way the client's
text ends before the stop string, while its token ids include every token that was produced.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from lorrery.router.request import Finish, Request, Usage
from lorrery.router.tracing import OutputTrace
from lorrery.router.wire import Message
from lorrery.service.errors import Internal, RequestError
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.spans import TraceContext, log_fields
from lorrery.tokenizer.base import Tokenizer
from lorrery.vocabulary.adapters import AdapterChange
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.outputs import START, StopAutomaton


def stop_automaton(stop_strings: Iterable[str]) -> StopAutomaton:
    """Return the automaton that finds the stop strings in a text."""
    return StopAutomaton(map(ord, text) for text in stop_strings)


def stop_token_sequences(stop_strings: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the worker searches for, without duplicates and empty ones."""
    sequences = (tuple(tokenizer.encode_stop(text)) for text in stop_strings)
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The first is the one whose last character comes earliest; of those that end there, the longest. The result therefore
    does not depend on how the text was split. As in vLLM, one character fewer than the longest has is held back,
    whatever it is; nothing where the stop string is to be part of the text.

    Args:
        automaton: of the stop strings' characters.
        longest: characters of the longest.
        include: whether the returned text includes the stop string.

    Attributes:
        found: the stop string that was found; empty: none.
    """

    __slots__ = ("_automaton", "_include", "_longest", "_state", "_tail", "found")

    def __init__(self, automaton: StopAutomaton, longest: int, *, include: bool = False) -> None:
        self._automaton = automaton
        self._longest = longest
        self._include = include
        self._state = START
        self._tail = ""  # of the text so far, as much of it as the beginning of a stop string may be
        self.found = ""

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return bool(self.found)

    def push(self, text: str, *, counts: bool = True) -> str:
        """Take more text and return what is not held back; after a match, nothing.

        Args:
            text: the new text.
            counts: whether a stop string that is complete in this text is a match.
        """
        if self.found:
            return ""
        automaton, state = self._automaton, self._state
        num_returned = len(self._tail) if self._include else 0
        text = self._tail + text
        for index, char in enumerate(text[len(self._tail) :], len(self._tail) + 1):
            state = automaton.step(state, ord(char))
            if counts and (length := automaton.matched[state]):
                self._tail = ""
                self.found = text[index - length : index]
                return text[num_returned : index if self._include else index - length]
        self._state = state
        certain = max(0, len(text) - self._longest + 1)
        self._tail = text[certain:]
        return text[num_returned:] if self._include else text[:certain]

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._tail = self._tail, ""
        return "" if self._include else held


class Output:
    """Turns the tokens of one sequence into the contents of its messages.

    Args:
        request: its stop strings cut the text.
        tokenizer: for the text.

    Attributes:
        num_tokens: number of tokens returned by `push` so far.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = tokenizer.detokenizer()
        sampling = request.sampling
        self._stop = (
            StopMatcher(
                stop_automaton(sampling.stop_sequences),
                max(map(len, sampling.stop_sequences)),
                include=sampling.include_stop_sequence,
            )
            if sampling.stop_sequences
            else None
        )
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string; nothing may be written after it."""
        return self._stop is not None and self._stop.matched

    def push(self, token_ids: list[int], finish: Finish | None) -> tuple[list[int], str, Finish | None]:
        """Take new tokens, and the finish if they are the last.

        Returns:
            What to write: tokens, text, finish. Tokens after a stop string are left out. If the stop string shows only
            in the text, `stopped` is set and there is no finish: the caller ends the sequence and calls `stop_finish`.
        """
        if self._stop is not None:
            token_ids, text, finish = self._push_until_stop(self._stop, token_ids, finish)
        else:
            text = self._detokenizer.push(token_ids)
        self.num_tokens += len(token_ids)
        if finish is not None and self._stop is not None and not self.stopped:
            text += self._stop.flush()
        return token_ids, text, finish

    def _push_until_stop(
        self, stop: StopMatcher, token_ids: list[int], finish: Finish | None
    ) -> tuple[list[int], str, Finish | None]:
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            pieces.append(stop.push(self._detokenizer.push((token_id,)), counts=self._counts(index + 1)))
            if stop.matched:
                if finish is not None:
                    finish = _stop_finish(finish.usage, self.num_tokens + index + 1, stop.found)
                return token_ids[: index + 1], "".join(pieces), finish
        return token_ids, "".join(pieces), finish

    def _counts(self, num_more: int) -> bool:
        """Return whether a stop string may end with the last of `num_more` further tokens."""
        return self.num_tokens + num_more > self._request.sampling.min_new_tokens

    def stop_finish(self, upstream: Finish | None) -> Finish:
        """Return the finish of a sequence that was stopped here.

        Args:
            upstream: the scheduler's finish, for a sequence that ran past the stop string; None: unknown.
        """
        usage = upstream.usage if upstream is not None else Usage(self._request.prompt_tokens, 0)
        return _stop_finish(usage, self.num_tokens, "" if self._stop is None else self._stop.found)


def _stop_finish(usage: Usage, completion_tokens: int, stop_sequence: str) -> Finish:
    return Finish(FinishReason.STOP, replace(usage, completion_tokens=completion_tokens), stop_sequence)


_log = get_logger("router.open_request")

MakeMessage = Callable[[list[int], Finish | None, float, float | None], tuple[Message, bool]]
"""Makes a message of new tokens, the finish if they are the last, and the time scale; also returns whether it is last.

Its fourth argument is the time (`time.monotonic`) of the frame or flush that triggers the message; None: the handler
does.

It must not hold a reference to the open request: the cycle, and the prompt with it, would wait for the garbage
collector.
"""

WriteNow = Callable[[Message], bool]
"""Sends a message at once if that needs no waiting; returns whether it did. If not, nothing of it is sent.

It must not hold a reference to the open request either.
"""


class Source(Protocol):
    """Source of an open request's tokens."""

    def hold(self) -> bool:
        """Return whether a stream's next token should wait for a flush; if so, make sure that one is scheduled."""
        ...


class OpenRequest:
    """One open request: the tokens received for it, and how many of them its handler has taken.

    Args:
        request: the request as sent to a scheduler.
        make_message: called once for each message, in order.
        write_now: takes messages before the last while the handler sleeps; None: the handler writes them all.
        arrived: arrival of its call on `time.monotonic`; None: now.

    Attributes:
        token_ids: every token received so far, over all resumptions.
        written: how many of them are in messages.
        finish: set once, after the last token.
        error: set if the request fails.
        over: whether the last message has been made.
        fanout: source of its tokens; None while no shard works on it.
        handle: its number there.
        resumed: whether it was with a scheduler whose stream broke.
        adapter: the load at run time that brought its adapter, as far as known; None: none. A resumption uses the same.
        waits_until: the client's deadline on `time.monotonic`; None: none.
        cut: the error with which its handler, cancelled because its reader was too slow or its key revoked, ends.
        task: its handler.
        time_scale: wall seconds per device second, of the last shard.
        trace: records what happens; None: it is not traced.
    """

    __slots__ = (
        *("_make_message", "_write_now", "adapter", "arrived", "cut", "error", "fanout", "finish", "handle", "over"),
        *("request", "resumed", "task", "time_scale", "token_ids", "trace", "waiter", "waits_until", "written"),
    )

    def __init__(
        self,
        request: Request,
        make_message: MakeMessage,
        write_now: WriteNow | None = None,
        arrived: float | None = None,
    ) -> None:
        self.request = request
        self.arrived = time.monotonic() if arrived is None else arrived
        self._make_message = make_message
        self._write_now = write_now
        self.token_ids: array[int] = array("I")
        self.written = 0
        self.finish: Finish | None = None
        self.error: RequestError | None = None
        self.fanout: Source | None = None
        self.handle = 0
        self.resumed = False
        self.adapter: AdapterChange | None = None
        self.waits_until: float | None = None
        self.cut: RequestError | None = None
        self.over = False
        self.waiter: asyncio.Future[Message | None] | None = None
        self.time_scale = 1.0
        self.trace: OutputTrace | None = None
        self.task = asyncio.current_task()

    async def next_message(self) -> Message:
        """Return the next message once there is one and it is due.

        Raises:
            RequestError: the request failed.
        """
        if self._must_wait():
            waiter: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
            self.waiter = waiter
            try:
                message = await waiter
            finally:
                self.waiter = None
        else:
            message = self._message()
        if message is None:
            assert self.error is not None
            raise self.error
        return message

    def wake(self, at: float | None = None) -> None:
        """Write the pending tokens, or wake the handler to write them or to raise the error.

        Args:
            at: arrival of the frame, or start of the flush, that causes the call, on `time.monotonic`.
        """
        waiter = self.waiter
        if waiter is None:
            return
        if not waiter.done():
            message = self._message(at)
            if message is not None and not self.over and self._write_now is not None:
                try:
                    if self._write_now(message):
                        return
                except Exception as error:  # as in `_message`
                    _log.exception("write_failed", **self.log_fields)
                    self.error, message = Internal(str(error)), None
            waiter.set_result(message)
        self.waiter = None

    @property
    def context(self) -> TraceContext | None:
        """Its span; None: it is not traced."""
        return None if self.trace is None else self.trace.context

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields that identify it in log lines of other tasks."""
        return {"request_id": self.request.request_id, **log_fields(self.context)}

    def _must_wait(self) -> bool:
        if self.finish is not None or self.error is not None:
            return False
        if len(self.token_ids) == self.written:
            return True
        return self.written > 0 and self.fanout is not None and self.fanout.hold()

    def _message(self, at: float | None = None) -> Message | None:
        if self.error is not None:
            return None
        written, self.written = self.written, len(self.token_ids)
        try:
            token_ids = self.token_ids[written:].tolist()
            message, self.over = self._make_message(token_ids, self.finish, self.time_scale, at)
        except Exception as error:  # a fault in one request must not affect the others of its frame
            _log.exception("message_failed", **self.log_fields)
            self.error = Internal(str(error))
            return None
        return message

    def finish_if_complete(self) -> bool:
        """End the request if all its tokens are here and only the scheduler's finish was lost.

        There is nothing left to resume. The rest of the usage was known to the lost scheduler only.

        Returns:
            Whether it has ended.
        """
        sampling, num_tokens = self.request.sampling, len(self.token_ids)
        if num_tokens and self.token_ids[-1] == self.request.eos_id and not sampling.ignore_eos:
            reason = FinishReason.EOS
        elif num_tokens >= sampling.max_new_tokens:
            reason = FinishReason.LENGTH
        else:
            return False
        if self.error is None and self.finish is None:
            self.finish = Finish(reason, Usage(self.request.prompt_tokens, num_tokens))
            self.wake()
        return True

    def fail(self, error: RequestError) -> None:
        """End the request with an error."""
        if self.error is None and self.finish is None:
            self.error = error
            self.wake()

    def cut_off(self, error: RequestError) -> None:
        """End the request with an error while its handler is stuck in a write, even of the last message."""
        if self.cut is None:
            self.cut = error
            self.fail(error)
            if self.task is not None:
                self.task.cancel()
