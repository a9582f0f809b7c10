"""`lorrery demo`: runs a cluster on free ports, and a minute of a real trace through it."""

import asyncio
import contextlib
import signal
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self, TextIO

import typer

from lorrery.cli.flags import ConfigOption, SetOption, VersionOption
from lorrery.cli.up_cluster import summary
from lorrery.service.commands import Command, command_app
from lorrery.service.entry_point import cancelled_by_signals
from lorrery.service.errors import LorreryError
from lorrery.service.files.shipped import DEFAULT_SETTINGS, TRACES
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import describe_exit, start_python
from lorrery.service.settings.cluster import load as read_settings

_LOAD_STOP_SECONDS = 5.0

app = command_app()


@app.command(cls=Command)
def demo(
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of workers; unset: as in [\\[workers]], else 2.", show_default=False),
    ] = None,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Trace to play, in the CSV format of Azure's traces; default: the shipped one.",
        ),
    ] = TRACES["azure"],
    duration: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How much of the trace to play, device seconds; 59: its first 190 requests.",
        ),
    ] = 59.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for results and logs; default: out/demo-TIME.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Run a cluster and play a real trace through it; takes about a minute.

    Starts a scheduler, workers and a router on free ports, sends them the trace's requests at their recorded times with
    adapters drawn by a power law, shows what the clients see, and stops everything. Results and the services' logs
    are kept in a folder. Exit code: 0 if every request completed.

    Examples:
      lorrery demo
      lorrery demo --duration 10 --workers 4 --set worker.gpu=A100-80-SXM
    """
    del version
    try:
        trace.open("rb").close()
    except OSError as error:
        raise LorreryError(f"--trace {trace}: {error.strerror}") from None
    folder = out or Path("out") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005  a name, for who sits here
    load = [
        "--workload",
        "azure",
        "--trace",
        str(trace),
        "--adapters",
        "all",
        "--config",
        str(config),
        "--out",
        str(folder),
        "--duration",
        f"{duration:g}",
    ]
    raise typer.Exit(asyncio.run(_demo(config, overrides or [], workers, load, folder)))


async def _demo(config: Path, overrides: list[str], num_workers: int | None, load: list[str], folder: Path) -> int:
    code = 1
    logs = LogFiles(folder)
    # Errors in the settings are raised before the folder is made.
    count = read_settings(config, overrides).num_worker_processes(num_workers)
    cluster = LocalCluster(config, overrides, count, show=logs.write, free_ports=True)
    with cancelled_by_signals() as received, logs:
        try:
            typer.echo(f"starting a cluster; its logs go to {folder}/")
            async with cluster:
                for line in summary(cluster)[:-1]:
                    typer.echo(line)
                code = await _run_load(cluster, load)
        except asyncio.CancelledError:
            if not received:
                raise
    if received:
        return 128 + received[0]
    if code == 0:
        typer.echo(f"results: {folder}/summary.json, {folder}/requests.csv, {folder}/report.html")
    return code


async def _run_load(cluster: LocalCluster, arguments: list[str]) -> int:
    """Run the load generator on the cluster; return its exit code, or 1 if a service exits meanwhile."""
    # The load generator reads the file but has no --set; the environment overrides the file.
    tls = cluster.settings.client_tls.model_dump(mode="json", exclude_none=True)
    variables = {f"LORRERY_CLIENT_TLS__{key.upper()}": value for key, value in tls.items()}
    loadgen = await start_python(
        ["-m", "lorrery.loadgen", "--target", cluster.router_address, *arguments], variables=variables
    )
    finished = asyncio.create_task(loadgen.wait(), name="load")
    service_ended = asyncio.create_task(cluster.unexpected_exit(), name="unexpected exit")
    try:
        await asyncio.wait((finished, service_ended), return_when=asyncio.FIRST_COMPLETED)
        if service_ended.done():
            ended = service_ended.result()
            typer.echo(f"{ended.name} ended unexpectedly with {describe_exit(ended.exit_code)}", err=True)
            return 1
        return finished.result()
    finally:
        service_ended.cancel()
        if not finished.done():
            await _stop(loadgen, finished)


async def _stop(loadgen: asyncio.subprocess.Process, finished: asyncio.Task[int]) -> None:
    """Interrupt the load generator, which then reports its results so far; kill it on timeout or on cancellation."""
    loadgen.send_signal(signal.SIGTERM)  # unlike SIGINT, it ends Python without output from the first moment
    try:
        await asyncio.wait((finished,), timeout=_LOAD_STOP_SECONDS)
    finally:
        if not finished.done():
            with contextlib.suppress(ProcessLookupError):
                loadgen.kill()
            await asyncio.wait((finished,))


class LogFiles:
    """One file per process, `NAME.log` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        """Make the folder; each file is created with its first line.

        Raises:
            LorreryError: the folder cannot be made.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LorreryError(f"--out {self._folder}: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def write(self, name: str, line: str) -> None:
        """Append one line to the file of `name` and flush it."""
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("a", encoding="utf-8", buffering=1)
        self._files[name].write(line + "\n")
