"""Queues from outside the tree that a sweep must survive: `tests.simulator.faulty_queues:Deadly` in settings."""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.entry_point import ECHO_SECONDS


class Deadly(Fifo):
    """Ends its process at once, as the kernel does when memory is short."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Fifo):
    """Has a fault."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("no such luck")


class Gated(Fifo):
    """Says in a FIFO that it is there, then waits until nobody locks a file; where they are, the environment says."""

    FIFO, GATE = "GATED_QUEUE_FIFO", "GATED_QUEUE_GATE"

    def __init__(self, *_arguments: object, **_options: object) -> None:
        with Path(os.environ[self.FIFO]).open("wb", buffering=0) as fifo:
            fifo.write(b".")
        with Path(os.environ[self.GATE]).open("rb") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
        super().__init__()


class AnswersNone(Fifo):
    """Admits, and forgets to answer."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> None:  # type: ignore[override]
        """Admit as usual."""
        super().admit(admission, running, at_ps)


class Exits(Fifo):
    """Ends its process as if all had gone well."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """End it."""
        sys.exit(0)


class Remembers(Fifo):
    """Keeps state in its class: it admits more slowly with each call of the process."""

    num_calls = 0

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Admit at every hundredth call at first, then less often."""
        Remembers.num_calls += 1
        return (
            [] if Remembers.num_calls % (100 + Remembers.num_calls // 50) else super().admit(admission, running, at_ps)
        )

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Be asked before every step."""
        return 1

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Be asked each millisecond while nothing runs."""
        return at_ps + 10**9


class Interrupts(Fifo):
    """Ends its process as Ctrl-C does."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """End it."""
        raise KeyboardInterrupt


class GeneratorExits(Fifo):
    """Raises what is no `Exception`, as it would inside of a generator that is closed."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Raise it."""
        raise GeneratorExit("gone")


class GeneratorExitsAtOnce(Fifo):
    """Raises it while it is made."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise GeneratorExit("gone")


class LoopsWhileInterrupted(Fifo):
    """Never returns, while a person presses Ctrl-C twice, or an echo of the first arrives (`timeout`)."""

    ends_by = signal.SIGINT

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Send both signals and loop."""
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        end = time.monotonic() + 2 * ECHO_SECONDS
        while time.monotonic() < end:
            pass
        sys.stderr.write("looping\n")
        sys.stderr.flush()
        signal.raise_signal(self.ends_by)
        while True:
            pass


class LoopsUntilTerminated(LoopsWhileInterrupted):
    """The same with SIGTERM as the second signal."""

    ends_by = signal.SIGTERM


class ExitsAtOnce(Fifo):
    """Ends its process while it is made."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        sys.exit("no such file")
