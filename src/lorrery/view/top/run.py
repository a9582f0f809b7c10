"""Shows a feed or a record until the user quits: one task applies frames, keys change the look, each change is drawn.

Without a terminal one frame is printed, or all as JSON lines. Keys are read from a terminal whose state is restored
however the program ends. Views, sorting, filtering and scrolling are handled here; commands for a source are left to
it.
"""

import asyncio
import codecs
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live

from lorrery.service.entry_point import handled_by, reader_has_gone
from lorrery.view.frame import Feed, encode
from lorrery.view.model import Model
from lorrery.view.top.screen import HELP, VIEWS, Look, compose, whole
from lorrery.view.top.sources import Source, Tape, first_hello, frames_of
from lorrery.view.top.tables import TABLES

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end",
    "[5~": "page up", "[6~": "page down", "[Z": "shift tab",
}  # fmt: skip
_PLAIN = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", " ": "space"}
Command = Literal["", "quit", "pause", "back", "on", "faster", "slower", "dismiss"]
_MAX_FILTER = 60
_COMMANDS: dict[str, Command] = {
    "q": "quit", "Q": "quit", "space": "pause", "p": "pause", "left": "back", "right": "on", "+": "faster",
    "=": "faster", "-": "slower", "x": "dismiss",
}  # fmt: skip
_FAR = 10**9
_KEY = re.compile(r"\x1b([\[O][0-9;]*[A-Za-z~])|\x1b|.", re.DOTALL)


def keys_of(text: str) -> Iterator[str]:
    """Yield the keys in a terminal's input: a character, or a name such as `up`, `page down`, `enter`, `escape`."""
    for match in _KEY.finditer(text):
        if match[1] is not None:
            if match[1] in _SEQUENCES:
                yield _SEQUENCES[match[1]]
        elif match[0] == "\x1b":
            yield "escape"
        elif match[0] in _PLAIN:
            yield _PLAIN[match[0]]
        elif match[0].isprintable():
            yield match[0]


@contextlib.contextmanager
def keys(descriptor: int | None, pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` for each key, in the running loop; Ctrl-C remains a signal.

    Args:
        descriptor: of the terminal; None: no terminal.
        pressed: called with the key, see `keys_of`.
    """
    if descriptor is None:
        yield
        return
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read() -> None:
        try:
            sent = os.read(descriptor, 4096)
        except OSError:
            sent = b""
        if not sent:
            loop.remove_reader(descriptor)
        for key in keys_of(decoder.decode(sent)):
            pressed(key)

    tty.setcbreak(descriptor, termios.TCSANOW)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def press(look: Look, key: str, page: int) -> Command:
    """Apply a key to the look, in place; return the command that it gives to the source.

    Args:
        look: is changed.
        key: as from `keys_of`.
        page: number of rows on the screen.
    """
    if look.is_typing:
        _type(look, key)
        return ""
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, "home": -_FAR, "end": _FAR}
    steps |= {"g": -_FAR, "G": _FAR}
    if key in steps:
        look.offset = max(0, look.offset + steps[key])
    elif key == "/":
        look.text, look.is_typing = "", True
    elif key == "escape":
        look.text = ""
        if look.view == HELP:
            _show(look, VIEWS[0])
    elif key in ("tab", "shift tab"):
        place = VIEWS.index(look.view) if look.view in VIEWS else -1
        _show(look, VIEWS[(place + (1 if key == "tab" else -1)) % len(VIEWS)])
    elif key.isdecimal() and 1 <= int(key) <= len(VIEWS):
        _show(look, VIEWS[int(key) - 1])
    elif key in ("h", "?"):
        _show(look, VIEWS[0] if look.view == HELP else HELP)
    elif key in ("s", "S", "r"):
        _sort(look, key)
    return _COMMANDS.get(key, "")


def _show(look: Look, view: str) -> None:
    look.view, look.offset = view, 0


def _type(look: Look, key: str) -> None:
    if key == "escape":
        look.text, look.is_typing = "", False
    elif key == "enter":
        look.is_typing = False
    elif key == "backspace":
        look.text = look.text[:-1]
    elif len(key) == 1 or key == "space":
        look.text = (look.text + (" " if key == "space" else key))[:_MAX_FILTER]
    look.offset = 0


def _sort(look: Look, key: str) -> None:
    table = next((table for table in TABLES if table.name == look.view), None)
    if table is None:
        return
    index, is_reversed = look.sort_of(table)
    if key == "r":
        look.sorts[table.name] = index, not is_reversed
    else:
        look.sorts[table.name] = (index + (1 if key == "s" else -1)) % len(table.columns), False
    look.offset = 0


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
            if command == "dismiss":
                source.model.dismiss_lost()
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
