"""Signals to a command that runs a local cluster, such as Ctrl-C: they cancel it, which stops the cluster."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from lorrery.service.interrupt import handled_by, stop_signals


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """Make each of `stop_signals` cancel the current task; yield the list of signals received.

    The first signal thus ends the run, and a second one ends the orderly stop.
    """
    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    with handled_by(loop, on_signal, stop_signals()):
        yield received
