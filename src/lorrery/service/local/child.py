"""Run a command that dies with the process that started it: `python child.py PARENT_PID EXECUTABLE ARGUMENT...`.

The kernel sends SIGKILL when the parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG; kept across execve). Setting
it here, after fork, needs no Python code between fork and exec in the parent, where other threads may hold locks. This
file imports the standard library only, so that `python -I -S` starts it in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Tie this process to its parent, whose pid must be `parent`; exit silently if the parent has already ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before prctl


def main() -> None:
    """Tie this process to its parent, then exec the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    os.execv(command[0], command)  # noqa: S606  the caller's own command line


if __name__ == "__main__":
    main()
