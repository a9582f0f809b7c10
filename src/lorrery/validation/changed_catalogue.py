"""Writes a catalogue file whose figures differ in places from the shipped ones: for ablations and refits.

It is a file so that simulating processes can read it, with the same effect as a user's own catalogue.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from lorrery.service.files.toml import read_tables, to_toml
from lorrery.worker.device.catalogue import FORMAT, PACKAGE

Tables = dict[str, dict[str, dict[str, Any]]]
"""Kind of entry -> name -> the entry as in its file."""
Change = Callable[[Tables], None]
_BY_NAME, _LISTED = ("fits", "links", "engines"), ("gpu", "model")


def tables_of(catalogue: Iterable[Path] = ()) -> Tables:
    """Return all entries: the shipped ones, overridden by those of further files."""
    found: Tables = {kind: {} for kind in (*_BY_NAME, *_LISTED)}
    for _, table in read_tables(PACKAGE, catalogue):
        for kind in _BY_NAME:
            found[kind] |= table.get(kind, {})
        for kind in _LISTED:
            found[kind] |= {entry["name"]: entry for entry in table.get(kind, ())}
    return deepcopy(found)


def write_changed(path: Path, catalogue: Iterable[Path], change: Change) -> tuple[Path, ...]:
    """Apply a change to a catalogue's entries and write the changed ones; return the catalogue's files and the new one.

    Args:
        path: of the new file, which gets the changed entries.
        catalogue: files in addition to the shipped ones.
        change: changes entries.
    """
    catalogue = tuple(catalogue)
    before, after = tables_of(catalogue), tables_of(catalogue)
    change(after)
    new = {
        kind: {name: entry for name, entry in entries.items() if entry != before[kind].get(name)}
        for kind, entries in after.items()
    }
    content: dict[str, Any] = {"format": FORMAT}
    content |= {kind: list(new[kind].values()) for kind in _LISTED if new[kind]}
    content |= {kind: new[kind] for kind in _BY_NAME if new[kind]}
    path.write_text(to_toml(content), encoding="utf-8")
    return (*catalogue, path)
