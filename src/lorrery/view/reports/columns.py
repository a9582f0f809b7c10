"""Reads a CSV file column by column, a few megabytes at a time: a million requests in seconds, never the whole text.

Where a piece of the file has no quote, which is nearly everywhere, numpy finds the separators and converts digits of
all rows at once; the rest goes through `csv`. Both accept the same input and return the same result.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lorrery.service.errors import FormatError

__all__ = ["Rows", "read_header", "read_rows"]

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 22
_COMMA, _NEWLINE, _DOT, _ZERO = (ord(one) for one in ",\n.0")
_WIDEST, _WIDEST_DECIMAL = 18, 16
"""Most digits of an integer that 64 bits hold, and of a decimal that a float holds; `float` reads others."""

_WIDEST_TEXT = 256
_MULTIPLIERS = np.random.default_rng(0).integers(1, 1 << 63, _WIDEST_TEXT // 8, dtype=np.uint64) * 2 + 1


class Rows:
    """Some rows of the file, as text or as numbers, column by column.

    Args:
        first: number of the first row in the file, for messages.
        texts: columns of texts.
        buffer: instead of `texts`, the bytes of a piece without quotes.
        ends: shape (rows, columns), end of each field in the buffer.
    """

    def __init__(
        self,
        path: Path,
        first: int,
        *,
        texts: Sequence[Sequence[str]] = (),
        buffer: Bytes | None = None,
        ends: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._path, self._first, self._texts, self._buffer = path, first, texts, buffer
        self._size = len(texts[0]) if texts else 0
        self._ends: npt.NDArray[np.int64] = np.empty((0, 0), np.int64)
        self._starts: npt.NDArray[np.int64] = self._ends
        if ends is not None:
            self._size, self._ends = len(ends), ends
            self._starts = np.concatenate(([0], ends.ravel()[:-1] + 1)).reshape(ends.shape)

    def __len__(self) -> int:
        return self._size

    def floats(self, column: int) -> Floats:
        """Return a column of numbers; shape (rows,), NaN for empty fields.

        Raises:
            FormatError: not a number; names the line.
        """
        if self._buffer is not None and (quick := self._quick_floats(column)) is not None:
            return quick
        texts = self.texts(column)
        found = np.full(len(texts), np.nan)
        for row, text in enumerate(texts):
            if text:
                try:
                    found[row] = float(text)
                except ValueError:
                    line = self._first + row + 1
                    raise FormatError(f"{self._path}: line {line}: {text[:40]!r} is not a number") from None
        return found

    def texts(self, column: int, which: npt.NDArray[np.int64] | None = None) -> list[str]:
        """Return a column's texts, for all rows or for some."""
        rows = np.arange(self._size) if which is None else which
        if self._buffer is None:
            whole = self._texts[column]
            return [whole[row] for row in rows.tolist()]
        data = self._buffer.tobytes()
        bounds = zip(self._starts[rows, column].tolist(), self._ends[rows, column].tolist(), strict=True)
        return [data[start:end].decode("utf-8", "replace") for start, end in bounds]

    def codes(self, column: int, known: dict[str, int]) -> npt.NDArray[np.int32]:
        """Return a column of few distinct texts as indices into `known`, to which new texts are added."""
        if self._buffer is None:
            return np.array([known.setdefault(text, len(known)) for text in self._texts[column]], np.int32)
        starts, lengths = self._starts[:, column], self._ends[:, column] - self._starts[:, column]
        width = int(lengths.max(initial=0))
        if width == 0 or width > _WIDEST_TEXT:
            return np.array([known.setdefault(text, len(known)) for text in self.texts(column)], np.int32)
        padded = np.zeros((self._size, -(-width // 8) * 8), np.uint8)
        inside = np.arange(width) < lengths[:, None]
        padded[:, :width] = np.where(inside, _take(self._buffer, starts[:, None] + np.arange(width)), 0)
        # Each text as one number, which sorts ten times as fast; collisions are checked for.
        words = padded.view(np.uint64)
        keys = (words * _MULTIPLIERS[: words.shape[1]]).sum(axis=1)
        by_key = np.argsort(keys)
        starts = np.flatnonzero(np.concatenate(([True], keys[by_key[1:]] != keys[by_key[:-1]])))
        kind = np.empty(self._size, np.int64)
        kind[by_key] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, self._size)))
        first_rows = np.minimum.reduceat(by_key, starts)
        if not np.array_equal(words[first_rows][kind], words):
            return np.array([known.setdefault(text, len(known)) for text in self.texts(column)], np.int32)
        in_file = np.argsort(first_rows, kind="stable")
        codes = np.empty(len(first_rows), np.int32)
        codes[in_file] = [known.setdefault(name, len(known)) for name in self.texts(column, first_rows[in_file])]
        return codes[kind]

    def _quick_floats(self, column: int) -> Floats | None:
        """Convert plain decimals with the same number of decimals, as programs write them; None: some differ."""
        assert self._buffer is not None
        starts, ends = self._starts[:, column], self._ends[:, column]
        lengths = ends - starts
        width = int(lengths.max(initial=0))
        if not 0 < width <= _WIDEST:
            return np.full(self._size, np.nan) if width == 0 else None
        longest = int(np.argmax(lengths))
        text = self._buffer[starts[longest] : ends[longest]]
        points = np.flatnonzero(text == _DOT)
        after = width - 1 - int(points[0]) if len(points) == 1 else 0
        if len(points) and width > _WIDEST_DECIMAL:
            return None
        total, used = np.zeros(self._size, np.int64), np.zeros(self._size, np.int64)
        place = 1
        for back in range(width):
            here = lengths > back
            byte = _take(self._buffer, ends - 1 - back)
            if len(points) == 1 and back == after:
                if not np.array_equal(byte[here] == _DOT, np.ones(int(here.sum()), np.bool_)):
                    return None
                continue
            digit = byte.astype(np.int64) - _ZERO
            if ((digit < 0) | (digit > 9))[here].any():
                return None
            total += np.where(here, digit * place, 0)
            used += here
            place *= 10
        if len(points) == 1 and ((lengths > 0) & (lengths <= after)).any():
            return None  # a number without a point among others with one
        return np.where(used > 0, total / 10.0**after, np.nan)


