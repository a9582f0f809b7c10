"""Work in slices: in order, with the loop free in between, and one failure ends one piece.

Long work on a loop: how many steps pass before everything else has its turn.
"""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from lorrery.service.tasks import Slices, Turns, until_first_ends


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


async def test_short_work_is_done_at_once_and_long_work_lets_the_loop_go_on() -> None:
    done: list[str] = []

    def work(name: str, num_steps: int) -> Iterator[None]:
        for step in range(num_steps):
            done.append(f"{name}{step}")
            yield

    Slices(seconds=60).do(work("a", 3))
    assert done == ["a0", "a1", "a2"]
    done.clear()
    slices = Slices(seconds=0)
    slices.do(work("b", 3))
    slices.do(work("c", 1))
    assert done == ["b0"]
    for _ in range(6):
        await asyncio.sleep(0)
        done.append("loop")
    assert [what for what in done if what != "loop"] == ["b0", "b1", "b2", "c0"]
    assert all(one != other for one, other in itertools.pairwise(done[:6]))


async def test_a_step_may_bring_further_work() -> None:
    done: list[str] = []
    slices = Slices(seconds=60)

    def work(name: str) -> Iterator[None]:
        for step in range(2):
            done.append(f"{name}{step}")
            if name == "a":
                slices.do(work("b"))
            yield

    slices.do(work("a"))
    assert done == ["a0", "a1", "b0", "b1", "b0", "b1"]


async def test_what_raises_ends_and_what_comes_behind_it_goes_on() -> None:
    done: list[int] = []

    def broken() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    def whole() -> Iterator[None]:
        done.append(1)
        yield

    slices = Slices(seconds=0)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
    slices.do(broken())
    slices.do(whole())
    for _ in range(4):
        await asyncio.sleep(0)
    assert done == [1]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        Slices(seconds=60).do(broken())


class Work:
    """Takes steps, and passes its turn on after each that has used it up; notes in which round of the loop."""

    def __init__(self, turns: Turns, rounds: "Rounds", num_steps: int) -> None:
        self._turns, self._rounds, self._num_steps = turns, rounds, num_steps
        self.at: list[int] = []

    async def run(self) -> None:
        turn = self._turns.begin()
        for _ in range(self._num_steps):
            self.at.append(self._rounds.number)
            if turn.is_over:
                await turn.pass_on()


class Rounds:
    """Counts the rounds of the loop."""

    def __init__(self) -> None:
        self.number = 0

    async def run(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)


async def rounds_of(turns: Turns, num_works: int, num_steps: int) -> list[list[int]]:
    rounds = Rounds()
    counting = asyncio.create_task(rounds.run())
    works = [Work(turns, rounds, num_steps) for _ in range(num_works)]
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work.run())
    counting.cancel()
    return [work.at for work in works]


async def test_short_work_keeps_its_turn() -> None:
    assert await rounds_of(Turns(1e9), 1, 100) == [[1] * 100]


async def test_a_turn_that_is_over_lets_the_loop_go_on() -> None:
    (at,) = await rounds_of(Turns(0.0), 1, 20)
    assert len(set(at)) == 20


async def test_one_of_many_goes_on_in_each_round_and_none_is_left_behind() -> None:
    first, second, third = await rounds_of(Turns(0.0), 3, 20)
    later = first[1:] + second[1:] + third[1:]
    assert len(set(later)) == len(later)
    assert max(first[-1], second[-1], third[-1]) - min(first[-1], second[-1], third[-1]) <= 6


async def test_work_that_is_given_up_while_it_waits_keeps_nobody_from_theirs() -> None:
    turns = Turns(0.0)

    async def endless() -> None:
        turn = turns.begin()
        while True:
            await turn.pass_on()

    tasks = [asyncio.create_task(endless()) for _ in range(3)]
    for task in tasks:
        await turns.next()
        task.cancel()
    await asyncio.wait(tasks)
    (at,) = await rounds_of(turns, 1, 5)
    assert len(set(at)) == 5
