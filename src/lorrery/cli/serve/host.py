"""Hosts the engines of `lorrery.engines`: `python -m lorrery.cli.serve.host PARENT_PID`, started by `lorrery.testing`.

It imports everything once, then forks its fork server from itself, so that the first fleet costs one import and each
later one none. Standard input has a command per line, standard output an answer per line, in JSON:

    {"id": 1, "do": "start", "fleet": 1, "arguments": [...], "settings": {...}, "ports": [0, 0]}
    {"id": 1, "result": {...}}      or {"id": 1, "error": "...", "of_settings": true}

`start` takes the arguments of `lorrery serve`, and settings that rank above them; `stop`, with `fleet`, kills its
engines. `kill`, `drain`, `restart` and `faults` also have `engine`, its number. An engine is described as in `lorrery
serve --announce`. An engine one of whose processes ends by itself is killed, with a line on standard error.

It ends, with all engines, when the process that started it has ended, or standard input; all are in its process group.
"""

import sys

from lorrery.service.entry_point import exit_on_signals, set_up_grpc
from lorrery.service.local import fork_server

if __name__ == "__main__":
    exit_on_signals()
    set_up_grpc()
    fork_server.import_services()  # first: numpy and gRPC start no thread then, and this process can be forked

import asyncio
import contextlib
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from lorrery.cli.faults import changed_faults
from lorrery.cli.serve import app
from lorrery.cli.serve.run import clusters_of, description, drop_setting_variables
from lorrery.cli.serve.settings import engine_of
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import temporary_folder
from lorrery.service.linux import process_descriptor
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer, describe_exit, last_words
from lorrery.service.settings.reading import override_of
from lorrery.v1 import router_pb2

_LONGEST_LINE = 1 << 24
"""Bytes of a command; many adapters make a long one."""


class _Fleet:
    """Running engines, and their files."""

    def __init__(self) -> None:
        self.clusters: list[LocalCluster] = []
        self.api_key = ""
        self._resources = contextlib.AsyncExitStack()
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, servers: ForkServer, command: Mapping[str, Any]) -> None:
        """Start the engines that a command describes; return once all serve."""
        line = typer.main.get_command(app).make_context("lorrery serve", list(command["arguments"])).params
        given = {key: list(value) if isinstance(value, tuple) else value for key, value in line.items()}
        settings = [override_of(key, value) for key, value in command["settings"].items()]
        engine = engine_of(line["model_name"], given, settings)
        self.api_key = next(iter(engine.api_keys), "")
        folder = Path(self._resources.enter_context(temporary_folder("engines")))
        starting = clusters_of(engine, command["ports"], folder, servers, _show)
        async with asyncio.TaskGroup() as tasks:
            for cluster in starting:
                tasks.create_task(self._enter(cluster))
        self.clusters = starting
        self._watching = [
            asyncio.create_task(_kill_once_broken(number, one)) for number, one in enumerate(self.clusters)
        ]

    async def _enter(self, cluster: LocalCluster) -> None:
        await cluster.__aenter__()
        self._resources.push_async_callback(cluster.kill_all)

    async def stop(self) -> None:
        """Kill all engines, and remove their files."""
        for task in self._watching:
            task.cancel()
        await self._resources.aclose()


async def _kill_once_broken(number: int, cluster: LocalCluster) -> None:
    while True:
        ended = await cluster.unexpected_exit()
        print(
            f"engine {number}: {ended.name} ended with {describe_exit(ended.exit_code)}{last_words(ended)}",
            file=sys.stderr,
        )
        await _kill(cluster)


async def _kill(cluster: LocalCluster) -> None:
    for name in reversed(cluster.processes):  # a router that outlived its scheduler would log so
        cluster.kill(name)
    await asyncio.gather(*[cluster.ended(name) for name in cluster.processes])


async def _restart(cluster: LocalCluster) -> None:
    await _kill(cluster)
    for name in list(cluster.processes):  # in the order of their start
        await cluster.restart(name, wait=False)
    for name in [*cluster.worker_processes, "router"]:
        await cluster.serving(name)


def _show(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr)


class Host:
    """Carries out commands; `servers` starts the services."""

    def __init__(self, servers: ForkServer) -> None:
        self._servers = servers
        self._fleets: dict[int, _Fleet] = {}

    async def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command, and return the answer."""
        error: BaseException
        try:
            return {"id": command["id"], "result": await self._do(command)}
        except Exception as caught:  # the outermost frame: every error becomes an answer
            error = caught
        while isinstance(error, BaseExceptionGroup):  # of engines that start together
            error = error.exceptions[0]
        if not isinstance(error, LorreryError | typer.BadParameter):
            traceback.print_exception(error)
        text = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        of_settings = isinstance(error, SettingsError | typer.BadParameter)
        return {"id": command["id"], "error": text, "of_settings": of_settings}

    async def _do(self, command: Mapping[str, Any]) -> object:
        number = command["fleet"]
        if command["do"] == "start":
            fleet = self._fleets[number] = _Fleet()
            try:
                await fleet.start(self._servers, command)
            except BaseException:
                await self._stop(number)
                raise
            return {"engines": [description(one) for one in fleet.clusters], "api_key": fleet.api_key}
        if command["do"] == "stop":
            await self._stop(number)
            return None
        fleet = self._fleets[number]
        cluster = fleet.clusters[command["engine"]]
        if command["do"] == "faults":
            change = command["change"]
            message = None if change is None else router_pb2.SetFaultsRequest(**change)
            found = await changed_faults(cluster.router_address, cluster.settings.client_tls, fleet.api_key, message)
            return [{"rule": one.rule, "met": one.num_requests} for one in found]
        changes: dict[str, Callable[[LocalCluster], Awaitable[None]]] = {
            "kill": _kill,
            "drain": LocalCluster.drain_all,
            "restart": _restart,
        }
        await changes[command["do"]](cluster)
        return description(cluster)

    async def _stop(self, number: int) -> None:
        if (fleet := self._fleets.pop(number, None)) is not None:
            await fleet.stop()

    async def stop(self) -> None:
        """Stop all fleets."""
        for number in list(self._fleets):
            await self._stop(number)


def _end(loop: asyncio.AbstractEventLoop, watched: int, task: "asyncio.Task[Any]") -> None:
    loop.remove_reader(watched)
    task.cancel()


async def _serve(servers: ForkServer, parent: int) -> None:
    """Carry out commands until standard input ends, or the process `parent`."""
    host, loop = Host(servers), asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watched, task = process_descriptor(parent), asyncio.current_task()
    if watched is not None and task is not None:
        # Standard input alone would not do: a fork of the parent may hold it open, and a start may be under way.
        loop.add_reader(watched, _end, loop, watched, task)
    try:
        while line := await reader.readline():
            print(json.dumps(await host.answer(json.loads(line))), flush=True)
    finally:
        await host.stop()


def main(arguments: Sequence[str]) -> None:
    """Run the host of the process whose id is the argument."""
    parent = int(arguments[0])
    drop_setting_variables()
    with ForkServer(None) as servers, contextlib.suppress(ProcessLookupError, asyncio.CancelledError, BrokenPipeError):
        asyncio.run(_serve(servers, parent))


if __name__ == "__main__":
    main(sys.argv[1:])
