"""Other projects' mock servers, started as programs where they are installed.

Each is looked up on the PATH; Dynamo's two are modules of the interpreter named by DYNAMO_PYTHON (or this one). Their
packages require conflicting versions, so each needs its own environment:

    guidellm              pip install guidellm
    aiperf-mock-server    github.com/ai-dynamo/aiperf, integration-tests/ ; not in the package registry
    Dynamo                pip install ai-dynamo; without etcd and NATS: discovery by files, requests over TCP
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lorrery.tokenizer
from lab.bench.cluster import BenchBrokenError

START_SECONDS = 60.0
_TOKENIZER = str(Path(lorrery.tokenizer.__file__).with_name("shipped"))
_TOKENS = 1400
_MODEL = "mock"


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test.

    Attributes:
        address: HOST:PORT.
        path: of the route.
        body: of a request for an endless stream.
        roots: processes that, with their descendants, make up the server.
    """

    address: str
    path: str
    body: Mapping[str, Any]
    roots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Peer:
    """One project's mock server.

    Attributes:
        name: in the tables.
        program: looked up on the PATH; empty: a module of `DYNAMO_PYTHON`.
        missing: message if it is not installed.
        commands: returns the commands to start, for a program, a port and a pace in ms.
        path: of the route.
        body: of a request.
    """

    name: str
    program: str
    missing: str
    commands: Callable[[str, int, int], list[list[str]]]
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)


def _guidellm(program: str, port: int, pace_ms: int) -> list[list[str]]:
    times = ["--ttft-ms", str(pace_ms), "--itl-ms", str(pace_ms)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return [[program, "mock-server", *where, "--model", _MODEL, *times]]


def _aiperf(program: str, port: int, pace_ms: int) -> list[list[str]]:
    times = ["--ttft", str(pace_ms), "--itl", str(pace_ms)]
    return [[program, "--host", "127.0.0.1", "--port", str(port), "--tokenizer-models", _TOKENIZER, *times]]


def _dynamo(program: str, port: int, _pace_ms: int) -> list[list[str]]:
    worker = [program, "-m", "dynamo.mocker", "--model-path", _TOKENIZER, "--model-name", _MODEL]
    return [worker, [program, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]]


_COMPLETION = {"model": _MODEL, "prompt": "hello", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
_ECHOED = {
    "model": _TOKENIZER,
    "messages": [{"role": "user", "content": "hello " * _TOKENS}],
    "max_tokens": _TOKENS,
    "stream": True,
}
PEERS = (
    Peer("guidellm mock-server", "guidellm", "guidellm is not on the PATH", _guidellm, "/v1/completions", _COMPLETION),
    Peer(
        "aiperf-mock-server",
        "aiperf-mock-server",
        "aiperf-mock-server is not on the PATH",
        _aiperf,
        "/v1/chat/completions",
        _ECHOED,
    ),
    Peer(
        "Dynamo frontend, mocker",
        "",
        "DYNAMO_PYTHON names no interpreter with ai-dynamo",
        _dynamo,
        "/v1/completions",
        _COMPLETION,
    ),
)


def program_of(one: Peer) -> str | None:
    """Return the path of a peer's program; None: it is not installed."""
    if one.program:
        return shutil.which(one.program)
    python = os.environ.get("DYNAMO_PYTHON", sys.executable)
    found = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('dynamo') is None)"], check=False
    )
    return python if found.returncode == 0 else None


@contextlib.asynccontextmanager
async def peer(one: Peer, pace_ms: int) -> AsyncIterator[Target]:
    """Run a peer's server until the context ends.

    Raises:
        BenchBrokenError: it did not start.
    """
    program, port = program_of(one), _free_port()
    assert program is not None
    address = f"127.0.0.1:{port}"
    processes: list[asyncio.subprocess.Process] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": folder,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
        }
        try:
            with (Path(folder) / "log").open("wb") as log:
                for command in one.commands(program, port, pace_ms):
                    started = await asyncio.create_subprocess_exec(
                        *command, env=variables, stdout=log, stderr=log, start_new_session=True
                    )
                    processes.append(started)
            await _answers(one, address, Path(folder) / "log", processes)
            yield Target(address, one.path, one.body, [process.pid for process in processes])
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):  # tasks that end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                found += tree(int(child))
    return found


async def _answers(one: Peer, address: str, log: Path, processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Wait until a server accepts a request, whose stream is then closed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while all(process.returncode is None for process in processes):
                if await asyncio.to_thread(_ok, f"http://{address}{one.path}", one.body):
                    return
                await asyncio.sleep(0.2)
    said = await asyncio.to_thread(log.read_bytes)
    raise BenchBrokenError(f"{one.name} does not serve: {said[-500:].decode(errors='replace')}")


def _ok(url: str, body: Mapping[str, Any]) -> bool:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
