"""Handles keys: views, sorting, filtering, scrolling, pausing; commands for a record are left to the player."""

from typing import Literal

from lorrery.view.top.screen import HELP, VIEWS, Look
from lorrery.view.top.tables import TABLES

Command = Literal["", "quit", "pause", "back", "on", "faster", "slower"]
_MAX_FILTER = 60
_COMMANDS: dict[str, Command] = {
    "q": "quit", "Q": "quit", "space": "pause", "p": "pause", "left": "back", "right": "on", "+": "faster",
    "=": "faster", "-": "slower",
}  # fmt: skip
_FAR = 10**9


def press(look: Look, key: str, page: int) -> Command:
    """Apply a key to the look, in place; return the command that it gives to the source.

    Args:
        look: is changed.
        key: as from `keyboard.keys_of`.
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
