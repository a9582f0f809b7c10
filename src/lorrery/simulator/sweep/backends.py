"""Runs the points of a sweep: in processes of this machine, on a Dask cluster, on a Ray cluster.

Clusters are reached through joblib, whose backends distribute points and return outcomes as they end. This module adds
what a sweep needs and they lack: a point that kills its process fails alone.

Processes stay alive between points. They are forked from this process, which has imported what a point needs: a start
takes some milliseconds, an import two seconds. Each has its own pipe, so a killed process (as by the kernel when memory
is short) fails only the point that it ran; another process takes its place. (`concurrent.futures` and joblib lose all
running points then.) A process that has grown by `MOST_GROWTH_BYTES` is replaced after its point, so that memory is
returned; and one that has run a plug-in, so that what the plug-in keeps in its module or its class is as imported at
the start of each point.
"""

import gc
import importlib
import os
import re
import signal
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import need_extra
from lorrery.service.linux import START_METHOD, die_with, num_cores, resident_bytes
from lorrery.simulator.sweep.flags import PROCESSES, Where
from lorrery.simulator.sweep.outcome import Outcome, run_point, run_remotely
from lorrery.simulator.sweep.points import Point, code_digest

__all__ = ["BACKENDS", "Run", "count", "num_cores", "open_backend", "run_in_processes"]

_CONNECT_SECONDS = 10.0
_WORKERS_SECONDS = 60
"""Seconds a cluster may take to get its first worker, for clusters that grow on demand."""


Points = Iterable[Point]
Run = Callable[[Points], Generator[Outcome]]
"""Runs points, pulling the next one when it can; yields outcomes as they end. Closing it ends running points."""


@contextmanager
def open_backend(where: Where, num_points: int) -> Iterator[tuple[Run, str]]:
    """Open a backend; yield a function that runs points there, and a description of the place for the terminal.

    Args:
        where: to run.
        num_points: most points; a local backend starts no more processes than that.

    Raises:
        SettingsError: unknown backend.
        LorreryError: a missing package, or no cluster.
    """
    if where.backend not in BACKENDS:
        raise SettingsError(f"--backend {where.backend}: expected one of {', '.join(BACKENDS)}")
    if where.backend_address is not None and where.backend == PROCESSES:
        raise SettingsError(
            f"--backend-address {where.backend_address}: {PROCESSES} are of this machine; name --backend"
        )
    with BACKENDS[where.backend](where.backend_address, min(where.jobs or num_points, num_points)) as opened:
        yield opened


@contextmanager
def _processes(_address: str | None, jobs: int) -> Iterator[tuple[Run, str]]:
    num_processes = min(jobs, num_cores())
    yield partial(run_in_processes, num_processes=num_processes), count(num_processes, "process")


@dataclass(frozen=True, slots=True)
class _Pool:
    """A cluster that joblib can use.

    Attributes:
        backend: joblib's.
        num_jobs: joblib's `n_jobs`; -1: all cores.
        pre_dispatch: joblib's: number of points dispatched in advance.
    """

    backend: Any
    num_jobs: int
    pre_dispatch: str | int

    def run(self, points: Points) -> Generator[Outcome]:
        """Run points there, if its workers have the same program as this machine."""
        parallel_class = importlib.import_module("joblib").Parallel
        waiting = iter(points)
        handed_out: dict[str, Point] = {}
        run_there = partial(run_remotely, expected_code=code_digest())

        def hand_out() -> Iterator[Any]:
            for point in waiting:
                handed_out[point.key] = point
                yield run_there, (point,), {}

        while True:
            parallel: Any = parallel_class(
                n_jobs=self.num_jobs,
                backend=self.backend,
                batch_size=1,  # points take long, and each must be stored as soon as it is done
                pre_dispatch=self.pre_dispatch,
                return_as="generator_unordered",
            )
            try:
                for outcome in parallel(hand_out()):
                    del handed_out[outcome.key]
                    yield outcome
                return
            except Exception as error:
                # The backend itself broke; the dispatched points are lost, and the rest starts anew.
                if not handed_out:
                    raise LorreryError(f"the sweep cannot run: {_first_sentence(error)}") from error
                why = f"its process was lost: {_first_sentence(error)}"
                yield from (Outcome(key, error=why) for key in handed_out)
                handed_out.clear()


