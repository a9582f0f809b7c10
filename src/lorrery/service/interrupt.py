"""Signal handling of a process before, during and after its event loop.

By default Python answers Ctrl-C with a traceback of whatever was being imported, and ignores SIGTERM as PID 1. Entry
points call `exit_on_signals` before their first slow import; therefore this file imports nothing slow.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

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
