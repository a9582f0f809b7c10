"""Shows a feed or a record until the user quits: one task applies frames, keys change the look, each change is drawn.

Without a terminal one frame is printed, or all as JSON lines.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from lorrery.service.entry_point import handled_by, reader_has_gone
from lorrery.view.frame import Feed, encode
from lorrery.view.model import Model
from lorrery.view.top.keyboard import keys, press
from lorrery.view.top.screen import Look, compose, whole
from lorrery.view.top.sources import Source, Tape, first_hello, frames_of

_ONCE_FRAMES = 12
"""Frames of a live feed before one is printed: at ten per second, enough for rates over part of their two seconds."""
_ONCE_HZ = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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


async def print_once(source: Feed | Tape, look: Look, console: Console, views: Sequence[str], at: float | None) -> None:
    """Print the state at one moment: now, or of a record its end or `at`.

    Raises:
        LorreryError: the cluster does not answer.
    """
    if isinstance(source, Tape):
        model = source.model_at(len(source) - 1 if at is None else source.index_at(at))
    else:
        model = Model(await first_hello(source))
        async with contextlib.aclosing(frames_of(source, _ONCE_HZ)) as frames:
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
    async with contextlib.aclosing(frames_of(source, hz)) as frames:
        async for frame in frames:
            write.write(encode(frame) + b"\n")
            write.flush()
            if once or reader_has_gone(sys.stdout):
                return
