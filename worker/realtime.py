"""Real-time priority for a worker's process, so that its GPUs keep time while other programs use the machine.

A GPU does not share the cores of its host, but the process that stands for it does, and is late by as long as it waits
for one. Linux runs a process under SCHED_RR before all ordinary ones; root may ask for that (CAP_SYS_NICE), and whoever
has a limit of real-time priorities (RLIMIT_RTPRIO, `ulimit -r`) of at least 1.

Who runs first must not run for long. A process that used more than `MOST_CPU` of a core since it was last looked at is
an ordinary one until it uses less than `LITTLE_CPU`. So workers too slow for their steps leave the cores to the
scheduler and the routers, and Linux itself leaves ordinary processes a twentieth of each second.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Final, Literal

from lorrery.service.errors import SettingsError
from lorrery.service.telemetry.log import get_logger

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
