"""Queues from outside the tree that a sweep must survive; named in settings as `tests.sweeps.faulty_queues:Deadly`."""

import fcntl
import os
import signal
from pathlib import Path

from lorrery.scheduler.core.queues.fifo import Fifo


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
