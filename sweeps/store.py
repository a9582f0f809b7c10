"""Finished points on disk, each in a file of its own, so that a sweep can go on where it was cut off.

A file appears whole or not at all. It says what its figures were determined by, so that one can tell points apart
without this program.
"""

import json
from pathlib import Path
from typing import Any

from lorrery.chassis.errors import LorreryError
from lorrery.chassis.whole_file import write_whole
from lorrery.sweeps.outcome import FIGURES, Figure, Outcome
from lorrery.sweeps.points import Point

__all__ = ["PointStore", "replace_file"]

KIND = "lorrery sweep point"
FORMAT_VERSION = 1


class PointStore:
    """The folder of finished points; made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, point: Point) -> Outcome | None:
        """Return a point's figures; None if it is not there, or not as this version writes it."""
        try:
            content: Any = json.loads(self._path(point.key).read_text(encoding="utf-8"))
            figures: dict[str, Figure] = {name: content["figures"][name] for name in FIGURES}
            warnings = tuple(map(str, content.get("warnings", ())))
            known = content["kind"] == KIND and content["format_version"] == FORMAT_VERSION
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Outcome(point.key, figures, warnings=warnings) if known else None

    def write(self, point: Point, outcome: Outcome) -> None:
        """Keep a finished point.

        Raises:
            LorreryError: it cannot be written.
        """
        content = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "point": point.values,
            "figures": outcome.figures,
            "warnings": outcome.warnings,
            "determined_by": point.determined_by,
        }
        replace_file(self._path(point.key), (json.dumps(content, indent=1) + "\n").encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it; its folder is made.

    Raises:
        LorreryError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
