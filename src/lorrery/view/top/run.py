"""Shows a feed or a record until the user quits: one task applies frames, keys change the look, each change is drawn.

Without a terminal one frame is printed, or all as JSON lines.
"""

import asyncio
import contextlib
import copy
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live

from lorrery.service.errors import LorreryError
from lorrery.service.interrupt import handled_by
from lorrery.service.standard_streams import reader_has_gone
from lorrery.view.feed import Feed
from lorrery.view.frame import Frame, Hello, encode
from lorrery.view.top.control import press
from lorrery.view.top.keyboard import keys
from lorrery.view.top.model import Model
from lorrery.view.top.names import plain
from lorrery.view.top.screen import Look, compose, whole
from lorrery.view.top.tape import Tape

RETRY_SECONDS = 1.0
"""Delay before a failed feed is watched again, in wall seconds."""
_ONCE_FRAMES = 12
"""Frames of a live feed before one is printed: at ten per second, enough for rates over part of their two seconds."""
_ONCE_HZ = 10.0
_SEEK_FRAMES = 10
_MIN_SPEED, _MAX_SPEED = 1 / 64, 1024.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Source(Protocol):
    """Provides the model that the screen shows."""

    model: Model

    async def play(self, changed: Callable[[], None]) -> None:
        """Keep the model up to date; call `changed` after each change."""
        ...

    def obey(self, command: str, look: Look) -> None:
        """Execute a command from `control.press`."""
        ...


class Watching:
    """A live feed; after a failure it is watched again, and the screen shows the failure meanwhile.

    Args:
        feed: of the cluster.
        hello: received from the feed.
        hz: frames per second.
        look: its status shows failures.
    """

    def __init__(self, feed: Feed, hello: Hello, hz: float, look: Look) -> None:
        self._feed, self._hello, self._hz, self._look = feed, hello, hz, look
        self._now = self.model = Model(hello)

    async def play(self, changed: Callable[[], None]) -> None:
        """See `Source`."""
        hello: Hello | None = self._hello
        while True:
            try:
                self._now.begin(hello or await self._feed.hello())
                hello = None
                async with contextlib.aclosing(_frames(self._feed, self._hz)) as frames:
                    async for frame in frames:
                        self._now.apply(frame)
                        self._look.status, self._look.is_trouble = "live", False
                        changed()
            except LorreryError as error:
                self._look.status, self._look.is_trouble = f"LOST, trying again: {plain(str(error))}", True
                changed()
            await asyncio.sleep(RETRY_SECONDS)

    def obey(self, command: str, look: Look) -> None:
        """See `Source`."""
        if command == "pause":
            look.is_paused = not look.is_paused
            self.model = copy.deepcopy(self._now) if look.is_paused else self._now


class Playing:
    """A record, played at a speed that keys change.

    Args:
        tape: the record.
        hz: redraws per second.
        speed: device seconds per wall second.
        look: its status shows the position.
        at: where to begin, paused; None: at the start, running.
    """

    def __init__(self, tape: Tape, hz: float, speed: float, look: Look, at: float | None) -> None:
        self._tape, self._hz, self._speed, self._look = tape, hz, speed, look
        self._index = 0 if at is None else tape.index_at(at)
        self._position = tape.times[self._index]
        look.is_paused = at is not None
        self.model = tape.model_at(self._index)
        self._moved = asyncio.Event()
        self._tell()

    async def play(self, changed: Callable[[], None]) -> None:
        """See `Source`."""
        before = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 1 / self._hz)
            self._moved.clear()
            now = time.monotonic()
            if not self._look.is_paused:
                self._advance((now - before) * self._speed)
            before = now
            self._tell()
            changed()

    def _advance(self, device_seconds: float) -> None:
        tape = self._tape
        self._position = min(self._position + device_seconds, tape.times[-1])
        wanted = tape.index_at(self._position)
        if wanted - self._index > 200:
            self.model = tape.model_at(wanted)
        else:
            for number in range(self._index + 1, wanted + 1):
                self.model.apply(tape.frame(number))
        self._index = max(self._index, wanted)

    def obey(self, command: str, look: Look) -> None:
        """See `Source`."""
        last = len(self._tape) - 1
        if command == "pause":
            if look.is_paused and self._index == last:
                self._seek(0)
            look.is_paused = not look.is_paused
        elif command in ("back", "on"):
            self._seek(self._index + (_SEEK_FRAMES if command == "on" else -_SEEK_FRAMES))
        elif command in ("faster", "slower"):
            speed = self._speed * (2 if command == "faster" else 0.5)
            self._speed = min(_MAX_SPEED, max(_MIN_SPEED, speed))
        self._moved.set()

    def _seek(self, index: int) -> None:
        self._index = max(0, min(index, len(self._tape) - 1))
        self._position = self._tape.times[self._index]
        self.model = self._tape.model_at(self._index)

    def _tell(self) -> None:
        if self._index == len(self._tape) - 1 and not self._look.is_paused:
            self._look.is_paused = True
        self._look.status = f"record x{self._speed:g} {self._position / max(self._tape.times[-1], 1e-9):.0%}"


