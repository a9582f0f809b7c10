"""A child process that performs runs on request: one line of JSON or text in, one line of JSON out."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.bench.cluster import BenchBrokenError


class Companion:
    """Starts the process on entry; on exit closes its standard input and waits for it.

    Args:
        name: for messages.
        command: program and arguments.
        cwd: the process's folder.
        environment: its variables; None: this process's.
    """

    def __init__(
        self, name: str, command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._command, self._cwd, self._environment = name, command, cwd, environment

    def __enter__(self) -> "Companion":
        self._process = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the response.

        Raises:
            BenchBrokenError: the process has exited.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            raise BenchBrokenError(f"{self._name} ended with {self._process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result
