"""`lorrery up`: a cluster in the foreground, one process per service, one Ctrl-C for all of them."""

import asyncio
import os
import signal
import sys
from itertools import cycle
from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.settings import Settings
from lorrery.chassis.shipped import DEFAULT_SETTINGS
from lorrery.cli.config import ConfigOption
from lorrery.cli.version import VersionOption
from lorrery.local.cluster import LocalCluster, cancelled_by_signals

_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_OWN_COLOUR = "yellow"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def up(
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeatable; wins over all.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="How many workers.")] = 2,
    version: VersionOption = False,
) -> None:
    """Run a cluster on this machine: scheduler, workers, router.

    Prints where everything is once it serves. Ctrl-C drains and stops it; a second one kills it. If a process ends by
    itself, the rest is stopped and the exit code is 1.
    """
    del version
    raise typer.Exit(asyncio.run(_up(config, overrides or [], workers)))


async def _up(config: Path, overrides: list[str], num_workers: int) -> int:
    printer = Printer(num_workers)
    cluster = LocalCluster(config, overrides, num_workers, show=printer.show)
    shipped = " (the shipped one; lorrery init writes a copy to edit)" if config == DEFAULT_SETTINGS else ""
    printer.say(f"settings: {config}{shipped}")
    ready = failed = False
    with cancelled_by_signals() as received:
        try:
            async with cluster:
                ready = True
                for line in summary(cluster):
                    printer.say(line)
                try:
                    ended = await cluster.unexpected_exit()
                except asyncio.CancelledError:
                    printer.say("stopping; once more to kill")
                    raise
                failed = True
                printer.say(f"{ended.name} ended unexpectedly with {describe_exit(ended.exit_code)}; stopping the rest")
        except asyncio.CancelledError:
            if not received:
                raise
    for entry in cluster.processes.values():
        if entry.exit_code:
            failed = True
            printer.say(f"{entry.name} ended with {describe_exit(entry.exit_code)}")
    if len(received) > 1 or (received and not ready):
        return 128 + received[0]
    return int(failed)


def describe_exit(code: int | None) -> str:
    """Return an exit code in words."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


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
