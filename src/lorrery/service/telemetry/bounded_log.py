"""A log for events that may happen a thousand times a second: the first of each kind in a second, then a count.

Costs at most two lines per second and kind; the program defines the few kinds.
"""

import asyncio

from structlog.typing import FilteringBoundLogger

WINDOW_SECONDS = 1.0


class BoundedLog:
    """Logs one event, at INFO.

    Args:
        log: the logger.
        event: its name; repetitions are reported as EVENT_again.
    """

    def __init__(self, log: FilteringBoundLogger, event: str) -> None:
        self._log = log
        self._event = event
        self._num_more: dict[str, int] = {}

    def say(self, kind: str, **fields: object) -> None:
        """Log an occurrence, or count it if one of its kind was logged within the last second."""
        if kind in self._num_more:
            self._num_more[kind] += 1
            return
        self._num_more[kind] = 0
        self._log.info(self._event, **fields)
        asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._end, kind)

    def _end(self, kind: str) -> None:
        num_more = self._num_more.pop(kind)
        if num_more:
            self._log.info(f"{self._event}_again", kind=kind, num=num_more)
