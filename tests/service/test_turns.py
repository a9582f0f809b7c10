"""Long work on a loop: how many steps pass before everything else has its turn."""

import asyncio

from lorrery.service.turns import Turns


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
