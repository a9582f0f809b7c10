"""Server-sent events: splits bytes from the network into the data of each event.

The rules are those of the HTML standard, section 9.2.6, event streams: lines end with LF, CR LF or CR; a line that
begins with a colon is a comment; one blank after a field's colon is dropped; the `data` lines of an event are joined by
LF; an empty line ends the event, and an event without data is ignored. Other fields (`event`, `id`, `retry`) are not
needed here. S-LoRA writes no blank after the colon, vLLM one.

Most events are one `data` line that ends LF LF, and arrive whole; these take a split and a slice each.
"""

import re

__all__ = ["EventStream"]

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
