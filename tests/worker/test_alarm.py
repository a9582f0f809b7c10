"""Alarms ring at their time, on either kind of event loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lorrery.worker.alarm import Alarm, open_alarm

pytestmark = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Bell:
    """An alarm and when it has rung."""

    def __init__(self) -> None:
        self.rung_at: list[float] = []
        self.again_in: list[float] = []
        self._heard = asyncio.Event()
        self.alarm: Alarm = open_alarm(asyncio.get_running_loop(), self._ring)

    def _ring(self) -> None:
        self.rung_at.append(time.monotonic())
        self._heard.set()
        if self.again_in:
            self.alarm.set(time.monotonic() + self.again_in.pop())

    async def heard(self) -> float:
        async with asyncio.timeout(10):
            await self._heard.wait()
        self._heard.clear()
        return self.rung_at[-1]


def test_rings_once_and_not_before_its_time(new_loop: NewLoop) -> None:
    async def main() -> None:
        first, second = Bell(), Bell()
        due = time.monotonic() + 0.0103
        first.alarm.set(due)
        second.alarm.set(due + 0.02)
        assert await first.heard() >= due
        assert await second.heard() >= due + 0.02
        assert len(first.rung_at) == len(second.rung_at) == 1

    run(new_loop, main())


def test_a_time_that_has_passed_rings_soon(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        for past_seconds in (0.0, 1.0, time.monotonic()):
            bell.alarm.set(time.monotonic() - past_seconds)
            await bell.heard()
        assert len(bell.rung_at) == 3

    run(new_loop, main())


def test_the_last_time_set_counts(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        bell.alarm.set(time.monotonic() + 0.002)
        due = time.monotonic() + 0.02
        bell.alarm.set(due)
        assert await bell.heard() >= due
        bell.alarm.set(time.monotonic() + 3600)
        bell.alarm.set(time.monotonic() + 0.002)
        await bell.heard()
        assert len(bell.rung_at) == 2

    run(new_loop, main())


def test_may_be_set_again_while_it_rings(new_loop: NewLoop) -> None:
    async def main() -> None:
        bell = Bell()
        bell.again_in = [0.002] * 3
        bell.alarm.set(time.monotonic())
        while len(bell.rung_at) < 4:
            await bell.heard()
        assert not bell.again_in

    run(new_loop, main())


def test_cleared_or_closed_it_never_rings(new_loop: NewLoop) -> None:
    async def main() -> None:
        cleared, closed, later = Bell(), Bell(), Bell()
        cleared.alarm.set(time.monotonic() + 0.002)
        cleared.alarm.clear()
        closed.alarm.set(time.monotonic() + 0.002)
        closed.alarm.close()
        closed.alarm.close()
        later.alarm.set(time.monotonic() + 0.01)
        await later.heard()
        assert not cleared.rung_at
        assert not closed.rung_at

    run(new_loop, main())


def test_closed_it_leaves_no_file(new_loop: NewLoop) -> None:
    async def main() -> None:
        bells = [Bell() for _ in range(20)]
        num_open = num_files()
        for bell in bells:
            bell.alarm.close()
        opened = num_open - num_files()
        assert opened == (20 if new_loop is uvloop.new_event_loop else 0)

    run(new_loop, main())
