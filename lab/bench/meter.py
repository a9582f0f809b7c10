"""Resource use of a process: CPU time, and time spent waiting for a core.

CPU time is the kernel's clock of the whole process, in nanoseconds: clock_gettime of clock id (~pid << 3) | 2
(Linux, include/linux/posix-timers.h, MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED), readable for any process of the user.
Run-queue delay is the second field of /proc/PID/schedstat (Linux, Documentation/scheduler/sched-stats.rst), which
covers the main thread: in all our processes that of the event loop.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.8
"""Share of a core above which a client measures itself."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource use of one process over a window.

    Attributes:
        wall_seconds: length of the window.
        cpu_seconds: all threads, user and system.
        run_queue_delay_ratio: share of the window in which its event loop waited for a core; None if unknown.
    """

    wall_seconds: float
    cpu_seconds: float
    run_queue_delay_ratio: float | None

    @property
    def cpu_share(self) -> float:
        """Cores used, mean over the window."""
        return self.cpu_seconds / self.wall_seconds


class Meter:
    """Measures processes from its creation on.

    Args:
        pids: process ids by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._start = self._read()

    def read(self) -> dict[str, Usage]:
        """Return what each process has used since the beginning."""
        now = self._read()
        usage = {}
        for name, (wall, cpu, delay) in now.items():
            wall_before, cpu_before, delay_before = self._start[name]
            seconds = wall - wall_before
            ratio = None if delay is None or delay_before is None else (delay - delay_before) / seconds
            usage[name] = Usage(seconds, cpu - cpu_before, ratio)
        return usage

    def _read(self) -> dict[str, tuple[float, float, float | None]]:
        return {
            name: (time.monotonic(), cpu_seconds(pid), _run_queue_delay_seconds(pid))
            for name, pid in self._pids.items()
        }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _run_queue_delay_seconds(pid: int) -> float | None:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
