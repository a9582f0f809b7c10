"""What the services print: kept in a file each, and judged line by line.

Every line is a JSON object of the log. Anything else was printed by the interpreter or by gRPC's core, which nobody
asked to, and counts as an error.
"""

import json
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

FLOOD_LINES = 400
"""In a second, of one process: more than its requests and its losses give it reason for."""
BAD_LEVELS = frozenset({"error", "critical"})


class Logs:
    """Takes every line of every process; `with` closes the files.

    Attributes:
        bad: lines that must be explained: process, when (`time.monotonic()`), and the line.
        losses: workers that schedulers gave up or lost: when, in order.
        num_lines: by process.
    """

    def __init__(self, folder: Path) -> None:
        self.bad: list[tuple[str, float, str]] = []
        self.losses: list[float] = []
        self.num_lines: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._by_second: Counter[tuple[str, int]] = Counter()
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def line(self, name: str, line: str) -> None:
        """Take a line that a process has printed."""
        now = time.monotonic()
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / f"{name}.log").open("w", buffering=1))
        self._files[name].write(line + "\n")
        self.num_lines[name] += 1
        self._by_second[name, int(now)] += 1
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"level": "critical"}
        self.events[entry.get("event", "")] += 1
        if entry.get("level") in BAD_LEVELS:
            self.bad.append((name, now, line))
        if entry.get("event") == "worker_lost":
            self.losses.append(now)

    @property
    def floods(self) -> list[str]:
        """Seconds in which a process printed too much."""
        return [
            f"{name} printed {count} lines in one second"
            for (name, _), count in self._by_second.items()
            if count > FLOOD_LINES
        ]
