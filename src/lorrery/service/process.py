"""The life of a service's process: start, serve, drain, stop.

Start: signal handlers, metrics endpoint, gRPC server, announcement, then the service's own background work, which
reports when it is ready. On SIGTERM, SIGINT or SIGHUP: health turns NOT_SERVING, the service drains within its time
limit, its background work is cancelled, the server stops, and the exit code is 0. A second signal ends the process at
once.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import grpc.aio
import typer
from prometheus_client import CollectorRegistry

from lorrery.service.commands import Command, command_app
from lorrery.service.entry_point import exit_on_signals, handled_by, stop_signals
from lorrery.service.errors import LorreryError, SettingsError, exit_in_words
from lorrery.service.files.writing import write_whole
from lorrery.service.installed import VERSION
from lorrery.service.network.calls import CallGuard
from lorrery.service.network.server import Health, at_port, bind, dialable, enable_reflection, new_server
from lorrery.service.settings.reading import ProcessSettings
from lorrery.service.tasks import loop_factory
from lorrery.service.telemetry.log import configure, get_logger
from lorrery.service.telemetry.metrics import ServiceState, new_registry, serve_metrics
from lorrery.service.telemetry.tracing import Tracer

FILES_LOOK_SECONDS = 1.0
FILES_WARN_SECONDS = 60.0

_log = get_logger("service.network.open_files")


def can_open_file() -> bool:
    """Return whether this process can open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


async def warn_when_no_file_can_be_opened() -> None:
    """Check every `FILES_LOOK_SECONDS` and warn at most every `FILES_WARN_SECONDS`, until cancelled.

    Neither of a process's servers reports that it is out of file descriptors. Without a free one uvloop accepts a
    connection with a reserved one and closes it unanswered; gRPC's core keeps the connection queued and retries.
    Opening a file fails in both situations, so that is the test.
    """
    said_at = -FILES_WARN_SECONDS
    while True:
        if not can_open_file() and (now := time.monotonic()) >= said_at + FILES_WARN_SECONDS:
            said_at = now
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.warning(
                "out_of_file_descriptors",
                limit=limit,
                effect="new connections are closed unanswered, or wait",
                cure="raise ulimit -n, or lower router.http_max_connections",
            )
        await asyncio.sleep(FILES_LOOK_SECONDS)


STOP_GRACE_SECONDS = 1.0
"""How long calls that are still open after the drain, such as a client's health watch, may take to end."""
_COLLECT_AFTER = (10_000, 2, 100)
"""Thresholds of the garbage collector: objects, then collections of the younger generation.

A step's burst of messages creates some thousand objects that are gone after it. At Python's own 700, each burst
triggers a collection that finds nothing, up to a tenth of a router's CPU per message. The middle generation may hold a
queue that has just arrived: with 2 its collection blocks the loop for 8 ms, with Python's own 10 it was 80 ms.
"""
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20
"""malloc.h's name for the size from which memory is mapped by itself, and returned to the system once it is free.

Left alone, glibc raises that size to the largest block ever freed: after one body of 20 MB, up to 40 MB stay.
"""


class Service(Protocol):
    """What a process runs."""

    name: str
    tracer: Tracer | None
    """Receives its spans, which are sent before the process ends."""

    @property
    def receive_bytes(self) -> int:
        """Upper bound on a message to its server, in bytes."""
        ...

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicers to `server`; return the full names of their gRPC services."""
        ...

    async def listen(self) -> Mapping[str, str]:
        """Bind its further addresses, and return them by name, with the actual ports.

        Raises:
            LorreryError: an address cannot be bound.
        """
        ...

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Run the background work until cancelled.

        `set_ready(True)` makes health SERVING, `set_ready(False)` NOT_SERVING. Returning or raising ends the process.
        """
        ...

    async def drain(self) -> None:
        """Refuse new work, and return when none is left."""
        ...


S = TypeVar("S", bound=ProcessSettings)

Made = tuple[Service, str, str, float]
"""A service, its listen address, its metrics address, and its drain limit in seconds."""


async def run_service(
    service: Service,
    *,
    listen: str,
    metrics: str,
    settings: ProcessSettings,
    drain_seconds: float,
    registry: CollectorRegistry,
    announce: Path | None = None,
) -> None:
    """Run `service` until SIGTERM, SIGINT, SIGHUP, or the end of its `run`.

    Args:
        service: what to run.
        listen: HOST:PORT of its gRPC server.
        metrics: HOST:PORT of its Prometheus endpoint.
        settings: for TLS, and names in HTTP.
        drain_seconds: time limit of the drain after a signal.
        registry: shown by the endpoint.
        announce: file to write `{"grpc": "host:port", "metrics": "host:port", "pid": n}` and the service's further
            addresses to, once all can be dialled.

    Raises:
        SettingsError: a certificate is missing or wrong.
        LorreryError: an address cannot be bound.
        BaseExceptionGroup: or any other exception that the service's `run` raised.
    """
    log = get_logger("service").bind(service=service.name)
    with _stop_requested() as stop, contextlib.ExitStack() as stack:
        state = ServiceState(registry)
        metrics_server = serve_metrics(metrics, registry, f"{service.name}.metrics", settings.allowed_hosts)
        stack.callback(metrics_server.close)
        guard = CallGuard()
        server, health = new_server(service.receive_bytes, guard), Health()
        started = False
        watching = asyncio.create_task(warn_when_no_file_can_be_opened(), name="open files")
        try:
            names = service.register(server)
            await health.attach(server, names)
            enable_reflection(server, names)
            address = bind(server, listen, settings.server_tls, f"{service.name}.listen")
            await server.start()
            guard.watch(int(address.rpartition(":")[2]))
            started = True
            addresses = {**await service.listen(), "metrics": at_port(metrics, metrics_server.port)}
            log.info("listening", address=address, **addresses, version=VERSION)
            if announce is not None:
                dialled = {name: dialable(bound) for name, bound in {"grpc": address, **addresses}.items()}
                write_announcement(announce, {**dialled, "pid": os.getpid()})
            await _serve(service, health, state, stop, drain_seconds)
        finally:
            await _cancel(watching)
            await server.stop(STOP_GRACE_SECONDS)
            await guard.all_ended(STOP_GRACE_SECONDS)
            if service.tracer is not None:
                await service.tracer.close()
            if started:
                log.info("stopped")


