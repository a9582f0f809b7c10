"""Child processes that end with this one: Python programs, and services forked from a process that has imported them.

Programs have sessions of their own, and services that of their fork server, so that Ctrl-C in a terminal reaches only
this process, which then stops them in order; the services of a fork server are one process group. None outlives this
process, even if it is killed: see `service.linux`. Start them from the main thread: they die with the thread that
started them. A `ServiceProcess` is a service's process as its cluster sees it: its addresses, last output lines and
exit.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from lorrery.service import linux
from lorrery.service.errors import LorreryError
from lorrery.service.local import fork_server


async def start_python(
    arguments: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start `python ARGUMENTS`; `variables` are added to its environment."""
    return await asyncio.create_subprocess_exec(
        *_tied(arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=_environment() | dict(variables or {}),
        start_new_session=True,
    )


def _tied(arguments: Sequence[str]) -> list[str]:
    tied = Path(linux.__file__)
    # -P: do not import from a folder of the caller's that happens to be called "router".
    return [sys.executable, "-I", "-S", str(tied), str(os.getpid()), sys.executable, "-P", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


class Forked:
    """The process of a service, with the used subset of `asyncio.subprocess.Process`.

    Attributes:
        pid: process id.
        returncode: exit code, -n after signal n, None while it runs.
        stdout: its standard output and standard error.
    """

    def __init__(self, pid: int, stdout: asyncio.StreamReader, report: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self._end = asyncio.create_task(self._read_end(report), name=f"end of process {pid}")

    async def _read_end(self, report: asyncio.StreamReader) -> int:
        # Empty at its end if the fork server was killed, and its children with it.
        told = await report.read()
        code: int
        (code,) = fork_server.REPORTED.unpack(told) if told else (-signal.SIGKILL,)
        self.returncode = code
        return code

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return await asyncio.shield(self._end)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Fork:
    """A fork of this process that serves `control`, with the used subset of `subprocess.Popen`."""

    def __init__(self, control: socket.socket, other_end: socket.socket) -> None:
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            linux.die_with(parent)
            other_end.close()
            # Those of the parent may be a protocol's, which services must neither read nor keep open.
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            os.dup2(2, 1)
            fork_server.serve(control, fork_server.import_services())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """Starts services by forking; it starts at once, and imports them in the background. `with` ends it.

    Its end ends every service that it started. It is not tied to an event loop: several may use it in turn.

    Args:
        program: arguments of Python; a program other than the module `fork_server` may patch services before running
            it. None: it is a fork of this process, which must not have run an event loop, started a thread or made
            a gRPC object, and should have called `fork_server.import_services`.
    """

    def __init__(self, program: Sequence[str] | None = ("-m", fork_server.__name__)) -> None:
        self._control, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | _Fork
        with theirs:
            if program is None:
                self._process = _Fork(theirs, self._control)
            else:
                self._process = subprocess.Popen(  # noqa: S603  our own command line
                    _tied([*program, str(theirs.fileno())]),
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self._control.setblocking(False)
        self._ready = False
        self._awaiting = asyncio.Lock()  # its answer is read once, however many clusters start together

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the fork server, and with it all services that it started."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def start(self, service: str, arguments: Sequence[str]) -> Forked:
        """Start `python -m lorrery.SERVICE ARGUMENTS`, in this process's environment and working directory.

        Raises:
            LorreryError: the fork server has ended.
        """
        await self._until_ready()
        output, theirs_output = os.pipe()
        report, theirs_report = os.pipe()
        wanted = json.dumps(
            {
                "service": service,
                "arguments": list(arguments),
                "folder": str(Path.cwd()),
                "environment": _environment(),
            }
        ).encode()
        try:
            socket.send_fds(self._control, [fork_server.LENGTH.pack(len(wanted))], [theirs_output, theirs_report])
            self._control.sendall(wanted)
        except OSError:
            raise self._ended() from None
        finally:
            os.close(theirs_output)
            os.close(theirs_report)
        # Takes one fork; not awaited, so that no process is started without being returned.
        told = os.read(report, fork_server.REPORTED.size)
        if not told:
            raise self._ended()
        (pid,) = fork_server.REPORTED.unpack(told)
        return Forked(pid, await _reader(output), await _reader(report))

    async def _until_ready(self) -> None:
        async with self._awaiting:
            if self._ready:
                return
            if await asyncio.get_running_loop().sock_recv(self._control, len(fork_server.READY)) != fork_server.READY:
                raise self._ended()
            self._control.setblocking(True)  # from here on it reads messages as they come
            self._ready = True

    def _ended(self) -> LorreryError:
        return LorreryError(f"the process that services are forked from, pid {self.pid}, has ended; start again")


async def _reader(descriptor: int) -> asyncio.StreamReader:
    """Return a stream reader for a pipe, which is closed at its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


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
