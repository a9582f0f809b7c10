"""How busy the load generator itself was: a client that is short of CPU measures itself.

CPU share is process time (all threads, so above 1 is possible) / wall time. Run-queue delay is the time the event
loop's thread was ready but had no core (`/proc/self/schedstat`, second field, nanoseconds; Linux only).
"""

import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.8
"""CPU share of a core above which latencies are as much the client's as the cluster's."""

_SCHEDSTAT = Path("/proc/self/schedstat")
_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """The load generator's own load over a run.

    Attributes:
        cpu_share: cores used, mean over the run.
        peak_cpu_share: the largest over any window of about a second; the mean if there was no such window.
        run_queue_delay_ratio: share of the wall time spent waiting for a core; None if the kernel does not report it.
    """

    wall_seconds: float
    cpu_share: float
    peak_cpu_share: float
    run_queue_delay_ratio: float | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks that the figures must be read with."""
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used {self.cpu_share:.0%} of a core: these latencies are partly its own;"
                " lower the rate, or split the load over several processes"
            )
        elif self.peak_cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used up to {self.peak_cpu_share:.0%} of a core in a second: the tail of these"
                " latencies may be its own"
            )
        if self.run_queue_delay_ratio is not None and self.run_queue_delay_ratio > 0.1:
            found.append(
                f"the load generator waited for a core {self.run_queue_delay_ratio:.0%} of the time: this machine is"
                " too busy to measure on"
            )
        return tuple(found)


class OwnLoadMeter:
    """Measures from its creation or `restart`; call `sample` now and then, from the event loop's thread."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start measuring anew from now."""
        self._wall = self._window_wall = time.monotonic()
        self._cpu = self._window_cpu = time.process_time()
        self._delay = _run_queue_delay_seconds()
        self._peak = 0.0

    def sample(self) -> None:
        """Close the current window if it is a second old."""
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._window_wall >= _WINDOW_SECONDS:
            self._peak = max(self._peak, (cpu - self._window_cpu) / (wall - self._window_wall))
            self._window_wall, self._window_cpu = wall, cpu

    def read(self) -> OwnLoad:
        """Return the load since the start."""
        self.sample()
        wall = max(time.monotonic() - self._wall, 1e-9)
        share = (time.process_time() - self._cpu) / wall
        delay = _run_queue_delay_seconds()
        ratio = None if delay is None or self._delay is None else (delay - self._delay) / wall
        return OwnLoad(wall, share, max(self._peak, share), ratio)


def _run_queue_delay_seconds() -> float | None:
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
