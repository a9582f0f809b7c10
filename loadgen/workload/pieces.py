"""A trace's lines, or the entries of its JSON, one by one: a file may be larger than memory, and one line long."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TextIO

from lorrery.loadgen.workload.request import TraceError

__all__ = ["Pieces"]

_READ: Final = 1 << 16
"""Characters of a read."""
_LONGEST: Final = 1 << 26
"""Characters of a line or an entry."""
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_SHOWN: Final = 80


class Pieces:
    """Reads a file once, from its beginning, which may be looked at before.

    Args:
        file: of text, with or without a byte-order mark.

    Raises:
        TraceError: there is nothing in it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = file.read(_READ).removeprefix("\ufeff")
        while not self._text.strip():
            if not (more := file.read(_READ)):
                raise TraceError("there is no row in it: the file is empty")
            self._text += more

    @property
    def begin(self) -> str:
        """The beginning, without blanks."""
        return self._text.lstrip()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each line that is not blank.

        Raises:
            TraceError: a line that is too long.
        """
        rest, number = self._text, 0
        while True:
            *whole, rest = rest.split("\n")
            for line in whole:
                number += 1
                if line := line.strip():
                    yield f"line {number}", line
            if len(rest) > _LONGEST:
                raise TraceError(f"line {number + 1} has more than {_LONGEST:,} characters")
            if not (more := self._file.read(max(_READ, len(rest)))):
                break
            rest += more
        if rest := rest.strip():
            yield f"line {number + 1}", rest

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the place and the value of each entry: of a JSON list, or of JSON Lines.

        Raises:
            TraceError: not JSON.
        """
        if self.begin.startswith("[") and not self._has_lists():
            yield from self._listed()
            return
        for where, line in self.lines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{where}: not JSON: {error}; found {line[:_SHOWN]!r}") from None
            yield where, value

    def _has_lists(self) -> bool:
        """Return whether each line is a list by itself: the first one is, and another follows."""
        first, _, rest = self.begin.partition("\n")
        if not rest.lstrip().startswith("["):
            return False
        try:
            return isinstance(json.loads(first), list)
        except (ValueError, RecursionError):
            return False

    def _listed(self) -> Iterator[tuple[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        text, at, number, ended = self.begin, 1, 0, False

        def more() -> bool:
            nonlocal text, at, ended
            if len(text) - at > _LONGEST:
                raise TraceError(f"entry {number + 1} has more than {_LONGEST:,} characters")
            piece = self._file.read(max(_READ, len(text) - at))
            text, at, ended = text[at:] + piece, 0, not piece
            return not ended

        def skip_blanks() -> str:
            nonlocal at
            while (at := _BLANK.match(text, at).end()) == len(text) and more():  # type: ignore[union-attr]  # matches
                pass
            return text[at : at + 1]

        while (sign := skip_blanks()) != "]":
            if number:
                if sign != ",":
                    raise TraceError(f"not JSON: after entry {number} a comma is missing, or the list's end")
                at += 1
                skip_blanks()
            while True:
                try:
                    value, at = decode(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    if isinstance(error, RecursionError) or not more():
                        raise TraceError(f"entry {number + 1}: not JSON: {error}") from None
            number += 1
            yield f"entry {number}", value
