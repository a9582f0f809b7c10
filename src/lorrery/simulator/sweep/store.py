"""Finished points on disk, one file each, so that an interrupted sweep can continue.

A file appears whole or not at all. It includes all that determined its figures, so that points can be told apart
without this program.
"""

import json
from pathlib import Path
from typing import Any

from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole
from lorrery.simulator.sweep.outcome import FIGURES, Figure, Outcome
from lorrery.simulator.sweep.points import Point

__all__ = ["PointStore", "replace_file"]

KIND = "lorrery sweep point"
FORMAT_VERSION = 1


class PointStore:
    """The folder of finished points; created with the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, point: Point) -> Outcome | None:
        """Return a point's figures; None if it is missing, or not in this version's format."""
        try:
            content: Any = json.loads(self._path(point.key).read_text(encoding="utf-8"))
            figures: dict[str, Figure] = {name: content["figures"][name] for name in FIGURES}
            warnings = tuple(map(str, content.get("warnings", ())))
            known = content["kind"] == KIND and content["format_version"] == FORMAT_VERSION
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Outcome(point.key, figures, warnings=warnings) if known else None

    def write(self, point: Point, outcome: Outcome) -> None:
        """Store a finished point.

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
    """Write a file so that a reader sees the old one or the new one, never a part; creates its folder.

    Raises:
        LorreryError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