async def show(source: Source, look: Look, console: Console) -> int:
    """Show a source on the whole terminal until the user quits; return the exit code.

    The terminal is restored afterwards, whether a key, a signal or an error ends this, and also while the program is
    stopped with Ctrl-Z.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    suspended, needs_drawing = asyncio.Event(), asyncio.Event()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def pressed(key: str) -> None:
        command = press(look, key, max(1, console.size.height - 10))
        if command == "quit":
            end(0)
        else:
            source.obey(command, look)
        needs_drawing.set()

    async def draw(live: Live) -> None:
        while True:
            await needs_drawing.wait()
            needs_drawing.clear()
            live.update(_screen(source, look, console), refresh=True)

    async def watch() -> None:
        with Live(console=console, screen=True, auto_refresh=False) as live, keys(_terminal(), pressed):
            needs_drawing.set()
            tasks: list[asyncio.Future[Any]] = [
                asyncio.create_task(source.play(needs_drawing.set)),
                asyncio.create_task(draw(live)),
                asyncio.create_task(suspended.wait()),
            ]
            try:
                everything: list[asyncio.Future[Any]] = [ended, *tasks]
                done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    task.result()  # raises its error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with handled_by(loop, lambda number: end(128 + number), _ENDING):
        loop.add_signal_handler(signal.SIGWINCH, needs_drawing.set)
        try:
            loop.add_signal_handler(signal.SIGTSTP, suspended.set)
            while True:
                await watch()
                if ended.done():
                    return ended.result()
                suspended.clear()
                os.kill(os.getpid(), signal.SIGSTOP)  # the terminal is restored; continues here after SIGCONT
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            loop.remove_signal_handler(signal.SIGTSTP)


def _terminal() -> int | None:
    return sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None


def _screen(source: Source, look: Look, console: Console) -> Group:
    width, height = console.size
    return Group(*compose(source.model, look, width, height))


async def first_hello(feed: Feed) -> Hello:
    """Return the hello of a feed.

    Raises:
        LorreryError: the feed does not answer; the message suggests what to do.
    """
    try:
        return await feed.hello()
    except LorreryError as error:
        raise LorreryError(f"{error}; --target names the router of a cluster, and lorrery up starts one") from None


async def print_once(source: Feed | Tape, look: Look, console: Console, views: Sequence[str], at: float | None) -> None:
    """Print the state at one moment: now, or of a record its end or `at`.

    Raises:
        LorreryError: the cluster does not answer.
    """
    if isinstance(source, Tape):
        model = source.model_at(len(source) - 1 if at is None else source.index_at(at))
    else:
        model = Model(await first_hello(source))
        async with contextlib.aclosing(_frames(source, _ONCE_HZ)) as frames:
            number = 0
            async for frame in frames:
                model.apply(frame)
                number += 1
                if number == _ONCE_FRAMES:
                    break
    for line in whole(model, look, console.size.width, views):
        console.print(line, soft_wrap=True)


async def print_json(source: Feed | Tape, hz: float, *, once: bool, at: float | None) -> None:
    """Print the hello and the frames, one line of JSON each; of a live feed until it ends or the reader has gone.

    Raises:
        LorreryError: the cluster no longer answers.
    """
    write = sys.stdout.buffer
    if isinstance(source, Tape):
        write.write(encode(source.hello) + b"\n")
        first = 0 if at is None else source.index_at(at)
        for number in range(first, first + 1 if once and at is not None else len(source)):
            if not once or at is not None or number == len(source) - 1:
                write.write(encode(source.frame(number)) + b"\n")
        write.flush()
        return
    write.write(encode(await first_hello(source)) + b"\n")
    async with contextlib.aclosing(_frames(source, hz)) as frames:
        async for frame in frames:
            write.write(encode(frame) + b"\n")
            write.flush()
            if once or reader_has_gone(sys.stdout):
                return


async def _frames(feed: Feed, hz: float) -> AsyncGenerator[Frame, None]:
    """Watch a feed; closing this ends the watch."""
    frames = feed.frames(hz)
    try:
        async for frame in frames:
            yield frame
    finally:
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()
