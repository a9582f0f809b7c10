"""What signals do to a process, before its event loop runs, while it runs, and after it.

Python's own answer to Ctrl-C is a traceback of whatever was being imported, and as PID 1 it ignores SIGTERM. Entry
points call `exit_on_signals` before their first slow import; this file therefore imports nothing slow.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NO_SCHEDULER_TO_COME = signal.SIGUSR1
"""Tells a router that no scheduler is to come, so that no request waits for one."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return what asks a process that runs until it is stopped to stop: a terminal that goes away too, but not nohup's.

    nohup lets its program ignore SIGHUP, which a handler would undo.
    """
    return SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*SIGNALS, signal.SIGHUP)


def exit_on_signals() -> None:
    """Let SIGINT and SIGTERM end the process at once and without a word, with 128 + n; what routers are told, not."""
    for number in SIGNALS:
        signal.signal(number, _exit)
    signal.signal(NO_SCHEDULER_TO_COME, _pass)


def _pass(number: int, _frame: object) -> None:
    """Do nothing; unlike SIG_IGN no other program that is started from here inherits it."""


def _exit(number: int, _frame: object) -> None:
    # Not SystemExit: raised in the midst of an import it may be caught, or be told as an error.
    os._exit(128 + number)


@contextlib.contextmanager
def handled_by(
    loop: "asyncio.AbstractEventLoop",
    on_signal: Callable[[signal.Signals], None],
    numbers: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Let the running loop call `on_signal` for these signals; then put back what was before, as asyncio does not."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
