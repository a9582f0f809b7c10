"""What an entry point sets up before its first slow import: signals, standard streams, gRPC's environment.

Therefore this file imports nothing slow.

Signals. By default Python answers Ctrl-C with a traceback of whatever was being imported, and ignores SIGTERM as PID 1.

Streams closed by the parent process (`>&-`, some supervisors) become the null device. Otherwise the next file or socket
would get the number of one of them, and with it what others write there; libuv aborts when it closes such a number, and
Python has no object for the stream (`sys.stderr` is None).

A reader that goes away (`| head`) is not an error: later output is dropped, and the exit code is that of the work. A
program that works for the reader only checks `reader_has_gone`, and stops.

A log that cannot be written (a full disk) does not end a process either: lost lines are counted, and the next line that
can be written reports their number. Standard error is a log; standard output is one if the program calls
`treat_as_log`. Otherwise it is a command's result, whose loss is an error.

A character that the output's encoding lacks (PYTHONIOENCODING=ascii) is written as an escape, not an error.

gRPC's C core reads from the environment, and from nowhere else:

* Its verbosity: it logs remarks about others' connections, not as log events or JSON.
* Its event engine, whose poller and thread pool hand each message over between them. The older code, in which the
  thread that waits for events also polls, takes two thirds of the CPU time for a message that a server reads and one
  that it writes (four thread switches instead of seven), and less than two thirds for a message that a client reads
  (grpcio 1.85, Linux; docs/decisions.md). A version that does not know one of the experiments writes an error to
  standard error in each process, whatever its verbosity; so they are set only for versions that do.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

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


SIGNALS = (signal.SIGINT, signal.SIGTERM)
NO_SCHEDULER_TO_COME = signal.SIGUSR1
"""Tells a router that no scheduler will come, so that no request waits for one."""
ECHO_SECONDS = 0.05
"""Less than a person needs to press Ctrl-C again."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a long-running process; SIGHUP is among them unless it is ignored, as under nohup.

    nohup makes its program ignore SIGHUP, which a handler would undo.
    """
    return SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*SIGNALS, signal.SIGHUP)


def exit_on_signals() -> None:
    """Make SIGINT and SIGTERM exit at once and silently, with 128 + n; ignore `NO_SCHEDULER_TO_COME`."""
    for number in SIGNALS:
        signal.signal(number, _exit)
    signal.signal(NO_SCHEDULER_TO_COME, _pass)


def _pass(number: int, _frame: object) -> None:
    """Do nothing; unlike SIG_IGN this is not inherited by child programs."""


def _exit(number: int, _frame: object) -> None:
    # Not SystemExit: raised during an import it may be caught, or reported as an error.
    os._exit(128 + number)


def stop_then_exit(stop: Callable[[], None]) -> None:
    """Make the first SIGINT or SIGTERM call `stop`, and a second one exit at once with 128 + n.

    For a process without an event loop that may be in code which never returns. Echoes count as in `handled_by`.
    """
    last_at: dict[signal.Signals, float] = dict.fromkeys(SIGNALS, -math.inf)
    is_stopping = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal is_stopping
        name, now = signal.Signals(number), time.monotonic()
        is_echo, last_at[name] = now - last_at[name] < ECHO_SECONDS, now
        if is_echo:
            return
        if is_stopping:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar has hidden the cursor
            os._exit(128 + number)
        is_stopping = True
        stop()

    for number in SIGNALS:
        signal.signal(number, on_signal)


@contextlib.contextmanager
def handled_by(
    loop: "asyncio.AbstractEventLoop",
    on_signal: Callable[[signal.Signals], None],
    numbers: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Make the running loop call `on_signal` for these signals; then restore the previous handlers.

    coreutils' `timeout` sends its signal to the command and then to the command's group, so the command gets it twice.
    The same signal within `ECHO_SECONDS` is therefore no second one.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    last_at = dict.fromkeys(numbers, -math.inf)

    def on_each(number: signal.Signals) -> None:
        is_echo, last_at[number] = loop.time() - last_at[number] < ECHO_SECONDS, loop.time()
        if not is_echo:
            on_signal(number)

    for number in numbers:
        loop.add_signal_handler(number, on_each, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """Make each of `stop_signals` cancel the current task; yield the list of signals received.

    The first signal thus ends the run, and a second one ends the orderly stop.
    """
    import asyncio

    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    with handled_by(loop, on_signal, stop_signals()):
        yield received


KNOWN_GRPCIO = ("1.85",)
"""Versions of it with both experiments, and the methods that the server replaces. Tests check the installed
one (tests/service/test_grpc_environment.py, network/test_server.py)."""


def is_known_grpcio(version: str | None) -> bool:
    """Return whether a version is one of `KNOWN_GRPCIO`; None: unknown."""
    return version is not None and ".".join(version.split(".")[:2]) in KNOWN_GRPCIO


def grpc_variables(version: str | None) -> dict[str, str]:
    """Return the variables to set for a version of grpcio; None: unknown."""
    chosen = {"GRPC_VERBOSITY": "ERROR"}
    if is_known_grpcio(version):
        chosen["GRPC_EXPERIMENTS"] = "-event_engine_listener,-event_engine_client"
    return chosen


def grpcio_version() -> str | None:
    """Return grpcio's version without importing it; None: no installation record."""
    from importlib import metadata

    try:
        return metadata.version("grpcio")
    except metadata.PackageNotFoundError:
        return None


def set_up_grpc() -> None:
    """Set the variables that the environment lacks; call this before gRPC is imported."""
    for name, value in grpc_variables(grpcio_version()).items():
        os.environ.setdefault(name, value)
