"""The command: `lorrery top`."""

import asyncio
import sys
from contextlib import AsyncExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lorrery.service.commands import ApiKey, Command, command_app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION
from lorrery.view.frame import MAX_HZ, MIN_HZ
from lorrery.view.record import Record
from lorrery.view.terminal import table_console
from lorrery.view.top.run import print_json, print_once, show
from lorrery.view.top.screen import EVENTS, VIEWS, Look
from lorrery.view.top.sources import Playing, Tape, Watching, first_hello
from lorrery.view.top.tables import TABLES

if TYPE_CHECKING:
    from lorrery.view.wire import LiveFeed

__all__ = ["app", "top"]

TARGET = "127.0.0.1:50051"
_PRINTED_VIEWS = ("workers", "adapters", "tenants", EVENTS)

app = command_app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery top {VERSION}")
        raise typer.Exit


@app.command(cls=Command)
def top(
    record: Annotated[
        Path | None,
        typer.Argument(metavar="RECORD", help="Record of a simulation, or its folder. Unset: a running cluster."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"Address of the router. Unset: {TARGET}.")
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"View to show first, or the only one to print: {', '.join(VIEWS)}."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort tables by the column with this heading, such as wait.")
    ] = None,
    text: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Show only rows whose name contains this text.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the current state once, and exit.")] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the frames as JSON, one per line; docs/monitoring.md describes the fields."),
    ] = False,
    at: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Record: start there, paused; with --once, print that moment."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(min=0.01, max=1000, metavar="X", help="Record: device seconds per second; default 1."),
    ] = None,
    hz: Annotated[float, typer.Option(min=MIN_HZ, max=MAX_HZ, help="Frames per second.")] = 4.0,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings file; its client_tls is used to connect.")
    ] = None,
    api_key: ApiKey = "",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show a running cluster, or the record of a simulation, in the terminal, like top.

    Shows workers with their batches, queues, KV memory and adapters; adapters; tenants; requests; problems by the rules
    of docs/monitoring.md; the latest events. Press h for a list of keys. If the output is not a terminal, prints the
    state once, as with --once.

    Examples:
      lorrery top
      lorrery top --target 10.0.0.7:50051 --api-key lry_...
      lorrery top --once --view tenants --sort wait
      lorrery top --json --hz 1
      lorrery top out/azure --speed 10
      lorrery top out/azure --once --at 120

    A cluster with API keys needs an operator's key. Exit code: 0 after q, 1 no cluster or record found, 2 wrong usage,
    128 + n after signal n.
    """
    del version
    try:
        if record is not None and target is not None:
            raise SettingsError("RECORD and --target: give either a record or a cluster, not both")
        for option, value in (("--at", at), ("--speed", speed)):
            if value is not None and record is None:
                raise SettingsError(f"{option} {value:g}: this is for records; name a RECORD")
        look = _look(view, sort, text)
        feed = _feed(target, config, api_key) if record is None else None
        code = asyncio.run(_run(record, feed, look, view, once, json, at, speed or 1.0, hz))
    except LorreryError as error:
        typer.echo(f"lorrery top: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None
    raise typer.Exit(code)


def _look(view: str | None, sort: str | None, text: str) -> Look:
    """Return the look that the options specify.

    Raises:
        SettingsError: a view or column of that name does not exist.
    """
    if view is not None and view not in VIEWS:
        raise SettingsError(f"--view {view}: there are {', '.join(VIEWS)}")
    look = Look(view or VIEWS[0], text=text)
    if sort is None:
        return look
    tables = [table for table in TABLES if view in (None, table.name)]
    headings = {table.name: [column.heading.casefold() for column in table.columns] for table in tables}
    for name, those in headings.items():
        if sort.casefold() in those:
            look.sorts[name] = those.index(sort.casefold()), False
    if not look.sorts:
        known = "; ".join(f"{name}: {', '.join(those)}" for name, those in headings.items())
        raise SettingsError(f"--sort {sort}: no such column; {known or f'{view} have none'}")
    return look


def _feed(target: str | None, config: Path | None, api_key: str) -> "LiveFeed":
    """Return the feed of a running cluster; records skip these imports, which take most of a second.

    Raises:
        SettingsError: the target is invalid, or the settings have an error.
    """
    from lorrery.service.network.channel import check_target
    from lorrery.service.settings.cluster import load
    from lorrery.view.wire import LiveFeed

    if target is not None:
        check_target("--target", target)
    return LiveFeed(target or TARGET, load(config).client_tls, api_key)


async def _run(
    record: Path | None,
    feed: "LiveFeed | None",
    look: Look,
    view: str | None,
    once: bool,
    json: bool,
    at: float | None,
    speed: float,
    hz: float,
) -> int:
    async with AsyncExitStack() as stack:
        source: Tape | LiveFeed
        if feed is not None:
            source = await stack.enter_async_context(feed)
        else:
            assert record is not None, "one of the two is there"
            source = Tape(Record(record))
            if at is not None and at > source.times[-1]:
                raise SettingsError(f"--at {at:g}: the record ends at {source.times[-1]:g} s")
        if json:
            await print_json(source, hz, once=once, at=at)
            return 0
        console = Console(highlight=False)
        look.unicode = console.encoding.startswith("utf")
        if not look.unicode and isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        if once or not sys.stdout.isatty() or console.is_dumb_terminal:
            views = _PRINTED_VIEWS if view is None else (view,)
            await print_once(source, look, table_console(), views, at)
            return 0
        if isinstance(source, Tape):
            return await show(Playing(source, hz, speed, look, at), look, console)
        return await show(Watching(source, await first_hello(source), hz, look), look, console)
