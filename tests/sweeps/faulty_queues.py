"""Queues from outside the tree that a sweep must survive; named in settings as `tests.sweeps.faulty_queues:Deadly`."""

import os
import signal

from lorrery.scheduler.core.queues.fifo import Fifo


class Deadly(Fifo):
    """Ends its process at once, as the kernel does when memory is short."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Fifo):
    """Has a fault."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("no such luck")
