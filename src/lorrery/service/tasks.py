"""The event loop of a process, and tasks that run and end together."""

import asyncio
from collections.abc import Callable, Coroutine
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
