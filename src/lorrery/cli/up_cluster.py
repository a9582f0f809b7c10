"""Implementation of `lorrery up`: runs a cluster and prints its output."""

import asyncio
import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path

import typer

from lorrery.service.entry_point import cancelled_by_signals, num_lost_writes, reader_has_gone, treat_as_log
from lorrery.service.errors import LorreryError
from lorrery.service.faults.kinds import check_faults
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import temporary_folder
from lorrery.service.local.autoscaler import LocalAutoscaler
from lorrery.service.local.cluster import PAGE, LocalCluster
from lorrery.service.local.monitoring import Monitoring, Target
from lorrery.service.local.processes import ForkServer, describe_exit
from lorrery.service.local.supervisor import Supervisor
from lorrery.service.settings.cluster import Settings, load
from lorrery.simulator.fleet import check_scaled, num_processes, possible_names, start_up_seconds
from lorrery.vocabulary.files import count_kinds
from lorrery.worker.build import deployment_of
from lorrery.worker.device.basis import no_measurement

_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_OWN_COLOUR = "yellow"


async def run(
    fork_server: ForkServer,
    config: Path,
    overrides: Sequence[str],
    faults: Sequence[str],
    num_workers: int | None,
    *,
    free_ports: bool,
    restart: bool,
    monitoring: Path | None = None,
    page: bool = False,
) -> int:
    """Run a cluster until a signal or the exit of one of its processes, with its page if asked; return the exit code.

    `monitoring` is the folder of `local.monitoring`; unset: a temporary one.
    """
    if faults:
        overrides = [*overrides, f"faults={json.dumps([*load(config, overrides).faults, *faults])}"]
    asked = load(config, overrides)
    count = num_processes(asked, num_workers, num_shards=1)
    check_scaled(asked, asked.planned_faults())
    printer = Printer(count)
    with _folder(monitoring) as folder:
        files = Monitoring(Path(folder))

        def write_targets() -> None:
            try:
                files.write_targets(running_targets(cluster))
            except LorreryError as error:
                printer.say(f"Prometheus does not see this change: {error}")

        cluster = LocalCluster(
            config,
            overrides,
            count,
            show=printer.show,
            free_ports=free_ports,
            fork_server=fork_server,
            on_change=write_targets,
            page=page,
        )
        settings = cluster.settings
        planned = settings.planned_faults()
        check_faults(
            planned,
            workers=possible_names(settings, len(cluster.worker_processes)),
            adapters=settings.adapters_of(planned),
            replaced=settings.is_autoscaled,
        )
        files.write(keep=True)
        shipped = " (the shipped one; lorrery init writes a copy to edit)" if config == DEFAULT_SETTINGS else ""
        printer.say(f"settings: {config}{shipped}")
        return await run_until_stopped(
            cluster, restart=restart, say=printer.say, ready=lambda: summary(cluster, prometheus=files.config)
        )


def _folder(kept: Path | None) -> contextlib.AbstractContextManager[str | Path]:
    if kept is not None:
        return contextlib.nullcontext(kept)
    return temporary_folder("monitoring")


def running_targets(cluster: LocalCluster) -> list[Target]:
    """Return the running processes that expose metrics."""
    return [
        Target(entry.name, entry.service, entry.metrics)
        for entry in cluster.processes.values()
        if entry.metrics and entry.exit_code is None
    ]


async def run_until_stopped(
    cluster: LocalCluster, *, restart: bool, say: Callable[[str], None], ready: Callable[[], Iterable[str]]
) -> int:
    """Run a cluster until a signal or the exit of one of its processes; return the exit code.

    Args:
        cluster: not entered yet.
        restart: restart processes that exit by themselves.
        say: called with a line for each event.
        ready: returns the lines to print once the cluster serves.
    """
    with cancelled_by_signals() as received:
        return await run_until_cancelled(cluster, received, restart=restart, say=say, ready=ready)


async def run_until_cancelled(
    cluster: LocalCluster,
    received: Sequence[signal.Signals],
    *,
    restart: bool,
    say: Callable[[str], None],
    ready: Callable[[], Iterable[str]],
) -> int:
    """Run a cluster as `run_until_stopped` does, where each signal is added to `received` and cancels this task."""
    serves = failed = False
    down: set[str] = set()
    try:
        async with cluster:
            serves = True
            autoscalers = scaled_by_rules(cluster, say)
            for line in ready():
                say(line)
            try:
                ended = await Supervisor(cluster, restart=restart, say=say, autoscalers=autoscalers).run()
            except asyncio.CancelledError:
                down = {entry.name for entry in cluster.processes.values() if entry.exit_code is not None}
                say("stopping; once more to kill")
                raise
            failed = True
            say(f"{ended.name} ended unexpectedly with {describe_exit(ended.exit_code)}; stopping the rest")
    except asyncio.CancelledError:
        if not received:
            raise
    for entry in cluster.processes.values():
        if entry.exit_code and entry.name not in down:
            failed = True
            say(f"{entry.name} ended with {describe_exit(entry.exit_code)}")
    if len(received) > 1 or (received and not serves):
        return 128 + received[0]
    return int(failed)


