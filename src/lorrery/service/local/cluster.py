"""A cluster of real processes on this machine, for `lorrery up`, `lorrery demo` and the tests.

One process per service: sharing an event loop would stretch the mock GPUs' steps. Every address may have port 0; each
service announces its actual addresses in its `--announce` file, and they are passed on to the others. Services are
stopped in the order of a request's path: router, workers, scheduler. They are forked from a process that has imported
them, and none outlives this one: see `local.processes`.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio
from grpc_health.v1 import health_pb2

from lorrery.service.entry_point import NO_SCHEDULER_TO_COME
from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import temporary_folder
from lorrery.service.local.overrides import WorkerProcesses, on_free_ports, taken_again
from lorrery.service.local.processes import ForkServer, ServiceProcess, Show, last_words
from lorrery.service.network.channel import open_channel
from lorrery.service.network.credentials import ClusterToken
from lorrery.service.settings.cluster import Settings, load
from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc

START_SECONDS = 60.0
"""How long a process may take to listen; a loaded machine imports slowly."""
READY_SECONDS = 30.0
"""How long the cluster may take to serve after that, in addition to the workers' own start-up time."""
STOP_MARGIN_SECONDS = 3.0
"""Time beyond the drain limit after which a process is killed."""
POLL_SECONDS = 0.02
PAGE = "web"
"""Name of the process that serves the page."""


