"""One case in a forked child: the command as it is, up to the point where it would start or listen."""

import os
import resource
import signal
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lorrery.cli import app
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer
from lorrery.simulator import lockstep
from lorrery.view.command import WebServer

CPU_SECONDS = 3
WALL_SECONDS = 20
MEMORY_BYTES = 2 * 2**30
"""Beyond what the process has as it is forked."""

STARTED, AT_WORK, CAUGHT, TOO_LONG = 0, 77, 70, 78
_WORK = ("/simulator/engine.py", "/validation/", "/simulator/sweep/backends.py")
"""Files whose functions run for as long as is asked for: a large number there is no fault."""


def run_case(arguments: tuple[str, ...], folder: Path, output: int) -> NoReturn:
    """Be the command: in a session of its own, with bounds, nothing on standard input, and all output in one file."""
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _bound()
        _start_nothing()
        sys.argv = ["lorrery", *arguments]
        app.run()
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = CAUGHT
    _end(code if isinstance(code, int) else int(code is not None))


def _bound() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, 2 * CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, _out_of_time)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(WALL_SECONDS)


def _out_of_time(number: int, frame: FrameType | None) -> NoReturn:
    stack = traceback.extract_stack(frame)
    if any(part in one.filename for one in stack for part in _WORK):
        _end(AT_WORK)
    print(f"out of time after {signal.Signals(number).name}\n", *traceback.format_list(stack), file=sys.stderr)
    _end(TOO_LONG)


def _start_nothing() -> None:
    """Put an end where services, or processes that share the work, would start: the flags have been judged by then."""

    def started(*_arguments: object, **_given: object) -> NoReturn:
        _end(STARTED)

    def at_work(*_arguments: object, **_given: object) -> NoReturn:
        _end(AT_WORK)

    ProcessPoolExecutor.__init__ = at_work  # type: ignore[method-assign, assignment]
    ForkServer.__enter__ = lambda self: self  # type: ignore[method-assign]
    ForkServer.__exit__ = lambda *_arguments: None  # type: ignore[method-assign]
    LocalCluster.__aenter__ = started  # type: ignore[method-assign, assignment]
    WebServer.listen = started  # type: ignore[method-assign, assignment]
    lockstep.serve = started  # type: ignore[assignment]


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
