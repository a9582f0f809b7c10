"""Long work of coroutines on an event loop: each goes on for a turn, and one of them in each round of the loop.

`slices.py` does the same for work that no coroutine waits for.
"""

import asyncio
import time

TURN_SECONDS = 0.002
"""Of many turns each is a round of the loop, and what comes meanwhile needs several of these."""


class Turns:
    """Lets coroutines with long work of one kind take turns with one another, and with everything else on the loop.

    Args:
        seconds: how long a turn lasts, and the step that is under way then.
    """

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self.seconds = seconds
        self._round = asyncio.Lock()

    def begin(self) -> "Turn":
        """Return the first turn of some work, which is now."""
        return Turn(self)

    async def next(self) -> None:
        """Return in a later round of the loop, in which no other goes on."""
        await asyncio.sleep(0)
        await self._round.acquire()
        asyncio.get_running_loop().call_soon(self._round.release)


class Turn:
    """The turn that some work has now."""

    __slots__ = ("_turns", "_until")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._until = time.monotonic() + turns.seconds

    @property
    def is_over(self) -> bool:
        """Whether it is time to pass it on."""
        return time.monotonic() >= self._until

    async def pass_on(self) -> None:
        """Let others go on; return when it is this one's turn again."""
        await self._turns.next()
        self._until = time.monotonic() + self._turns.seconds
