"""Ends a call of a policy that does not return, and says which.

A timer ticks each second. Its signal's handler reads the stack, in which the policy's call is the outermost frame that
is not of this tree. If that is the same call for `MOST_TICKS` ticks, the handler raises in it. So calls cost nothing,
and any method counts.

A call in C (`sum(itertools.count())`) runs no handler, and one that catches `BaseException` in its loop goes on: such a
process is ended from outside. In another than the main thread nothing is watched, since Python runs handlers there.
"""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

TICK_SECONDS = 1.0
MOST_TICKS = 10

T = TypeVar("T")


class NeverReturnedError(BaseException):
    """A call of a policy was ended; says which. No `Exception`, so that neither core nor policy goes on after it."""


def until_stuck(run: Callable[[], T]) -> T:
    """Run a case.

    Raises:
        NeverReturnedError: one call of a policy took `MOST_TICKS` ticks.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()
    base = sys._getframe()  # noqa: SLF001  the end of the part of the stack that is looked at
    last: FrameType | None = None
    num_ticks = 0

    def look(_number: int, frame: FrameType | None) -> None:
        nonlocal last, num_ticks
        called = _call_of_policy(frame, base)
        num_ticks = num_ticks + 1 if called is not None and called is last else 0
        last = called
        if called is not None and num_ticks >= MOST_TICKS:
            num_ticks = 0
            code = called.f_code
            raise NeverReturnedError(
                f"`{code.co_name}` did not return within {MOST_TICKS * TICK_SECONDS:g} s, and was in"
                f" {Path(code.co_filename).name}, line {called.f_lineno}; it must return, as the worker waits for it"
            )

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        return run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        last = None


def _call_of_policy(frame: FrameType | None, base: FrameType) -> FrameType | None:
    found: FrameType | None = None
    while frame is not None and frame is not base:
        if not str(frame.f_globals.get("__name__", "")).startswith("lorrery."):
            found = frame
        frame = frame.f_back
    return found
