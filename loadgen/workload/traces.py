"""Recognises what a file is by its header or keys, and reads it: the one way into a workload from a file.

Files of recorded requests have times and lengths (`csv_rows`, `json_rows`); conversations have texts (`conversations`).
A file is read once, piece by piece, so that it may be larger than memory, or come through a pipe.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TextIO

from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.conversations import Conversations, list_key
from lorrery.loadgen.workload.csv_rows import CSV_FORMS, CsvForm, read_table, split
from lorrery.loadgen.workload.json_rows import JSON_FORMS, JsonForm
from lorrery.loadgen.workload.pieces import Pieces
from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.spool import Spool

__all__ = ["Trace", "read_requests"]

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
        if (found := list_key(entry)) is not None:
            self._key, self.title = found
            self.has_times = False
            return
        keys = entry if isinstance(entry, Mapping) else ()
        self._form = next((one for one in JSON_FORMS if one.key in keys), None)
        if self._form is None:
            raise TraceError(_unknown(where, str(entry)))
        self.title, self.attribution = self._form.title, self._form.attribution

    def requests(self, most: int | None = None, block_tokens: int | None = None) -> WorkloadColumns:
        """Read the recorded requests, of a file that `has_times`; once.

        Args:
            most: rows to read; None: all.
            block_tokens: of a prompt's blocks; None: what the rows say.

        Raises:
            TraceError: a row that does not parse, no row, or `block_tokens` for rows without blocks.
        """
        if self._table is not None:
            form, header = self._table
            rows = RecordedRows(
                1e9 if form.per_second is None else form.per_second, block_tokens, most, spool=self._spool
            )
            if num_failed := read_table(form, header, self._lines, rows):
                self.remarks.append(f"left out: {num_failed:,} with 0 output tokens, which failed when recorded")
        else:
            assert self._form is not None, "conversations have no times"
            rows = RecordedRows(self._form.per_second, block_tokens, most, self._form.block_tokens, self._spool)
            for where, entry in self._entries:
                if rows.is_full:
                    break
                if not isinstance(entry, Mapping):
                    raise TraceError(f"{where}: expected an object, found {str(entry)[:_SHOWN]}")
                self._form.add(rows, where, entry)
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
    keys = ", ".join(form.key for form in JSON_FORMS)
    return (
        f"{where}: no known form of trace; it begins with {text[:_SHOWN]!r}. Known are tables with the columns"
        f" {tables}, and JSON with the keys {keys}, conversations, conversation or messages (docs/load.md). Read"
        " any other in Python, and give its columns to lorrery.Requests (docs/simulator.md)"
    )