def scaled_by_rules(cluster: LocalCluster, say: Callable[[str], None]) -> list[LocalAutoscaler]:
    """Return an autoscaler for each group of workers; empty if the settings do not scale them."""
    settings, names = cluster.settings, list(cluster.worker_processes)
    if not settings.is_autoscaled:
        return []
    found = []
    for number, (kind, num_workers) in enumerate(cluster.worker_kinds):
        own, names = names[: num_workers // kind.worker.gpus], names[num_workers // kind.worker.gpus :]
        start_up = start_up_seconds(kind, deployment_of(kind))
        found.append(LocalAutoscaler(cluster, kind, own, number if settings.workers else None, start_up, say))
    return found


def summary(cluster: LocalCluster, prometheus: Path | None = None) -> list[str]:
    """Return lines that describe what runs, and where.

    Args:
        cluster: a serving cluster.
        prometheus: configuration file that scrapes the cluster, if there is one.
    """
    settings: Settings = cluster.settings
    workers = f"workers: {in_words(cluster.worker_kinds)}"
    adapters = f"adapters: {settings.adapters.num_adapters}"
    lines = [f"ready: {settings.model}, {workers}, {adapters}, time scale {settings.time_scale:g}"]
    lines += _unmeasured(kind for kind, _ in cluster.worker_kinds)
    lines += [
        f"  {entry.name:<10} {entry.grpc:<21} http://{entry.metrics}/metrics"
        for entry in cluster.processes.values()
        if entry.grpc
    ]
    if cluster.http_address:
        scheme = "http" if settings.http_tls.cert is None else "https"
        lines.append(f"HTTP clients (OpenAI's and S-LoRA's routes): {scheme}://{cluster.http_address}")
    lines += [f"gateways ({name}): grpc://{address}" for name, address in cluster.engine_addresses.items()]
    if cluster.page_address:
        lines.append(f"watch it: http://{cluster.page_address}")
    variables, key = credentials(settings)
    lines.append(f"in a terminal: {variables}lorrery top --target {cluster.router_address}{key}")
    if prometheus is not None:
        lines.append(f"Prometheus: prometheus --config.file={shlex.quote(str(prometheus))}")
    return [*lines, f"try: {variables}lorrery load --target {cluster.router_address}{key}"]


def credentials(settings: Settings) -> tuple[str, str]:
    """Return what a command line to this cluster needs: variables before it, and an option after it."""
    tls = settings.client_tls.model_dump() if settings.server_tls.cert is not None else {}
    files = {name: shlex.quote(str(path)) for name, path in tls.items() if path is not None}
    variables = "".join(f"LORRERY_CLIENT_TLS__{name.upper()}={path} " for name, path in files.items())
    return variables, "" if settings.router.keys is None else " --api-key KEY"


def _unmeasured(kinds: Iterable[Settings]) -> list[str]:
    """Return a line for each GPU without measurements, each once."""
    deployments = [deployment_of(kind) for kind in kinds if kind.worker.step_time == "roofline"]
    found = (no_measurement(one.gpu, modern=one.engine.modern) for one in deployments)
    return list(dict.fromkeys(f"step times: {line}" for line in found if line is not None))


def in_words(kinds: Iterable[tuple[Settings, int]]) -> str:
    """Return the number of workers on each GPU, as text."""
    counted = count_kinds((kind.worker.gpu, kind.worker.tensor_parallel) for kind, count in kinds for _ in range(count))
    return ", ".join(f"{count} x {gpu}" for gpu, count in counted)


class Printer:
    """Prints lines, each after the coloured name of its process.

    Args:
        num_workers: number of workers, for their names and colours.
        num_clusters: with several, names are `0/router`, `1/router`, and so on.
        error: write to standard error instead of standard output.
    """

    def __init__(self, num_workers: int, *, num_clusters: int = 1, error: bool = False) -> None:
        self._error = error
        self._stream = sys.stderr if error else sys.stdout
        treat_as_log(self._stream)
        self._is_unread = False
        names = ["scheduler", *(f"worker-{index}" for index in range(num_workers)), "router", PAGE]
        self._colours = dict(zip(names, cycle(_COLOURS), strict=False))
        self._width = max(map(len, names)) + (len(f"{num_clusters - 1}/") if num_clusters > 1 else 0)

    def show(self, name: str, line: str) -> None:
        """Print one line of a process, preceded by a count of earlier lines that were lost for lack of room."""
        if num_lost := num_lost_writes(self._stream):
            self._echo("lorrery", f"{num_lost} lines lost here: there was no room for them")
        self._echo(name, line)
        if not self._is_unread and reader_has_gone(self._stream):
            self._is_unread = True
            signal.raise_signal(signal.SIGTERM)  # `lorrery up | head`: stop without a message

    def say(self, line: str) -> None:
        """Print one line of this command itself."""
        self.show("lorrery", line)

    def _echo(self, name: str, line: str) -> None:
        prefix = typer.style(f"{name:<{self._width}} | ", fg=self._colours.get(name.rpartition("/")[2], _OWN_COLOUR))
        typer.echo(prefix + line, err=self._error)
