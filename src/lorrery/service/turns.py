"""Long work of coroutines on an event loop, in turns; one coroutine has its turn in each iteration of the loop.

`slices.py` does the same for work that no coroutine awaits.
"""

import asyncio
import time

TURN_SECONDS = 0.002
"""Length of a turn. Each turn is one loop iteration, and other work on the loop needs several of those."""


class Turns:
    """Lets coroutines with long work of one kind take turns with each other and with everything else on the loop.

    Args:
        seconds: length of a turn; the step under way at its end is completed.
    """

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self.seconds = seconds
        self._round = asyncio.Lock()

    def begin(self) -> "Turn":
        """Start the first turn of some work, now."""
        return Turn(self)

    async def next(self) -> None:
        """Return in a later loop iteration in which no other coroutine has a turn."""
        await asyncio.sleep(0)
        await self._round.acquire()
        asyncio.get_running_loop().call_soon(self._round.release)


class Turn:
    """The current turn of some work."""

    __slots__ = ("_turns", "_until")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._until = time.monotonic() + turns.seconds

    @property
    def is_over(self) -> bool:
        """Whether the turn is over."""
        return time.monotonic() >= self._until

    async def pass_on(self) -> None:
        """Let others run; return at the start of the next turn."""
        await self._turns.next()
        self._until = time.monotonic() + self._turns.seconds
