"""Recognises what a file is by its header or keys, and reads it: the one way into a workload from a file.

Files of recorded requests have times and lengths (`trace_formats`); conversations have texts (`conversations`).
A file is read once, piece by piece, so that it may be larger than memory, or come through a pipe.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, TextIO

import numpy as np

from lorrery.loadgen.workload.columns import Spool, WorkloadColumns
from lorrery.loadgen.workload.conversations import Conversations, list_key
from lorrery.loadgen.workload.log_formats import LOG_FORMS
from lorrery.loadgen.workload.metrics_range import TITLE as RANGE_TITLE
from lorrery.loadgen.workload.metrics_range import is_range, requests_of
from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.trace_formats import CSV_FORMS, JSON_FORMS, CsvForm, JsonForm, read_table, split

_READ: Final = 1 << 16
"""Characters of a read."""
_LONGEST: Final = 1 << 26
"""Characters of a line or an entry."""
_FORMS: Final = (*JSON_FORMS, *LOG_FORMS)
_BLANK: Final = re.compile(r"[ \t\r\n]*")


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


_SHOWN = 80


class Trace:
    """A file whose form is known, and of which nothing but the beginning is read.

    Attributes:
        title: of its form, for the reader of a report.
        attribution: author and licence, if the form is of one public trace.
        has_times: whether it has recorded requests; otherwise it has conversations.
        remarks: on what was read, after it was.

    Args:
        file: of text.
        spool: keeps block ids and texts; None: in memory.

    Raises:
        TraceError: no known form.
    """

    def __init__(self, file: TextIO, spool: Spool | None = None) -> None:
        self._spool = spool
        pieces = Pieces(file)
        self.attribution, self.has_times = "", True
        self.remarks: list[str] = []
        self._table: tuple[CsvForm, list[str]] | None = None
        self._form: JsonForm | None = None
        self._key = ""
        self._is_range = False
        if pieces.begin[0] in "[{":
            self._entries: Iterator[tuple[str, Any]] = pieces.entries()
            first = next(self._entries, None)
            if first is None:
                raise TraceError("there is no row and no conversation in it")
            self._entries = chain([first], self._entries)
            self._recognise_entry(*first)
        else:
            self._lines = pieces.lines()
            _, line = next(self._lines)
            header = split(line)
            form = next((one for one in CSV_FORMS if set(one.columns) <= set(header)), None)
            if form is None:
                raise TraceError(_unknown("line 1", line))
            self._table = form, header
            self.title, self.attribution = form.title, form.attribution

    def _recognise_entry(self, where: str, entry: object) -> None:
        keys = entry if isinstance(entry, Mapping) else {}
        self._form = next((one for one in _FORMS if (one.key in keys if one.fits is None else one.fits(keys))), None)
        if self._form is not None:
            self.title, self.attribution = self._form.title, self._form.attribution
            return
        if is_range(entry):
            self.title, self._is_range = RANGE_TITLE, True
            return
        if (found := list_key(entry)) is not None:
            self._key, self.title = found
            self.has_times = False
            return
        raise TraceError(_unknown(where, str(entry)))

    def requests(
        self, most: int | None = None, block_tokens: int | None = None, rng: np.random.Generator | None = None
    ) -> WorkloadColumns:
        """Read the recorded requests, of a file that `has_times`; once.

        Args:
            most: rows to read; None: all.
            block_tokens: of a prompt's blocks; None: what the rows say.
            rng: of times and lengths that a range of metrics leaves open; None: of a fixed seed.

        Raises:
            TraceError: a row that does not parse, no row, or `block_tokens` for rows without blocks.
        """
        if self._is_range:
            drawn, remarks = requests_of(self._entries, np.random.default_rng(0) if rng is None else rng, most)
            self.remarks += remarks
            return drawn
        if self._table is not None:
            form, header = self._table
            rows = RecordedRows(
                1e9 if form.per_second is None else form.per_second, block_tokens, most, spool=self._spool
            )
            read_table(form, header, self._lines, rows)
        else:
            assert self._form is not None, "conversations have no times"
            rows = RecordedRows(self._form.per_second, block_tokens, most, self._form.block_tokens, self._spool)
            for where, entry in self._entries:
                if rows.is_full:
                    break
                if not isinstance(entry, Mapping):
                    raise TraceError(f"{where}: expected an object, found {str(entry)[:_SHOWN]}")
                self._form.add(rows, where, entry)
        if rows.num_failed:
            why = " with 0 output tokens" if self._table is not None else ""
            rows.remark(f"left out: {rows.num_failed:,}{why}, which failed when recorded")
        self.remarks += rows.remarks
        if not len(rows):
            raise TraceError("there is no row after the header" if self._table is not None else "there is no row in it")
        columns = rows.columns()
        if rows.has_blocks:
            self.remarks.append(f"prompts in blocks of {rows.block_tokens()} tokens")
        elif block_tokens is not None:
            raise TraceError(f"--block-tokens {block_tokens}: no row has hash_ids, whose blocks these would be")
        if num_following := rows.num_following:
            self.remarks.append(f"sent after the answer to the one before of their session: {num_following:,}")
        return columns

    def conversations(self) -> Conversations:
        """Read the conversations, of a file without times; once.

        Raises:
            TraceError: an entry of another form.
        """
        assert not self.has_times
        found = Conversations(self._entries, self._key, self._spool)
        if found.num_other_parts:
            self.remarks.append(f"left out: {found.num_other_parts:,} parts of messages that are no text")
        return found


def read_requests(file: TextIO, most: int | None = None) -> WorkloadColumns:
    """Read a file of recorded requests of any known form; the first is sent at 0.

    Raises:
        TraceError: of no known form, of conversations, or a row that does not parse.
    """
    trace = Trace(file)
    if not trace.has_times:
        raise TraceError(f"{trace.title} have no times")
    return trace.requests(most)


def _unknown(where: str, text: str) -> str:
    tables = "; ".join(",".join(form.columns) for form in CSV_FORMS)
    keys = ", ".join(form.key for form in _FORMS)
    return (
        f"{where}: no known form of trace; it begins with {text[:_SHOWN]!r}. Known are tables with the columns"
        f" {tables}, and JSON with the keys {keys}, conversations, conversation, messages or data (docs/load.md). Read"
        " any other in Python, and give its columns to lorrery.Requests (docs/simulator.md)"
    )
