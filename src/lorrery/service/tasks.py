"""Tasks that run and end together, and long work on an event loop, of which nothing else on that loop is delayed.

Such work is done in slices where no coroutine awaits it, and otherwise in turns: one coroutine has its turn in each
iteration of the loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines together until one of them returns or raises, then cancel the others.

    Not a TaskGroup: until Python 3.13 one that is already ending drops a cancellation from outside, and a loop around
    it would never end.

    Raises:
        BaseExceptionGroup: the exceptions of the coroutines, if any.
        CancelledError: the calling task was cancelled, also if that was while the others were ending.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    cancellation = await _wait(tasks, asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        cancellation = await _wait(tasks, asyncio.ALL_COMPLETED) or cancellation
    # Retrieved even if not raised: asyncio would log an exception that was never retrieved.
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if cancellation is not None:
        raise cancellation
    if errors:
        raise BaseExceptionGroup("of tasks that run together", errors)


async def _wait(tasks: list[asyncio.Task[None]], when: str) -> asyncio.CancelledError | None:
    """Wait for the tasks; return the cancellation of the calling task, if it was cancelled meanwhile."""
    try:
        await asyncio.wait(tasks, return_when=when)
    except asyncio.CancelledError as cancellation:
        return cancellation
    return None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop of a process; None: asyncio's own, since uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


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
