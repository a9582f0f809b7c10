"""`lorrery up`: a cluster in the foreground, one process per service, one Ctrl-C for all of them."""

import asyncio
import json
import os
import signal
import sys
from itertools import cycle
from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.faults import check_faults
from lorrery.chassis.shipped import DEFAULT_SETTINGS
from lorrery.cli.config import ConfigOption
from lorrery.cli.version import VersionOption
from lorrery.local.cluster import LocalCluster, cancelled_by_signals, describe_exit
from lorrery.local.supervisor import Supervisor
from lorrery.settings import Settings, load

_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_OWN_COLOUR = "yellow"

app = command_app()


@app.command(cls=Command)
def up(
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeatable; wins over all.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="How many workers.")] = 2,
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Listen on free ports instead of the settings', for a second cluster.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start a process that dies again, on its ports.")] = False,
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="FAULT", help="What goes wrong, and when; repeatable. See below."),
    ] = None,
    version: VersionOption = False,
) -> None:
    """Run a cluster on this machine: scheduler, workers, router.

    Prints where everything is once it serves. Ctrl-C drains and stops it; a second one kills it. If a process ends by
    itself, the rest is stopped and the exit code is 1; with --restart it starts again after half a second, and later
    each time it dies soon.

    Faults are those of lorrery simulate, in device seconds after the cluster is ready.

    Examples:
      lorrery up
      lorrery up --workers 4 --set scheduler.policy=vtc_fair
      lorrery up --free-ports
      lorrery up --restart --fault worker_loss,at=30,worker=worker-1,for=10
      lorrery up --fault slow_worker,at=30,worker=worker-0,factor=1.5,for=60
      lorrery up --fault adapter_load_failure,at=0,adapter=lora-r8-0,for=20
    """
    del version
    given = list(overrides or [])
    if faults:
        given.append(f"faults={json.dumps([*load(config, given).faults, *faults])}")
    raise typer.Exit(asyncio.run(_up(config, given, workers, free_ports=free_ports, restart=restart)))


async def _up(config: Path, overrides: list[str], num_workers: int, *, free_ports: bool, restart: bool) -> int:
    printer = Printer(num_workers)
    cluster = LocalCluster(config, overrides, num_workers, show=printer.show, free_ports=free_ports)
    settings = cluster.settings
    check_faults(
        settings.planned_faults(),
        workers=cluster.worker_names,
        adapters=(name for name, _ in settings.adapters.expand()),
    )
    shipped = " (the shipped one; lorrery init writes a copy to edit)" if config == DEFAULT_SETTINGS else ""
    printer.say(f"settings: {config}{shipped}")
    ready = failed = False
    down: set[str] = set()
    with cancelled_by_signals() as received:
        try:
            async with cluster:
                ready = True
                for line in summary(cluster):
                    printer.say(line)
                try:
                    ended = await Supervisor(cluster, restart=restart, say=printer.say).run()
                except asyncio.CancelledError:
                    down = {entry.name for entry in cluster.processes.values() if entry.exit_code is not None}
                    printer.say("stopping; once more to kill")
                    raise
                failed = True
                printer.say(f"{ended.name} ended unexpectedly with {describe_exit(ended.exit_code)}; stopping the rest")
        except asyncio.CancelledError:
            if not received:
                raise
    for entry in cluster.processes.values():
        if entry.exit_code and entry.name not in down:
            failed = True
            printer.say(f"{entry.name} ended with {describe_exit(entry.exit_code)}")
    if len(received) > 1 or (received and not ready):
        return 128 + received[0]
    return int(failed)


def summary(cluster: LocalCluster) -> list[str]:
    """Return lines that tell what runs, and where."""
    settings: Settings = cluster.settings
    workers = f"workers: {len(cluster.worker_names)} x {settings.worker.gpu}"
    adapters = f"adapters: {sum(1 for _ in settings.adapters.expand())}"
    lines = [f"ready: {settings.model}, {workers}, {adapters}, time scale {settings.time_scale:g}"]
    lines += [
        f"  {entry.name:<10} {entry.grpc:<21} http://{entry.metrics}/metrics" for entry in cluster.processes.values()
    ]
    return [*lines, f"try: lorrery load --target {cluster.router_address}"]


class Printer:
    """Writes lines to standard output, each after the coloured name of its process."""

    def __init__(self, num_workers: int) -> None:
        names = ["scheduler", *(f"worker-{index}" for index in range(num_workers)), "router"]
        self._colours = dict(zip(names, cycle(_COLOURS), strict=False))
        self._width = max(map(len, names))

    def show(self, name: str, line: str) -> None:
        """Print one line of a process."""
        try:
            typer.echo(typer.style(f"{name:<{self._width}} | ", fg=self._colours.get(name, _OWN_COLOUR)) + line)
        except BrokenPipeError:
            # Nobody reads any more (`lorrery up | head`): stop, without a word.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGTERM)

    def say(self, line: str) -> None:
        """Print one line of our own."""
        self.show("lorrery", line)