def read_header(file: BinaryIO, path: Path) -> list[str]:
    """Read the names of the columns.

    Raises:
        FormatError: there are none.
    """
    line = file.readline().decode("utf-8-sig", "replace").strip("\r\n")
    names = next(csv.reader([line]), [])
    if not names:
        raise FormatError(f"{path}: the file is empty; run again with --out")
    return [name.strip() for name in names]


def read_rows(file: BinaryIO, path: Path, num_columns: int, cut: list[str]) -> Iterator[Rows]:
    """Read the rows after the header, some thousand at a time.

    Args:
        file: read up to the header's end.
        path: of the file, for messages.
        num_columns: of the header.
        cut: receives a message about an incomplete last line, as in a file that is still being copied.

    Raises:
        FormatError: a line has another number of fields.
    """
    rest, first = b"", 1
    while piece := file.read(PIECE_BYTES):
        piece = rest + piece
        end = _last_line_end(piece)
        piece, rest = piece[:end], piece[end:]
        if piece:
            rows = _rows(path, first, piece, num_columns)
            first += len(rows)
            yield rows
    if rest.strip():
        try:
            rows = _rows(path, first, rest + b"\n", num_columns)
        except FormatError:
            cut.append(f"{path.name} ends in the middle of line {first + 1}, which is left out: was it copied whole?")
        else:
            yield rows


def _last_line_end(piece: bytes) -> int:
    """Return where the last complete line ends; a line break between quotes ends none."""
    if b'"' not in piece:
        return piece.rfind(b"\n") + 1
    end = len(piece)
    while (end := piece.rfind(b"\n", 0, end)) >= 0:
        if piece.count(b'"', 0, end) % 2 == 0:
            return end + 1
    return 0


def _rows(path: Path, first: int, piece: bytes, num_columns: int) -> Rows:
    if b'"' not in piece and b"\r" not in piece:
        buffer = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero((buffer == _COMMA) | (buffer == _NEWLINE))
        if len(ends) % num_columns == 0:
            table = ends.reshape(-1, num_columns)
            newlines = buffer[table] == _NEWLINE
            if newlines[:, -1].all() and int(newlines.sum()) == len(table):
                return Rows(path, first, buffer=buffer, ends=table)
    lines = list(csv.reader(StringIO(piece.decode("utf-8", "replace"), newline="")))
    for number, line in enumerate(lines):
        if len(line) != num_columns:
            where = first + number + 1
            raise FormatError(f"{path}: line {where} has {len(line)} fields; the header names {num_columns}")
    return Rows(path, first, texts=list(zip(*lines, strict=True)) or [()] * num_columns)


def _take(buffer: Bytes, at: npt.NDArray[np.int64]) -> Bytes:
    """Look up bytes; indices outside the buffer are clipped, and their values never used."""
    return buffer.take(at, mode="clip")
