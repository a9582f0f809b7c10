"""How a worker keeps time on a busy machine: exact timers, and real-time priority for its process.

A timer calls back at a time of the monotonic clock, as exactly as the platform allows. uvloop's timers have millisecond
resolution, so a step's end would be noticed half a millisecond late on average. Linux' timerfd has nanosecond
resolution and is an ordinary file to an event loop. Without timerfd, or on a loop other than uvloop, such as one with
virtual time in tests, the loop's own timers are used.

A GPU does not share the cores of its host, but the process that stands for it does, and is late by as long as it waits
for one. Linux runs a process under SCHED_RR before all ordinary ones; root may ask for that (CAP_SYS_NICE), and whoever
has a limit of real-time priorities (RLIMIT_RTPRIO, `ulimit -r`) of at least 1. A process that runs first must not run
for long. One that used more than `MOST_CPU` of a core since the last look is an ordinary one until it uses less than
`LITTLE_CPU`. So workers too slow for their steps leave the cores to the scheduler and the routers, and Linux itself
leaves ordinary processes a twentieth of each second.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

from lorrery.service.errors import SettingsError
from lorrery.service.telemetry.log import get_logger

_CLOCK_MONOTONIC = 1  # Linux, include/uapi/linux/time.h; what `time.monotonic()` reads
_TFD_TIMER_ABSTIME = 1  # include/uapi/linux/timerfd.h
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_EXPIRATIONS_BYTES = 8  # timerfd_create(2): a read returns the number of expirations, a 64-bit number


class Timer(Protocol):
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


def open_timer(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Timer:
    """Return a timer that calls `ring` in a loop; it may ring early, by the resolution of the loop's timers."""
    if type(loop).__module__.partition(".")[0] == "uvloop":
        with contextlib.suppress(AttributeError, OSError):  # libc lacks timerfd, or no file descriptor is available
            return _TimerFd(loop, ring)
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


class _TimerFd:
    """A timer based on timerfd(2); Python has it in `os` from 3.13 on.

    The event loop may have queued the reader's callback before the timer is cleared or set again. The read then fails,
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


log = get_logger("worker")

MOST_CPU, LITTLE_CPU = 0.25, 0.125
"""Shares of a core. Eight GPUs with steps of 30 ms take 0.06; with four such processes on two cores half is left."""
_LOOK_SECONDS: Final = 1.0
_PRIORITY: Final = 1  # the lowest; those above are for the machine's own needs
_THREADS: Final = Path("/proc/self/task")


class RealtimePriority:
    """The priority of this process, real-time from here on.

    Raises:
        OSError: the kernel does not grant it, or has none.
    """

    def __init__(self) -> None:
        self._is_realtime = False
        self._take()

    async def keep(self) -> None:
        """Give the priority back while the process takes much CPU; runs until cancelled."""
        while True:
            cpu_before, before = time.process_time(), time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
            self.adjust((time.process_time() - cpu_before) / (time.monotonic() - before))

    def adjust(self, cpu_share: float) -> None:
        """Give the priority back, or take it again, according to the share of a core used lately."""
        if self._is_realtime and cpu_share > MOST_CPU:
            _schedule_threads(os.SCHED_OTHER, 0)
            self._is_realtime = False
            log.info("realtime_priority_returned", cpu_share=round(cpu_share, 3), at_most=MOST_CPU)
        elif not self._is_realtime and cpu_share < LITTLE_CPU:
            with contextlib.suppress(OSError):  # no longer granted: the limit was lowered from outside
                self._take()

    def _take(self) -> None:
        _schedule_threads(os.SCHED_RR, _PRIORITY)
        self._is_realtime = True
        log.info("realtime_priority_taken")


def take_realtime_priority(wanted: Literal["auto", "required", "off"]) -> RealtimePriority | None:
    """Return this process's real-time priority, as the setting `worker.realtime` has it; None: an ordinary process.

    Raises:
        SettingsError: it is required and not granted.
    """
    if wanted == "off":
        return None
    try:
        return RealtimePriority()
    except (OSError, AttributeError) as error:  # AttributeError: a system without POSIX scheduling, such as macOS
        if wanted == "required":
            reason = error.strerror if isinstance(error, OSError) else "this system has none"
            raise SettingsError(
                f"worker.realtime: no real-time priority, which 'required' asks for: {reason}; allow it with ulimit -r"
                " 1, Docker's --ulimit rtprio=1 or CAP_SYS_NICE, or set 'auto'"
            ) from None
        return None


def _schedule_threads(policy: int, priority: int) -> None:
    """Set the scheduling of all threads of this process; one that starts later inherits that of its creator."""
    param = os.sched_param(priority)
    os.sched_setscheduler(0, policy, param)
    with contextlib.suppress(FileNotFoundError):  # no /proc
        for thread in _THREADS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setscheduler(int(thread.name), policy, param)
