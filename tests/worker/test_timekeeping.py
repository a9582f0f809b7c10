"""Timers ring at their time, on either kind of event loop."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lorrery.worker.timekeeping import Timer, open_timer

pytestmark = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Bell:
    """A timer and when it has rung."""

    def __init__(self) -> None:
        self.rung_at: list[float] = []
        self.again_in: list[float] = []
        self.and_then: Callable[[], None] | None = None
        self._heard = asyncio.Event()
        self.timer: Timer = open_timer(asyncio.get_running_loop(), self._ring)

    def _ring(self) -> None:
        self.rung_at.append(time.monotonic())
        self._heard.set()
        if self.again_in:
            self.timer.set(time.monotonic() + self.again_in.pop())
        if self.and_then is not None:
            self.and_then()

    async def heard(self) -> float:
        async with asyncio.timeout(60):
            await self._heard.wait()
        self._heard.clear()
        return self.rung_at[-1]


def test_rings_once_and_not_before_its_time(new_loop: NewLoop) -> None:
    async def main() -> None:
        first, second = Bell(), Bell()
        due = time.monotonic() + 0.0103
        first.timer.set(due)
        second.timer.set(due + 0.02)
        assert await first.heard() >= due
        assert await second.heard() >= due + 0.02
        assert len(first.rung_at) == len(second.rung_at) == 1

    run(new_loop, main())


def test_a_time_that_has_passed_rings_soon(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        for past_seconds in (0.0, 1.0, time.monotonic()):
            bell.timer.set(time.monotonic() - past_seconds)
            await bell.heard()
        assert len(bell.rung_at) == 3

    run(new_loop, main())


def test_the_last_time_set_counts(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        bell.timer.set(time.monotonic() + 0.002)
        due = time.monotonic() + 0.02
        bell.timer.set(due)
        assert await bell.heard() >= due
        bell.timer.set(time.monotonic() + 3600)
        bell.timer.set(time.monotonic() + 0.002)
        await bell.heard()
        assert len(bell.rung_at) == 2

    run(new_loop, main())


def test_may_be_set_again_while_it_rings(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        bell.again_in = [0.002] * 3
        bell.timer.set(time.monotonic())
        while len(bell.rung_at) < 4:
            await bell.heard()
        assert not bell.again_in

    run(new_loop, main())


def test_cleared_or_closed_it_never_rings(new_loop: NewLoop) -> None:
    async def main() -> None:
        cleared, closed, later = Bell(), Bell(), Bell()
        cleared.timer.set(time.monotonic() + 0.002)
        cleared.timer.clear()
        closed.timer.set(time.monotonic() + 0.002)
        closed.timer.close()
        closed.timer.close()
        later.timer.set(time.monotonic() + 0.01)
        await later.heard()
        assert not cleared.rung_at
        assert not closed.rung_at

    run(new_loop, main())


@pytest.mark.parametrize(
    "act", [lambda timer: timer.clear(), lambda timer: timer.close(), lambda timer: timer.set(time.monotonic() + 3600)]
)
def test_what_is_done_once_it_is_due_holds_though_the_loop_has_seen_it_expire(
    act: Callable[[Timer], None], new_loop: NewLoop
) -> None:
    """Both timers are due when the loop looks, and the first to ring acts on the other."""

    async def main() -> None:
        bells = Bell(), Bell()
        for bell, other in (bells, bells[::-1]):
            bell.and_then = partial(act, other.timer)
            bell.timer.set(time.monotonic())
        later = Bell()
        later.timer.set(time.monotonic() + 0.01)
        await later.heard()
        assert sorted(len(bell.rung_at) for bell in bells) == [0, 1]

    run(new_loop, main())


def test_set_anew_once_it_is_due_it_rings_at_the_new_time(new_loop: NewLoop) -> None:
    async def main() -> None:
        bells = Bell(), Bell()
        due: list[float] = []

        def put_off(other: Bell) -> None:
            if not due:
                due.append(time.monotonic() + 0.01)
                other.timer.set(due[0])

        for bell, other in (bells, bells[::-1]):
            bell.and_then = partial(put_off, other)
            bell.timer.set(time.monotonic())
        for bell in bells:
            await bell.heard()
        assert [len(bell.rung_at) for bell in bells] == [1, 1]
        assert max(bell.rung_at[0] for bell in bells) >= due[0]

    run(new_loop, main())


def test_a_ring_that_raises_is_not_repeated(new_loop: NewLoop) -> None:
    async def main() -> None:
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
        bell, later = Bell(), Bell()
        error = RuntimeError("out of tune")

        def fail() -> None:
            raise error

        bell.and_then = fail
        bell.timer.set(time.monotonic())
        later.timer.set(time.monotonic() + 0.01)
        await later.heard()
        assert len(bell.rung_at) == 1
        assert raised == [error]

    run(new_loop, main())


def test_set_after_close_it_never_rings(new_loop: NewLoop) -> None:
    async def main() -> None:
        closed, later = Bell(), Bell()
        closed.timer.close()
        closed.timer.set(time.monotonic())
        closed.timer.clear()
        later.timer.set(time.monotonic() + 0.01)
        await later.heard()
        assert not closed.rung_at

    run(new_loop, main())


def test_a_loop_that_cannot_watch_it_leaves_no_file(new_loop: NewLoop) -> None:
    loop = new_loop()
    loop.close()
    num_open = num_files()
    with contextlib.suppress(RuntimeError):  # the loop is closed, as uvloop says at once
        open_timer(loop, lambda: None).close()
    assert num_files() == num_open


def test_closed_it_leaves_no_file(new_loop: NewLoop) -> None:
    async def main() -> None:
        bells = [Bell() for _ in range(20)]
        num_open = num_files()
        for bell in bells:
            bell.timer.close()
        opened = num_open - num_files()
        assert opened == (20 if new_loop is uvloop.new_event_loop else 0)

    run(new_loop, main())
