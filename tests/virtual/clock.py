"""Virtual time: one event loop whose time jumps, and hosts on it, each with clocks of its own.

Time passes only while the loop waits, and a little while it works. What runs belongs to the host in whose context it
was begun; so a host can stop, be killed, or have a clock that jumps, and no code of a service knows.
"""

import asyncio
import contextlib
import random
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any
from uuid import UUID

import pytest

START_SECONDS = 1000.0
WALL_NS = 1_700_000_000 * 10**9

HOST: ContextVar["Host | None"] = ContextVar("host", default=None)


class VirtualTime(selectors.BaseSelector):
    """Time that passes only while the loop waits, and a little while it works."""

    def __init__(self, rng: random.Random) -> None:
        self.now = START_SECONDS
        self._rng = rng
        self._inner = selectors.DefaultSelector()

    def monotonic(self) -> float:
        self.now += 1e-9  # no two stamps are the same
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += timeout + self._rng.expovariate(1 / 20e-6)
        if self._rng.random() < 0.002:
            self.now += self._rng.uniform(0.0, 0.08)  # the machine stands still
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class Host:
    """A machine with one process on it.

    Attributes:
        name: of the process.
        alive: whether it has not been killed.
        failed: tasks of it that ended with an exception.
    """

    def __init__(self, loop: "VirtualLoop", name: str, offset_seconds: float = 0.0) -> None:
        self.name = name
        self.alive = True
        self.failed: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._offset_seconds = offset_seconds
        self._wall_seconds = 0.0
        self._stopped_until = 0.0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = copy_context()
        self._context.run(HOST.set, self)

    def monotonic(self) -> float:
        return self._loop.clock.monotonic() + self._offset_seconds

    def time_ns(self) -> int:
        return WALL_NS + round((self._loop.clock.now + self._wall_seconds) * 1e9)

    def jump(self, seconds: float) -> None:
        """Let the monotonic clock jump, as against other hosts'."""
        self._offset_seconds += seconds

    def jump_wall(self, seconds: float) -> None:
        """Let the time of day jump."""
        self._wall_seconds += seconds

    def stop(self, seconds: float) -> None:
        """Let the process stand still, as by SIGSTOP: its timers and sockets wait."""
        self._stopped_until = max(self._stopped_until, self._loop.clock.now + seconds)

    @property
    def runs_from(self) -> float:
        """When what happens now gets through to the process."""
        return max(self._stopped_until, self._loop.clock.now)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine on this host."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def call(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call something on this host."""
        return self._context.copy().run(what, *arguments)

    def kill(self) -> None:
        """End the process at once: no timer of it fires any more, and nothing that it says is heard."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()

    def has(self, task: "asyncio.Task[Any]") -> None:
        """Take note of a task that began here."""
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        del self._tasks[task]
        # Not `exception()`: that would count as somebody's having seen it.
        if self.alive and not task.cancelled() and task._exception is not None:  # type: ignore[attr-defined]
            self.failed.append(task)

    def fire(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Let a timer of this host fire, if it is there to see it."""
        if not self.alive:
            return
        if self._stopped_until > self._loop.clock.now:
            asyncio.SelectorEventLoop.call_at(self._loop, self._stopped_until, self.fire, callback, *arguments)
            return
        callback(*arguments)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self, clock: VirtualTime) -> None:
        self.clock = clock
        super().__init__(clock)

    def time(self) -> float:
        return self.clock.now

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        host = HOST.get() if context is None else context.get(HOST)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, host.fire, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        host = HOST.get() if context is None else context.get(HOST)
        if host is not None:
            host.has(task)
        return task


class _FakeTime:
    """The module `time`, as the code of a host sees it."""

    def __init__(self, clock: VirtualTime) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        host = HOST.get()
        return self._clock.monotonic() if host is None else host.monotonic()

    def time_ns(self) -> int:
        host = HOST.get()
        return WALL_NS + round(self._clock.now * 1e9) if host is None else host.time_ns()

    def time(self) -> float:
        return self.time_ns() / 1e9

    def thread_time(self) -> float:
        return 0.0


@contextlib.contextmanager
def virtual_time(rng: random.Random) -> Iterator[VirtualLoop]:
    """Let every module of the project read virtual clocks and draw from `rng`; yield the loop to run on."""
    clock = VirtualTime(rng)
    fake = _FakeTime(clock)
    chance = random.Random(rng.getrandbits(64))

    def uuid4() -> UUID:
        return UUID(int=chance.getrandbits(128))

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("lorrery."):
                for attribute, real, virtual in (("time", time, fake), ("random", random, chance)):
                    if getattr(module, attribute, None) is real:
                        patch.setattr(module, attribute, virtual)
                if hasattr(module, "uuid4"):
                    patch.setattr(module, "uuid4", uuid4)
        patch.setattr("asyncio.to_thread", _at_once)  # a thread knows no virtual time
        loop = VirtualLoop(clock)
        try:
            yield loop
        finally:
            loop.close()


async def _at_once(what: Callable[..., Any], *arguments: Any) -> Any:
    return what(*arguments)
