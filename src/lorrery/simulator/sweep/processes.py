"""Runs work in processes of this machine, each of which can be killed without harm to the others.

Processes stay alive between runs. They are forked from this process, which has imported what a run needs: a start takes
some milliseconds, an import two seconds. Each has its own pipe, so a killed process (as by the kernel when memory is
short) fails only the run that it had; another process takes its place. (`concurrent.futures` and joblib lose all
running work then.) A process that has grown by `MOST_GROWTH_BYTES` is replaced after its run, so that memory is
returned; and one that has run a plug-in, so that what the plug-in keeps in its module or its class is as imported at
the start of each run.
"""

import gc
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, Protocol, TypeVar

from lorrery.service.linux import START_METHOD, die_with, resident_bytes
from lorrery.simulator.sweep.outcome import Outcome

__all__ = ["Work", "run_in_processes"]

MOST_GROWTH_BYTES = 256 << 20

_PROCESSES = get_context("fork") if START_METHOD == "fork" else get_context("spawn")


class Work(Protocol):
    """A run that a process is given, such as a point."""

    @property
    def key(self) -> str:
        """Of its outcome."""
        ...

    @property
    def has_plug_in(self) -> bool:
        """Whether it runs code from outside the tree."""
        ...


W = TypeVar("W", bound=Work)


def run_in_processes(points: Iterable[W], num_processes: int, run: Callable[[W], Outcome]) -> Generator[Outcome]:
    """Run points in parallel; yield their outcomes as they end. Closing it kills running points.

    Args:
        points: the next is taken when a process is free.
        num_processes: most processes; they start as needed.
        run: must not raise.
    """
    waiting = iter(points)
    free: list[_Worker[W]] = []
    busy: dict[Connection, _Worker[W]] = {}
    try:
        while True:
            while len(busy) < num_processes and (point := next(waiting, None)) is not None:
                worker = _start(point, free, run)
                busy[worker.pipe] = worker
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                outcome = worker.finish()
                if worker.goes_on:
                    free.append(worker)
                yield outcome
    finally:
        for worker in (*free, *busy.values()):
            worker.kill()


def _start(point: W, free: "list[_Worker[W]]", run: Callable[[W], Outcome]) -> "_Worker[W]":
    """Give a point to a free process, or to a new one if there is none, or the free ones were killed."""
    while free:
        worker = free.pop()
        if worker.start(point):
            return worker
        worker.kill()
    worker = _Worker(run)
    worker.start(point)  # if this process is killed at once too, `finish` reports it
    return worker


class _Worker(Generic[W]):
    """One process, as seen by its parent.

    Attributes:
        pipe: to it.
        goes_on: whether it can take another point.
    """

    def __init__(self, run: Callable[[W], Outcome]) -> None:
        self.pipe, theirs = _PROCESSES.Pipe()
        self.goes_on = True
        self._point: W | None = None
        self._process: BaseProcess = _PROCESSES.Process(target=_serve, args=(theirs, run, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Python warns about threads that hold locks; the child only computes and takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def start(self, point: W) -> bool:
        """Send a point; return whether the process was alive to take it."""
        self._point = point
        try:
            self.pipe.send(point)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def finish(self) -> Outcome:
        """Return what the process sent, or how it ended."""
        assert self._point is not None
        try:
            outcome, self.goes_on = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.goes_on = False
            self._process.join()
            outcome = Outcome(self._point.key, error=_how_it_ended(self._process.exitcode))
        if not self.goes_on:
            self._process.join()
            self.pipe.close()
        assert isinstance(outcome, Outcome)
        return outcome

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, run: Callable[[W], Outcome], parent: int) -> None:
    """Main loop of a process: run point after point, until killed, grown or changed by a plug-in."""
    die_with(parent)
    # Ctrl-C reaches the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # keeps the collector from touching pages shared with the parent
    most_bytes = resident_bytes() + MOST_GROWTH_BYTES
    goes_on = True
    while goes_on:
        point: W = pipe.recv()
        outcome = run(point)
        gc.collect()
        goes_on = resident_bytes() <= most_bytes and not point.has_plug_in
        pipe.send((outcome, goes_on))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    hint = "; was memory short?" if exit_code == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-exit_code).name}{hint}"
