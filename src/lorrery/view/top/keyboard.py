"""Keys: reads them from a terminal, whose state is restored however the program ends, and applies them to the look.

Views, sorting, filtering and scrolling are handled here; commands for a source are left to it.
"""

import asyncio
import codecs
import contextlib
import os
import re
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Literal

from lorrery.view.top.screen import HELP, VIEWS, Look
from lorrery.view.top.tables import TABLES

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end",
    "[5~": "page up", "[6~": "page down", "[Z": "shift tab",
}  # fmt: skip
_PLAIN = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", " ": "space"}
Command = Literal["", "quit", "pause", "back", "on", "faster", "slower"]
_MAX_FILTER = 60
_COMMANDS: dict[str, Command] = {
    "q": "quit", "Q": "quit", "space": "pause", "p": "pause", "left": "back", "right": "on", "+": "faster",
    "=": "faster", "-": "slower",
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
