"""Long work on an event loop, in slices, so that heartbeats on that loop are never delayed."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator

SLICE_SECONDS = 0.005


class Slices:
    """Does pieces of work one after another.

    Args:
        seconds: length of a slice; the step under way at its end is completed.
    """

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self.seconds = seconds
        self._works: deque[Iterator[None]] = deque()
        self._is_under_way = False

    @property
    def is_busy(self) -> bool:
        """Whether there is work left."""
        return self._is_under_way

    def do(self, work: Iterator[None]) -> None:
        """Exhaust an iterator with short steps; if no other work is pending, the first slice runs at once.

        A step may call this too. An exception ends this work only, and is raised here or in the loop.
        """
        self._works.append(work)
        if not self._is_under_way:
            self._do_slice()

    def _do_slice(self) -> None:
        self._is_under_way = True
        until = time.monotonic() + self.seconds
        works = self._works
        try:
            while works:
                for _ in works[0]:
                    if time.monotonic() >= until:
                        return
                works.popleft()
        except BaseException:
            works.popleft()
            raise
        finally:
            self._is_under_way = len(works) > 0
            if works:
                asyncio.get_running_loop().call_soon(self._do_slice)
