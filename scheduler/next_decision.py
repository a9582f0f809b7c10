"""When a worker that has no plan is decided on next: in the loop's next turn, or when a time has come.

Not at once, even if it idles: what comes in together, such as the sequences of a lost worker, is decided on together.
"""

import asyncio
import time
from collections.abc import Callable

from lorrery.chassis.clock import DeviceClock


class NextDecision:
    """See the module.

    Args:
        clock: the device's.
        decide: gets the time to decide at; raises nothing.
    """

    def __init__(self, clock: DeviceClock, decide: Callable[[int], None]) -> None:
        self._clock = clock
        self._decide = decide
        self._until_ps: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    def soon(self, at_ps: int) -> None:
        """Decide soon, at this time, or at the one waited for if that comes first: its timer may fire late."""
        if self._soon is None:
            until_ps = self._until_ps
            self.cancel()
            first_ps = at_ps if until_ps is None else min(at_ps, until_ps)
            self._soon = asyncio.get_running_loop().call_soon(self._decide, first_ps)

    def wait(self, until_ps: int | None) -> None:
        """Decide when this time has come; None: not before something comes in."""
        self._until_ps = until_ps
        if until_ps is not None:
            delay = self._clock.to_monotonic(until_ps) - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._decide, until_ps)

    def cancel(self) -> None:
        """Do not decide by itself any more."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None
        self._until_ps = None
