"""Calls back at a time of the monotonic clock, as exactly as the platform allows.

uvloop's timers have millisecond resolution, so a step's end would be noticed half a millisecond late on average. Linux'
timerfd has nanosecond resolution and is an ordinary file to an event loop. Without timerfd, or on a loop other than
uvloop, such as one with virtual time in tests, the loop's own timers are used.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1  # Linux, include/uapi/linux/time.h; what `time.monotonic()` reads
_TFD_TIMER_ABSTIME = 1  # include/uapi/linux/timerfd.h
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_EXPIRATIONS_BYTES = 8  # timerfd_create(2): a read returns the number of expirations, a 64-bit number


class Alarm(Protocol):
    """Calls back once for each time that is set."""

    def set(self, at_seconds: float) -> None:
        """Call back at this time of `time.monotonic()`, soon if it has passed; replaces the time set before."""
        ...

    def clear(self) -> None:
        """Cancel the pending callback."""
        ...

    def close(self) -> None:
        """Never call back again; `set` has no effect from here on."""
        ...


def open_alarm(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Alarm:
    """Return an alarm that calls `ring` in a loop; it may ring early, by the resolution of the loop's timers."""
    if type(loop).__module__.partition(".")[0] == "uvloop":
        with contextlib.suppress(AttributeError, OSError):  # libc lacks timerfd, or no file descriptor is available
            return _TimerFile(loop, ring)
    return _LoopTimer(loop, ring)


class _LoopTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def set(self, at_seconds: float) -> None:
        self.clear()
        if self._closed:
            return
        # Whole milliseconds, rounded up: event loops have no finer timers, and rounding down would spin.
        delay_seconds = math.ceil((at_seconds - time.monotonic()) * 1e3) / 1e3
        self._timer = self._loop.call_later(max(0.0, delay_seconds), self._ring)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self.clear()
        self._closed = True


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _TimerFile:
    """An alarm based on timerfd(2); Python has it in `os` from 3.13 on.

    The event loop may have queued the reader's callback before the alarm is cleared or set again. The read then fails,
    because the old expiration is no longer in the file.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._timerfd_settime = libc.timerfd_settime
        self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._spec = _Itimerspec()
        self._pointer = ctypes.byref(self._spec)
        self._loop, self._ring = loop, ring
        self._armed = False
        try:
            loop.add_reader(self._file, self._expired)
        except BaseException:
            os.close(self._file)
            raise

    def set(self, at_seconds: float) -> None:
        if self._file >= 0:
            self._armed = True
            self._settime(max(1, math.ceil(at_seconds * 1e9)))

    def clear(self) -> None:
        if self._armed:
            self._armed = False
            self._settime(0)

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file, self._armed = -1, False

    def _expired(self) -> None:
        if self._file < 0:
            return
        try:
            os.read(self._file, _EXPIRATIONS_BYTES)
        except BlockingIOError:
            return
        self._armed = False
        self._ring()

    def _settime(self, at_ns: int) -> None:
        """Set the timer to a time in nanoseconds; 0 disarms it."""
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(at_ns, 1_000_000_000)
        if self._timerfd_settime(self._file, _TFD_TIMER_ABSTIME, self._pointer, None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
