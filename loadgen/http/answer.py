"""One streamed answer: when its events arrived, how many tokens they brought, and how it ended.

**The number of tokens per event** is in no protocol here. The usage at the end has the sum: with as many events as
tokens, each brought one. With fewer events (a server that is late, or decodes speculatively), the rest is distributed
by the length of the events' texts. With more events, those without text are dropped first, from the last on (an event
that only brings the finish reason; but an end-of-sequence token has no text either), then others, evenly. Without a
usage each event with text counts as one token; S-LoRA's outputs that ignore end-of-sequence have the requested length.

**Server-sent events** follow the HTML standard, section 9.2.6: lines end with LF, CR LF or CR; a line that begins with
a colon is a comment; one blank after a field's colon is dropped; the `data` lines of an event are joined by LF; an
empty line ends the event, and an event without data is ignored. Other fields (`event`, `id`, `retry`) are not needed
here. S-LoRA writes no blank after the colon, vLLM one. Most events are one `data` line that ends LF LF, and arrive
whole; these take a split and a slice each.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from lorrery.loadgen.reception import NO_FINISH, FinishView, Reception
from lorrery.loadgen.workload.outcome import OK

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
MOST_EVENT_BYTES = 16 << 20
"""Longest event: one without an end would be copied with every piece that arrives."""


class EventStream:
    """Splits one stream into events."""

    __slots__ = ("_after_cr", "_begun", "_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = self._after_cr = False

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each event that these bytes complete.

        Raises:
            ValueError: an event is longer than `MOST_EVENT_BYTES`.
        """
        if not received:
            return []
        if len(self._rest) > MOST_EVENT_BYTES:
            raise ValueError(f"an event of over {MOST_EVENT_BYTES:,} bytes")
        if self._after_cr:
            received = received.removeprefix(b"\n")  # of a CR LF that arrived in two pieces
            self._after_cr = False
        rest = self._rest + received if self._rest else received
        if not self._begun:
            if len(rest) < len(_BOM) and _BOM.startswith(rest):
                self._rest = rest
                return []
            self._begun = True
            rest = rest.removeprefix(_BOM)
        if self._data or b"\r" in rest:
            return self._by_line(rest)
        *events, self._rest = rest.split(b"\n\n")
        found: list[bytes] = []
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                found.append(event[6:] if event.startswith(b" ", 5) else event[5:])
            else:
                # An odd number of line ends before an event leaves one at its head.
                found += self._by_lines([*event.split(b"\n"), b""])
        return found

    def _by_line(self, rest: bytes) -> list[bytes]:
        self._after_cr = rest.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(rest)
        return self._by_lines(lines)

    def _by_lines(self, lines: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return found


STREAM_ERROR = "STREAM_ERROR"
"""Status of a stream that reported an error after it had begun."""
BAD_RESPONSE = "BAD_RESPONSE"
"""Status of an answer that does not match its route."""
_SHOWN_CHARACTERS = 200


class Answer:
    """Takes the body of an answer with status 200.

    Args:
        read: parses an event, by the route.
        reception: to fill in.
        on_tokens: called with the tokens of each event.

    Attributes:
        finish_reason: in the server's words.
        usage: prompt, completion and cached tokens, as reported by the server.
    """

    __slots__ = (
        "_done",
        "_events",
        "_failure",
        "_on_tokens",
        "_read",
        "_text_lengths",
        "finish_reason",
        "reception",
        "usage",
    )

    def __init__(
        self,
        read: "Callable[[Mapping[str, Any], Answer], None]",
        reception: Reception,
        on_tokens: Callable[[int], None],
    ) -> None:
        self.reception = reception
        self.finish_reason: str | None = None
        self.usage: tuple[int, int, int] | None = None
        self._read, self._on_tokens = read, on_tokens
        self._events = EventStream()
        self._text_lengths: list[int] = []
        self._failure: tuple[str, str] | None = None
        self._done = False

    @property
    def is_over(self) -> bool:
        """Whether the server has marked the last token as sent."""
        return self._done or self.finish_reason is not None

    def feed(self, body: bytes) -> None:
        """Process a piece of the body."""
        if self._failure is not None:
            return
        try:
            events = self._events.feed(body)
        except ValueError as error:
            self.fail(BAD_RESPONSE, str(error))
            return
        for data in events:
            if self._failure is not None:
                return
            if data == b"[DONE]":
                self._done = True
                continue
            try:
                event = json.loads(data)
                if event.get("error") or event.get("object") == "error":
                    self.fail(STREAM_ERROR, error_text(event))
                else:
                    self._read(event, self)
            except (ValueError, LookupError, TypeError, AttributeError):
                self.fail(BAD_RESPONSE, f"not an event of this route: {data[:_SHOWN_CHARACTERS]!r}")

    def token_event(self, text: str, finish_reason: str | None) -> None:
        """Record an event with a token, which may have no text."""
        self.reception.note(1)
        self._text_lengths.append(len(text))
        if self.reception.keeps_output:
            self.reception.text.append(text)
        if finish_reason is not None:
            self.finish_reason = finish_reason
        self._on_tokens(1)

    def fail(self, status: str, detail: str) -> None:
        """Record a failure; later events are ignored."""
        if self._failure is None:
            self._failure = status, detail

    def end(self, asked_tokens: int | None = None) -> None:
        """Write the result to the reception; the body is complete, or broke off.

        Args:
            asked_tokens: known length of a complete output, used if the server does not report it.
        """
        reception = self.reception
        prompt, completion, cached = self.usage or (None, None, 0)
        if self._failure is not None:
            reception.status, reception.detail = self._failure
        elif self.is_over:
            reception.status = OK
            reception.finish = FinishView(self.finish_reason or "", completion, prompt, cached)
        else:
            reception.status = NO_FINISH
        if completion is None and reception.finish is not None:
            completion = asked_tokens
        tokens = tokens_of_events(self._text_lengths, completion)
        kept = [(at, num) for at, num in zip(reception.message_seconds, tokens, strict=True) if num]
        reception.message_seconds = [at for at, _ in kept]
        reception.message_tokens = [num for _, num in kept]
        if (more := sum(tokens) - len(tokens)) > 0:
            self._on_tokens(more)


def tokens_of_events(text_lengths: Sequence[int], num_tokens: int | None) -> list[int]:
    """Return the number of tokens of each event; 0: it does not count. See the module.

    Args:
        text_lengths: of each event, in order.
        num_tokens: total; None: unknown.
    """
    tokens = [1] * len(text_lengths)
    if num_tokens is None:
        if text_lengths and not text_lengths[-1]:
            tokens[-1] = 0
        return tokens
    surplus = len(tokens) - num_tokens
    for row in range(len(tokens) - 1, -1, -1):
        if surplus > 0 and not text_lengths[row]:
            tokens[row] = 0
            surplus -= 1
    if surplus > 0:
        rows = [row for row, num in enumerate(tokens) if num]
        last = max(num_tokens - 1, 1)
        kept = {rows[number * (len(rows) - 1) // last] for number in range(num_tokens)}
        return [int(row in kept) for row in range(len(tokens))]
    if surplus < 0 and tokens:
        lengths = text_lengths if any(text_lengths) else tokens
        total = sum(lengths)
        shares = [-surplus * sum_so_far // total for sum_so_far in accumulate(lengths)]
        before = 0
        for row, share in enumerate(shares):
            tokens[row] += share - before
            before = share
    return tokens


def error_text(body: object) -> str:
    """Return the message of an error body in any of the usual formats."""
    found = body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return str(found)[:_SHOWN_CHARACTERS]
