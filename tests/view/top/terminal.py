"""`lorrery top` in a terminal of its own: a pty whose settings can be looked at before and after."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

TIMEOUT_SECONDS = 30.0
IN, OUT = b"\x1b[?1049h", b"\x1b[?1049l"
"""What switches to the other screen of a terminal, and back."""
SHOW_CURSOR = b"\x1b[?25h"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs `lorrery top`, and reads what it writes."""

    def __init__(self, arguments: Sequence[str], columns: int = 80, lines: int = 24, **environment: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lorrery.cli", "top", *arguments],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
        )  # fmt: skip
        self.written = self.all = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def until(self, *words: str) -> str:
        """Read on until what has been written since the last call has all words; return it without escapes."""
        begun, found = time.monotonic(), b""
        while not all(word in (text := _ESCAPES.sub("", found.decode(errors="replace"))) for word in words):
            assert time.monotonic() - begun < TIMEOUT_SECONDS, f"no {words} in {text[-3000:]}"
            assert self._read() or self.process.poll() is None, f"it ended: {text[-3000:]}"
            found, self.written = found + self.written, b""
        return text

    def end(self) -> tuple[int, bytes]:
        """Wait for its end; return its exit code and all that it has written since the last `until`."""
        begun = time.monotonic()
        while self.process.poll() is None:
            assert time.monotonic() - begun < TIMEOUT_SECONDS
            self._read()
        return self.process.returncode, self.rest()

    def rest(self) -> bytes:
        """Return all that has been written since the last call of this, and of `until`."""
        while self._read():
            pass
        rest, self.written = self.written, b""
        return rest

    def is_as_before(self) -> bool:
        """Say whether the terminal's settings are what they were."""
        return termios.tcgetattr(self.slave) == self.before

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.05)[0]:
            return False
        read = os.read(self.master, 65536)
        self.written, self.all = self.written + read, self.all + read
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)