class LocalCluster:
    """A scheduler, workers and a router; `async with` starts them, waits until they serve, and stops them.

    Use it from the main thread: its processes die with the thread that started them.

    Args:
        config: settings file; unset: `LORRERY_CONFIG` or the defaults.
        overrides: `section.key=value`, as for `--set`.
        num_workers: number of worker processes, whose fixed ports count up from those in the settings. None: as many as
            the settings' `[[workers]]` have, else one.
        show: called with every line that a process prints.
        free_ports: listen on free ports instead of those in the settings, except where `overrides` set them.
        fork_server: a running one; unset: the cluster starts its own.
        on_change: called when a process starts to listen, and when one ends.
        page: whether to serve the page of the cluster too (`lorrery web`).

    Raises:
        SettingsError: the settings are wrong.
        LorreryError: on entry, a process ended or did not become ready in time.
    """

    def __init__(
        self,
        config: Path | None = None,
        overrides: Sequence[str] = (),
        num_workers: int | None = None,
        *,
        show: Show = lambda _name, _line: None,
        free_ports: bool = False,
        fork_server: ForkServer | None = None,
        on_change: Callable[[], None] = lambda: None,
        page: bool = False,
    ) -> None:
        self.settings: Settings = load(config, overrides)
        if free_ports:
            overrides = [*on_free_ports(self.settings), *overrides]
            self.settings = load(config, overrides)
        count = self.settings.num_worker_processes(num_workers, 1)
        self._workers = WorkerProcesses(self.settings, count)
        self._start_up_seconds = max(kind.worker.startup_seconds for kind, _ in self._workers.kinds)
        self.processes: dict[str, ServiceProcess] = {}
        self._config = config
        self._overrides = list(overrides)
        self._show = show
        self._on_change = on_change
        self._page = page
        self._page_port = ["--port", "0"] if free_ports else []
        self._fork_server = fork_server
        self._resources = contextlib.ExitStack()
        self._announcements: Path | None = None
        self._ended: asyncio.Queue[ServiceProcess] = asyncio.Queue()
        self._ready = False

    async def __aenter__(self) -> Self:
        """Start all processes, and return once the router and all workers serve."""
        if self._fork_server is None:
            self._fork_server = self._resources.enter_context(ForkServer())
        self._announcements = self._resources.enter_context(temporary_folder("processes"))
        try:
            await self._start("scheduler", "scheduler", [])
            await self.listening("scheduler")
            address = self.processes["scheduler"].grpc
            for name in self.worker_processes:
                await self._start(name, "worker", self._workers.overrides(name, address))
            await self._start("router", "router", [f"router.schedulers={json.dumps([address])}"])
            for name in self.processes:
                await self.listening(name)
            if self._page:
                await self._start(PAGE, "view", [], [*self._page_port, "--target", self.router_address])
                await self.listening(PAGE)
            for name in [*self.worker_processes, "router"]:
                await self.serving(name)
        except BaseException:
            await self.kill_all()
            raise
        self._ready = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain and stop all processes; if cancelled, kill those that still run."""
        try:
            await self.drain_all()
        finally:
            await self.kill_all()

    @property
    def router_address(self) -> str:
        """HOST:PORT for clients."""
        return self.processes["router"].grpc

    @property
    def http_address(self) -> str:
        """HOST:PORT of the router's HTTP edge."""
        return self.processes["router"].http

    @property
    def page_address(self) -> str:
        """HOST:PORT of the page; empty: no page."""
        return self.processes[PAGE].http if PAGE in self.processes else ""

    @property
    def engine_addresses(self) -> dict[str, str]:
        """HOST:PORT of the router's engine ports, by setting: `vllm_grpc`, `engines[0]`."""
        return self.processes["router"].others

    @property
    def scheduler_address(self) -> str:
        """HOST:PORT of the scheduler, for workers and routers."""
        return self.processes["scheduler"].grpc

    @property
    def worker_kinds(self) -> list[tuple[Settings, int]]:
        """The settings of each kind of worker, and the number of workers of that kind."""
        return self._workers.kinds

    @property
    def worker_processes(self) -> dict[str, tuple[str, ...]]:
        """`worker-0`, `worker-1`, ... -> names of the process's workers: its own name, or one name per GPU."""
        return self._workers.workers

    @property
    def worker_names(self) -> list[str]:
        """The workers: `worker-0`, `worker-1`, ..., or `worker-0.0`, `worker-0.1`, ..."""
        return [name for names in self.worker_processes.values() for name in names]

    def metrics_address(self, name: str) -> str:
        """Return HOST:PORT of a process's Prometheus endpoint."""
        return self.processes[name].metrics

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process. If that ends it, the exit counts as expected."""
        process = self.processes[name]
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            process.exit_expected = True
        process.signal(number)

    async def ended(self, name: str) -> int:
        """Wait for the end of a process; return its exit code, -n after signal n."""
        return await self.processes[name].process.wait()

    async def restart(self, name: str, *, wait: bool = True) -> None:
        """Start a killed process again on its previous addresses.

        Args:
            name: of the process.
            wait: return once it serves, rather than once it listens.
        """
        old = self.processes[name]
        await old.process.wait()
        if name == PAGE:
            arguments = ["--port", old.http.rpartition(":")[2], "--target", self.router_address]
            await self._start(name, old.service, [], arguments)
        else:
            await self._start(name, old.service, [*old.overrides, *taken_again(self.settings, old)])
        # Set at once: its addresses are passed on while it starts, and it may end before it announces them.
        self.processes[name].take_addresses(old)
        await self.listening(name)
        if wait and name != PAGE:
            await self.serving(name)

    async def add(self, name: str, service: str, overrides: Sequence[str] = ()) -> None:
        """Start an additional process, such as `router-1`, and return once it listens.

        It is stopped together with the others of its service.
        """
        await self._start(name, service, list(overrides))
        await self.listening(name)

    async def start_worker(self, start_up_seconds: float, group: int | None = None, name: str | None = None) -> str:
        """Start an additional worker process; return its name.

        Args:
            start_up_seconds: device seconds until its weights are loaded.
            group: index in `[[workers]]`; None: there are no groups.
            name: of an ended process that it replaces; None: the group's lowest free name.
        """
        name = name or self._workers.free_name(group, self._is_free)
        overrides = self._workers.overrides(name, self.scheduler_address)
        await self._start(name, "worker", [*overrides, f"worker.startup_seconds={start_up_seconds}"])
        return name

    def drain(self, name: str) -> None:
        """Make a process drain and end: SIGTERM."""
        self.kill(name, signal.SIGTERM)

    def _is_free(self, name: str) -> bool:
        """Return whether a name is free; a process that ended unexpectedly keeps it, since it may be restarted."""
        process = self.processes.get(name)
        return process is None or (process.exit_code is not None and process.exit_expected)

    async def remove(self, name: str) -> int:
        """Drain and remove a process; return its exit code.

        It is killed if it does not end in time.
        """
        process = self.processes[name]
        process.exit_expected = True
        process.signal(signal.SIGTERM)
        drain_seconds = getattr(self.settings, process.service).drain_seconds
        await self._wait_for([process], drain_seconds + STOP_MARGIN_SECONDS)
        process.kill()
        code = await process.process.wait()
        await self._wait_for([process], None)
        del self.processes[name]
        self._on_change()
        return code

    async def unexpected_exit(self) -> ServiceProcess:
        """Wait for the unexpected end of a process."""
        return await self._ended.get()

    async def serving(self, name: str, timeout_seconds: float | None = None) -> None:
        """Wait until a process's health is SERVING.

        Raises:
            LorreryError: it ended, or took longer than `timeout_seconds` (unset: the time limit of a start).
        """
        if timeout_seconds is None:
            timeout_seconds = READY_SECONDS + self._start_up_seconds * self.settings.time_scale
        process = self.processes[name]
        async with self._channel(process.grpc) as channel, self._bounded(process, "serve", timeout_seconds):
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await self._check_alive(process)
                await asyncio.sleep(POLL_SECONDS)

    @contextlib.asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        channel = open_channel(address, self.settings.client_tls)
        try:
            yield channel
        finally:
            await channel.close()

    async def _start(self, name: str, service: str, overrides: list[str], further: Sequence[str] = ()) -> None:
        assert self._announcements is not None, "start it with `async with`"
        assert self._fork_server is not None
        announce = self._announcements / f"{name}.json"
        announce.unlink(missing_ok=True)
        arguments = ["--announce", str(announce), *further]
        if self._config is not None:
            arguments += ["--config", str(self._config)]
        for override in [*self._overrides, *overrides]:
            arguments += ["--set", override]
        process = await self._fork_server.start(service, arguments)
        entry = ServiceProcess(name, service, overrides, process, announce)
        before, self.processes[name] = self.processes.get(name), entry
        if before is not None:
            before.succeeded.set()
        entry.watcher = asyncio.create_task(self._watch(entry), name=f"watch {name}")

    async def _watch(self, entry: ServiceProcess) -> None:
        await entry.pass_on(self._show)
        self._on_change()
        if not entry.exit_expected:
            self._ended.put_nowait(entry)

    async def listening(self, name: str) -> None:
        """Wait until a started process listens, and store the addresses that it announces.

        Raises:
            LorreryError: it ended, or took too long.
        """
        process = self.processes[name]
        async with self._bounded(process, "listen", START_SECONDS):
            while not process.announce.exists():
                await self._check_alive(process)
                await asyncio.sleep(POLL_SECONDS)
        process.read_announcement()
        self._on_change()

    @contextlib.asynccontextmanager
    async def _bounded(self, process: ServiceProcess, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise LorreryError(f"{process.name} did not {what} within {seconds:g} s{last_words(process)}") from None

    async def _check_alive(self, process: ServiceProcess) -> None:
        others = {} if self._ready else self.processes
        for other in {process.name: process, **others}.values():
            if other.exit_code is not None and (other is process or not other.exit_expected):
                await self._wait_for([other], STOP_MARGIN_SECONDS)  # for the rest of its output
                when = f"before {'it' if self._ready else 'the cluster'} was ready"
                what = f"{other.name} ended with exit code {other.exit_code} {when}"
                raise LorreryError(what + last_words(other))

    async def drain_all(self) -> None:
        """Drain and stop all processes, in order; each is killed if it does not end in time."""
        schedulers, workers, routers = map(self._of_service, ("scheduler", "worker", "router"))
        telling = [
            asyncio.create_task(
                _tell_of_workers(workers, self.scheduler_address, self.settings), name="tell of workers"
            ),
            asyncio.create_task(_tell_of_schedulers(schedulers, routers), name="tell of schedulers"),
        ]
        try:
            await self._stop("view", 0.0)
            await self._stop("router", self.settings.router.drain_seconds)
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
        await self._stop("worker", self.settings.worker.drain_seconds)
        await self._stop("scheduler", self.settings.scheduler.drain_seconds)

    def _of_service(self, service: str) -> list[ServiceProcess]:
        return [entry for entry in self.processes.values() if entry.service == service]

    async def _stop(self, service: str, drain_seconds: float) -> None:
        """Stop the processes of a service, with `drain_seconds` to drain."""
        entries = self._of_service(service)
        for entry in entries:
            entry.exit_expected = True
            entry.signal(signal.SIGTERM)
        await self._wait_for(entries, drain_seconds + STOP_MARGIN_SECONDS)
        for entry in entries:
            if entry.exit_code is None:
                self._show(entry.name, "did not stop in time, and is killed")
                entry.signal(signal.SIGKILL)

    async def kill_all(self) -> None:
        """Kill all remaining processes, wait for their ends, and remove their files: none can be restarted."""
        for entry in reversed(self.processes.values()):  # a router that outlived its scheduler would log so
            if entry.exit_code is None:
                entry.exit_expected = True
                entry.signal(signal.SIGKILL)
        try:
            await self._wait_for(list(self.processes.values()), None)
        finally:
            self._resources.close()

    async def _wait_for(self, entries: list[ServiceProcess], seconds: float | None) -> None:
        watchers = [entry.watcher for entry in entries if entry.watcher is not None]
        if watchers:
            await asyncio.wait(watchers, timeout=seconds)


_TIMEOUT_SECONDS = 5.0


async def _tell_of_workers(workers: Collection[ServiceProcess], scheduler: str, settings: Settings) -> None:
    """Wait for the end of all worker processes, and tell the scheduler.

    If that fails, requests wait as usual.

    Args:
        workers: all that were started, including those that have ended.
        scheduler: HOST:PORT.
        settings: of the cluster.
    """
    await _all_ended(workers)
    channel = open_channel(scheduler, settings.client_tls)
    try:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        metadata = ClusterToken(settings.cluster_token).metadata()
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = scheduler_pb2.ExpectNoWorkerRequest()
            await stub.ExpectNoWorker(request, timeout=_TIMEOUT_SECONDS, metadata=metadata)
    finally:
        await channel.close()


async def _tell_of_schedulers(schedulers: Collection[ServiceProcess], routers: Collection[ServiceProcess]) -> None:
    """Wait for the end of all scheduler processes, and tell the running routers."""
    await _all_ended(schedulers)
    for router in routers:
        router.signal(NO_SCHEDULER_TO_COME)


async def _all_ended(processes: Collection[ServiceProcess]) -> None:
    await asyncio.gather(*[one.process.wait() for one in processes])
