"""Runs the points of a sweep: in processes of this machine, on a Dask cluster, on a Ray cluster.

Clusters are reached through joblib, whose backends distribute points and return outcomes as they end. This module adds
what a sweep needs and they lack: a point that kills its process fails alone.
"""

import importlib
import os
import re
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import need_extra
from lorrery.service.linux import num_cores
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.sweep.flags import PROCESSES, Where
from lorrery.simulator.sweep.outcome import Outcome, attempt, figures_of
from lorrery.simulator.sweep.points import Point, code_digest
from lorrery.simulator.sweep.processes import run_in_processes

__all__ = ["BACKENDS", "Run", "count", "open_backend", "run_point"]

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
    yield partial(run_in_processes, num_processes=num_processes, run=run_point), count(num_processes, "process")


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


def run_point(point: Point) -> Outcome:
    """Run a point in this process."""
    run, inputs = point.run, point.inputs
    assert run is not None
    assert inputs is not None

    def simulate() -> Outcome:
        report = SimulatedRun(run.settings, run.options, run.simulation).run()
        if (changed := inputs.check_unchanged()) is not None:
            return Outcome(point.key, error=changed)
        return Outcome(point.key, figures_of(report), warnings=report.warnings)

    return attempt(point.key, simulate)


def run_remotely(point: Point, expected_code: str) -> Outcome:
    """Run a point in a process of a cluster, if that has the same program."""
    if code_digest() != expected_code:
        return Outcome(point.key, error="the cluster's worker runs another version of lorrery than this machine")
    return run_point(point)


def _first_sentence(error: BaseException) -> str:
    return re.split(r"\.\s|\n", str(error).strip())[0] or type(error).__name__


def count(number: int, noun: str) -> str:
    """Return a count with its noun, as `1 process` or `2,000 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
