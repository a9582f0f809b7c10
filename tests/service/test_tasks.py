import asyncio

import pytest

from lorrery.service.tasks import until_first_ends


class SlowToEnd:
    """Runs until cancelled, and then until it is let go."""

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.let_go = asyncio.Event()

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.let_go.wait()


async def returns() -> None:
    return


async def raises() -> None:
    raise ZeroDivisionError


async def test_the_first_to_return_ends_the_others():
    slow = SlowToEnd()
    slow.let_go.set()
    await until_first_ends(slow.run(), returns())
    assert slow.ending.is_set()


async def test_the_first_to_raise_ends_the_others():
    slow = SlowToEnd()
    slow.let_go.set()
    with pytest.raises(ExceptionGroup) as caught:
        await until_first_ends(slow.run(), raises())
    assert caught.group_contains(ZeroDivisionError)
    assert slow.ending.is_set()


@pytest.mark.parametrize("first", [returns, raises])
async def test_a_cancellation_while_the_others_end_is_not_lost(first):
    slow = SlowToEnd()
    task = asyncio.create_task(until_first_ends(slow.run(), first()))
    await slow.ending.wait()
    task.cancel()
    slow.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_while_ending_beside_a_cancellation_is_not_logged_as_one_that_nobody_has_seen():
    slow, failed = SlowToEnd(), []

    async def fails_as_it_ends() -> None:
        try:
            await slow.run()
        finally:
            failed.append(asyncio.current_task())
            raise ZeroDivisionError

    task = asyncio.create_task(until_first_ends(fails_as_it_ends(), returns()))
    await slow.ending.wait()
    task.cancel()
    slow.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not failed[0]._log_traceback  # which asyncio looks at when a task is forgotten
