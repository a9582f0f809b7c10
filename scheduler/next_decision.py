"""When the next decision for a worker without a plan is due: in the loop's next turn, or at a given time.

Not at once, even if it idles: inputs that come together, such as the sequences of a lost worker, share one decision.
"""

import asyncio
import time
from collections.abc import Callable

from lorrery.service.clocks import DeviceClock


class NextDecision:
    """See the module.

    Args:
        clock: the device clock.
        decide: called with the time to decide at; must not raise.
    """

    def __init__(self, clock: DeviceClock, decide: Callable[[int], None]) -> None:
        self._clock = clock
        self._decide = decide
        self._until_ps: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    def soon(self, at_ps: int) -> None:
        """Decide soon, at this time, or at the awaited one if that is earlier: its timer may fire late."""
        if self._soon is None:
            until_ps = self._until_ps
            self.cancel()
            first_ps = at_ps if until_ps is None else min(at_ps, until_ps)
            self._soon = asyncio.get_running_loop().call_soon(self._decide, first_ps)

    def wait(self, until_ps: int | None) -> None:
        """Decide at this time; None: not before an input comes."""
        self._until_ps = until_ps
        if until_ps is not None:
            delay = self._clock.to_monotonic(until_ps) - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._decide, until_ps)

    def cancel(self) -> None:
        """Cancel the pending decision."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None
        self._until_ps = None