async def _serve(
    service: Service, health: Health, state: ServiceState, stop: asyncio.Event, drain_seconds: float
) -> None:
    log = get_logger("service").bind(service=service.name)

    async def set_ready(ready: bool) -> None:
        if not stop.is_set():
            state.set("ready" if ready else "starting")
            await health.set(ready)

    running = asyncio.create_task(service.run(set_ready), name=f"{service.name} run")
    stopping = asyncio.create_task(stop.wait(), name="stop requested")
    draining: asyncio.Task[None] | None = None
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        await health.end()
        state.set("draining")
        if not running.done():
            log.info("draining", at_most_seconds=drain_seconds)
            draining = asyncio.create_task(service.drain(), name=f"{service.name} drain")
            await asyncio.wait((running, draining), timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
            elif not running.done():
                log.warning("drain_cut_short", after_seconds=drain_seconds)
    finally:
        await _cancel(stopping, draining, running)
    if not running.cancelled():
        running.result()


async def _cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks one after another, and wait for each; their exceptions are not raised."""
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))


@contextlib.contextmanager
def _stop_requested() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM, SIGINT or SIGHUP sets; the second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            sys.stderr.flush()
            os._exit(128 + number)
        stop.set()

    with handled_by(loop, on_signal, stop_signals()):
        yield stop


def write_announcement(path: Path, content: dict[str, object]) -> None:
    """Write the addresses of a process to a file, atomically.

    Raises:
        LorreryError: the file cannot be written.
    """
    try:
        write_whole(path, (json.dumps(content) + "\n").encode())
    except OSError as error:
        raise LorreryError(f"--announce {path}: {error.strerror}") from None


def service_command(
    name: str,
    help: str,  # noqa: A002  as typer calls it
    load: Callable[[Path | None, Sequence[str]], S],
    make: Callable[[S, CollectorRegistry], Made],
) -> None:
    """Run the command line of `python -m NAME`; never returns normally.

    Exit codes: 0 after a drain, 1 for an error, 2 for wrong settings or flags, 128 + n after a second signal n, or
    after one before the service runs.

    Args:
        name: of the service.
        help: what `--help` says first.
        load: reads the settings, of a file and overrides.
        make: builds the service from the settings, counting into the registry; runs inside the event loop.
    """

    def command(
        config: Annotated[Path | None, typer.Option(help="Settings file (TOML); default: $LORRERY_CONFIG.")] = None,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable; highest precedence."),
        ] = None,
        announce: Annotated[
            Path | None, typer.Option(help="Write the addresses to this file, as JSON, once they accept connections.")
        ] = None,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(f"lorrery {name} {VERSION}")
            return
        _run_to_exit(name, load, make, config, overrides or (), announce)

    exit_on_signals()  # until the loop takes over
    app = command_app()
    app.command(name=name, help=help, cls=Command)(command)
    app(prog_name=f"python -m lorrery.{name}")


def _run_to_exit(
    name: str,
    load: Callable[[Path | None, Sequence[str]], S],
    make: Callable[[S, CollectorRegistry], Made],
    config: Path | None,
    overrides: Sequence[str],
    announce: Path | None,
) -> None:
    try:
        settings = load(config, overrides)
        configure(settings.log, name)
        registry = new_registry(name)

        async def main() -> None:
            service, listen, metrics, drain_seconds = make(settings, registry)
            let_collector_rest()
            return_freed_memory()
            await run_service(
                service,
                listen=listen,
                metrics=metrics,
                settings=settings,
                drain_seconds=drain_seconds,
                registry=registry,
                announce=announce,
            )

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())
    except SystemExit as error:  # of a plug-in: `run_service` raises none
        typer.echo(f"{name}: error: {exit_in_words(error)}", err=True)
        raise SystemExit(1) from None
    except Exception as error:  # the outermost frame: every error becomes an exit code
        raise SystemExit(_report(name, error)) from None


def let_collector_rest() -> None:
    """Exempt present objects from garbage collection, and collect the rest seldom.

    Modules and catalogues live as long as the process; a full collection of them blocks the event loop, and in a worker
    the steps of all its GPUs, for 60 ms or more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def return_freed_memory() -> None:
    """Let the C library return large blocks to the system once they are free."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _report(name: str, error: Exception) -> int:
    """Print `error`, a LorreryError as one line, others with a traceback; return the exit code."""
    if isinstance(error, ExceptionGroup):
        ours, others = error.split(LorreryError)
        if others is None and ours is not None:
            return max(_report(name, inner) for inner in ours.exceptions)
    if isinstance(error, LorreryError):
        typer.echo(f"{name}: error: {error}", err=True)
        return 2 if isinstance(error, SettingsError) else 1
    traceback.print_exception(error)
    return 1
