"""What a process does where its standard streams are closed, before its first write or while it runs.

Streams that the parent process has closed (`>&-`, some supervisors) become the null device. Otherwise the next file or
socket gets the number of one of them, and with it what others write there; libuv aborts as it closes such a number, and
Python has no object for the stream (`sys.stderr` is None).

A reader that goes away (`| head`) is no error: what is written after that goes nowhere, and the exit code is that of
the work. Who works for the reader alone asks `reader_has_gone`, and stops.

A character that the output's encoding lacks (PYTHONIOENCODING=ascii) is written as its number, not an error.

Entry points call `set_up_standard_streams` before their first import that opens anything; this file therefore imports
nothing slow.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_without_reader: set[int] = set()


def set_up_standard_streams() -> None:
    """Open each closed standard stream on the null device, and let output outlive its reader."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115  for good
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)


def reader_has_gone(stream: TextIO) -> bool:
    """Return whether what was written to a standard stream has found no reader."""
    return bool(_without_reader) and stream.fileno() in _without_reader


class _Output(io.FileIO):
    """A standard stream that becomes the null device when its reader has gone."""

    def write(self, content: "ReadableBuffer") -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            _without_reader.add(self.fileno())
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(content)


def _outliving(stream: "TextIO | None", number: int) -> TextIO:
    output = io.BufferedWriter(_Output(number, "w", closefd=False))
    if not isinstance(stream, io.TextIOWrapper):  # there was none
        return io.TextIOWrapper(output, encoding="utf-8", errors="backslashreplace")
    return io.TextIOWrapper(
        output,
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
