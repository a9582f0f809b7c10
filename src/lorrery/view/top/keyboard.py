"""Reads single keys from a terminal, whose state is restored however the program ends."""

import asyncio
import codecs
import contextlib
import os
import re
import termios
import tty
from collections.abc import Callable, Iterator

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end",
    "[5~": "page up", "[6~": "page down", "[Z": "shift tab",
}  # fmt: skip
_PLAIN = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", " ": "space"}
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