@contextmanager
def _dask(address: str | None, jobs: int) -> Iterator[tuple[Run, str]]:
    need_extra("dask", "--backend dask")
    from dask import config
    from joblib._dask import DaskDistributedBackend

    distributed: Any = importlib.import_module("distributed")

    class Backend(DaskDistributedBackend):  # type: ignore[misc]  # joblib has no types
        """joblib's backend, which would wait forever for a point that the cluster has given up."""

        def submit(self, func: Any, callback: Any = None) -> Any:  # noqa: ANN401  as joblib's
            (point,) = func.items[0][1]
            future = super().submit(func, callback)

            def look(done: Future[object]) -> None:
                if (error := done.exception()) is not None:
                    callback([Outcome(point.key, error=f"its Dask worker was lost: {_first_sentence(error)}")])

            future.add_done_callback(look)
            return future

        def effective_n_jobs(self, n_jobs: int) -> int:
            # With one job joblib would run the points here, not on the cluster.
            return max(2, int(super().effective_n_jobs(n_jobs)))

    address = address or config.get("scheduler-address", None)
    with ExitStack() as stack:
        with _deaf_children():
            cluster = address or stack.enter_context(
                distributed.LocalCluster(n_workers=min(jobs, num_cores()), threads_per_worker=1, dashboard_address=None)
            )
        try:
            client = stack.enter_context(distributed.Client(cluster, timeout=_CONNECT_SECONDS, set_as_default=False))
        except (OSError, ValueError) as error:
            raise LorreryError(f"--backend dask: no scheduler at {address}: {error}") from None
        backend = Backend(client=client, wait_for_workers_timeout=_WORKERS_SECONDS)
        num_there = sum(client.ncores().values())
        # All at once, so that an elastic cluster sees the whole amount of work.
        pool = _Pool(backend, -1, jobs)
        yield pool.run, f"{count(num_there, 'core')} of the Dask cluster at {client.scheduler.address}"


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Make child processes ignore Ctrl-C, which a terminal sends to the whole group: this process ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ray(address: str | None, jobs: int) -> Iterator[tuple[Run, str]]:
    need_extra("ray", "--backend ray")
    ray: Any = importlib.import_module("ray")
    ray_backend: Any = importlib.import_module("ray.util.joblib.ray_backend").RayBackend
    # Ray's backend returns outcomes one by one like others; it only does not declare so.
    backend: Any = type("Backend", (ray_backend,), {"supports_return_generator": True})
    address = address or os.environ.get("RAY_ADDRESS")
    own = {} if address else {"num_cpus": min(jobs, num_cores()), "include_dashboard": False}
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LorreryError(f"--backend ray: no cluster at {address}: {error}") from None
    try:
        num_there = int(ray.cluster_resources().get("CPU", 0))
        words = f"{count(num_there, 'core')} of the Ray cluster{f' at {address}' if address else ''}"
        yield _Pool(backend(), min(jobs, num_there), "2 * n_jobs").run, words
    finally:
        ray.shutdown()


BACKENDS: dict[str, Callable[[str | None, int], AbstractContextManager[tuple[Run, str]]]] = {
    PROCESSES: _processes,
    "dask": _dask,
    "ray": _ray,
}
"""--backend name -> opens it, from an address and the most concurrent points."""


def _first_sentence(error: BaseException) -> str:
    return re.split(r"\.\s|\n", str(error).strip())[0] or type(error).__name__


def count(number: int, noun: str) -> str:
    """Return a count with its noun, as `1 process` or `2,000 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


MOST_GROWTH_BYTES = 256 << 20

_PROCESSES = get_context("fork") if START_METHOD == "fork" else get_context("spawn")


def run_in_processes(
    points: Iterable[Point], num_processes: int, run: Callable[[Point], Outcome] = run_point
) -> Generator[Outcome]:
    """Run points in parallel; yield their outcomes as they end. Closing it kills running points.

    Args:
        points: the next is taken when a process is free.
        num_processes: most processes; they start as needed.
        run: must not raise.
    """
    waiting = iter(points)
    free: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
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


def _start(point: Point, free: "list[_Worker]", run: Callable[[Point], Outcome]) -> "_Worker":
    """Give a point to a free process, or to a new one if there is none, or the free ones were killed."""
    while free:
        worker = free.pop()
        if worker.start(point):
            return worker
        worker.kill()
    worker = _Worker(run)
    worker.start(point)  # if this process is killed at once too, `finish` reports it
    return worker


class _Worker:
    """One process, as seen by its parent.

    Attributes:
        pipe: to it.
        goes_on: whether it can take another point.
    """

    def __init__(self, run: Callable[[Point], Outcome]) -> None:
        self.pipe, theirs = _PROCESSES.Pipe()
        self.goes_on = True
        self._point: Point | None = None
        self._process: BaseProcess = _PROCESSES.Process(target=_serve, args=(theirs, run, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Python warns about threads that hold locks; the child only computes and takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def start(self, point: Point) -> bool:
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


def _serve(pipe: Connection, run: Callable[[Point], Outcome], parent: int) -> None:
    """Main loop of a process: run point after point, until killed, grown or changed by a plug-in."""
    die_with(parent)
    # Ctrl-C reaches the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # keeps the collector from touching pages shared with the parent
    most_bytes = resident_bytes() + MOST_GROWTH_BYTES
    goes_on = True
    while goes_on:
        point: Point = pipe.recv()
        outcome = run(point)
        gc.collect()
        goes_on = resident_bytes() <= most_bytes and not (point.inputs is not None and point.inputs.modules)
        pipe.send((outcome, goes_on))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    hint = "; was memory short?" if exit_code == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-exit_code).name}{hint}"
