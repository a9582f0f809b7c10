"""One service's process as seen by the cluster that started it: its addresses, last output lines and exit."""

import asyncio
import json
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lorrery.service.local.processes import Forked

_TAIL_LINES = 5

Show = Callable[[str, str], None]
"""Takes a process's name and one line of its output."""


@dataclass
class ServiceProcess:
    """One running (or ended) process of a cluster."""

    name: str
    service: str
    overrides: list[str]
    process: Forked
    announce: Path
    grpc: str = ""
    metrics: str = ""
    http: str = ""
    others: dict[str, str] = field(default_factory=dict)
    exit_expected: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    watcher: asyncio.Task[None] | None = None
    succeeded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once another process runs under its name."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, -n after signal n, None while it runs."""
        return self.process.returncode

    def signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, if it still runs; its end counts as unexpected."""
        self.signal(signal.SIGKILL)

    async def pass_on(self, show: Show) -> None:
        """Pass its output on line by line, until it has ended."""
        rest = b""
        while chunk := await self.process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._pass_on(line, show)
        if rest:
            self._pass_on(rest, show)
        await self.process.wait()

    def _pass_on(self, line: bytes, show: Show) -> None:
        text = line.decode(errors="replace")
        self.tail.append(text)
        show(self.name, text)

    def read_announcement(self) -> None:
        """Store the addresses that the process has announced."""
        addresses = json.loads(self.announce.read_text(encoding="utf-8"))
        self.grpc, self.metrics = addresses.get("grpc", ""), addresses.get("metrics", "")
        self.http = addresses.get("http", "")
        usual = ("grpc", "metrics", "http", "pid")
        self.others = {name: address for name, address in addresses.items() if name not in usual}

    def take_addresses(self, old: "ServiceProcess") -> None:
        """Copy the addresses of the process that this one replaces; it will announce the same ones."""
        self.grpc, self.metrics, self.http, self.others = old.grpc, old.metrics, old.http, old.others


def describe_exit(code: int | None) -> str:
    """Return an exit code in words."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def last_words(process: ServiceProcess) -> str:
    """Return the last lines of a process's output, to append to a message."""
    return "".join(f"\n  {process.name} | {line}" for line in process.tail)
