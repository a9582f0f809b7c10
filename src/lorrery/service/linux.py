"""What only Linux can do, and what is done in its place elsewhere; standard library only.

Elsewhere (macOS) commands that need no services work in full. A cluster's processes are not tied to their parent there:
one that is killed leaves its children, which are to be ended by hand. Timers (`worker.timekeeping`) fall back to the
event loop's by themselves.

As a program it runs a command that dies with the process that started it: `python linux.py PARENT_PID EXECUTABLE
ARGUMENT...`. The kernel sends SIGKILL when the parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG; kept across
execve). Setting it there, after fork, needs no Python code between fork and exec in the parent, where other threads may
hold locks; `python -I -S` starts this file in a few milliseconds.
"""

import ctypes
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Literal

PR_SET_PDEATHSIG = 1
_IS_LINUX = sys.platform == "linux"
START_METHOD: Literal["fork", "spawn"] = "fork" if _IS_LINUX else "spawn"
"""Of processes that compute: a fork shares what has been imported; macOS' libraries do not survive one."""


def die_with(parent: int) -> None:
    """Tie this process to its parent, whose pid must be `parent`; exit silently if the parent has already ended."""
    if _IS_LINUX:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before prctl


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if _IS_LINUX else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the memory that this process has in use; 0: not known here."""
    if not _IS_LINUX:
        return 0
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_queue_delay_seconds() -> float | None:
    """Return how long this thread was ready but had no core (schedstat's second field); None: not known here."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def process_started(pid: int) -> str | None:
    """Return when a process was started, in ticks since boot (elsewhere empty); None: it has ended, or never was."""
    if not _IS_LINUX:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        # proc_pid_stat(5): the name, field 2, may contain any character; field 3 is the state, field 22 the start.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def process_descriptor(pid: int) -> int | None:
    """Return a descriptor that can be read once a process has ended (pidfd_open(2)); None: there is none here.

    Raises:
        ProcessLookupError: it has ended.
    """
    return os.pidfd_open(pid) if _IS_LINUX else None


def machine() -> str:
    """Return a name that processes share exactly if they see each other's pids."""
    if not _IS_LINUX:
        return platform.node()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def main() -> None:
    """Tie this process to its parent, then exec the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    os.execv(command[0], command)  # noqa: S606  the caller's own command line


if __name__ == "__main__":
    main()
