"""Standard streams that are closed, before a process's first write or while it runs.

Streams closed by the parent process (`>&-`, some supervisors) become the null device. Otherwise the next file or socket
would get the number of one of them, and with it what others write there; libuv aborts when it closes such a number, and
Python has no object for the stream (`sys.stderr` is None).

A reader that goes away (`| head`) is not an error: later output is dropped, and the exit code is that of the work. A
program that works for the reader only checks `reader_has_gone`, and stops.

A log that cannot be written (a full disk) does not end a process either: lost lines are counted, and the next line that
can be written reports their number. Standard error is a log; standard output is one if the program calls
`treat_as_log`. Otherwise it is a command's result, whose loss is an error.

A character that the output's encoding lacks (PYTHONIOENCODING=ascii) is written as an escape, not an error.

Entry points call `set_up_standard_streams` before their first import that opens anything; therefore this file imports
nothing slow.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_without_reader: set[int] = set()
_logs = {2}
_num_lost: dict[int, int] = {}


def set_up_standard_streams() -> None:
    """Open each closed standard stream on the null device, and let output survive the loss of its reader."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115  for good
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)


def reader_has_gone(stream: TextIO) -> bool:
    """Return whether a write to a standard stream has failed because its reader is gone."""
    return bool(_without_reader) and stream.fileno() in _without_reader


def treat_as_log(stream: TextIO) -> None:
    """From now on, drop writes to a standard stream that fail, as for standard error."""
    _logs.add(stream.fileno())


def num_lost_writes(stream: TextIO) -> int:
    """Return the number of writes to a log that were lost since the last successful one."""
    return _num_lost.get(stream.fileno(), 0) if _num_lost else 0


class _Output(io.FileIO):
    """A standard stream that becomes the null device when its reader is gone, and may lose lines if it is a log."""

    _in_line = False

    def write(self, content: "ReadableBuffer") -> int:
        if self.fileno() not in _logs:
            return self._write(content)
        wanted = memoryview(content).nbytes
        try:
            if self._in_line and self.fileno() in _num_lost:  # end the line that found room for its beginning only
                self._write(b"\n")
            written = self._write(content)
        except OSError:
            written = None
        if written is None:  # no room, or a pipe that does not wait, is full
            _num_lost[self.fileno()] = _num_lost.get(self.fileno(), 0) + 1
            return wanted
        self._in_line = bytes(memoryview(content)[written - 1 : written]) != b"\n"
        _num_lost.pop(self.fileno(), None)
        return written

    def _write(self, content: "ReadableBuffer") -> int:
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
