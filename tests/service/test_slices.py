"""Work in slices: in order, with the loop free in between, and one failure ends one piece."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from lorrery.service.slices import Slices


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
