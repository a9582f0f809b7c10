"""The command `lorrery web`, also run by `python -m lorrery.view`."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from lorrery.service.commands import ApiKey, Command, command_app
from lorrery.service.entry_point import handled_by
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.network.channel import check_target
from lorrery.service.network.credentials import warn_if_exposed
from lorrery.service.network.server import dialable
from lorrery.service.process import write_announcement
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.cluster import load as load_settings
from lorrery.service.settings.sections import MAX_PORT, TlsSettings
from lorrery.service.telemetry.log import configure
from lorrery.service.web.hosts import Hosts
from lorrery.service.web.server import WebServer, guarded
from lorrery.view.app import make_app
from lorrery.view.frame import MAX_HZ, MIN_HZ, USUAL_HZ
from lorrery.view.record import Record
from lorrery.view.wire import LiveFeed

__all__ = ["app", "web"]

TARGET = "127.0.0.1:50051"
PORT = 8080
"""Default port; if it is taken, a free one is used."""

app = command_app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery web {VERSION}")
        raise typer.Exit


@app.command(cls=Command)
def web(
    record: Annotated[
        Path | None,
        typer.Argument(metavar="RECORD", help="Record of a simulation, or its folder. Unset: a running cluster."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of the router. Unset: the router's default address."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_PORT, help=f"Port; 0: a free one. Unset: {PORT}, or a free one if it is taken."),
    ] = None,
    hz: Annotated[
        float, typer.Option(min=MIN_HZ, max=MAX_HZ, help="Frames per second, unless the page asks for another rate.")
    ] = USUAL_HZ,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Settings file; its client_tls is used to connect, and its log settings apply."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable; highest precedence."),
    ] = None,
    api_key: ApiKey = "",
    announce: Annotated[
        Path | None,
        typer.Option(help="Write the address to this file, as JSON, once it accepts connections.", hidden=True),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show a running cluster, or the record of a simulation, in the browser.

    This command serves the page itself: no build step, and nothing is loaded from elsewhere. docs/monitoring.md
    describes the page, and the routes that a page of your own can use.

    Examples:
      lorrery web
      lorrery web --target 10.0.0.7:50051 --api-key lry_...
      lorrery web out/azure
      lorrery web out/azure/frames.ndjson.gz --port 0

    A cluster with API keys needs an operator's key. Ctrl-C stops it. Exit code: 0 stopped so, 1 no such record or the
    port cannot be used, 2 wrong usage.
    """
    del version
    try:
        if record is not None and target is not None:
            raise SettingsError("RECORD and --target: give either a record or a cluster, not both")
        if target is not None:
            check_target("--target", target)
        settings = load_settings(config, overrides or ())
        configure(settings.log, "web")
        asyncio.run(_serve(record, target or TARGET, settings, api_key, host, port, hz, announce))
    except LorreryError as error:
        typer.echo(f"lorrery web: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None


async def _serve(
    record: Path | None,
    target: str,
    settings: Settings,
    api_key: str,
    host: str,
    port: int | None,
    hz: float,
    announce: Path | None,
) -> None:
    """Serve until a signal."""
    async with contextlib.AsyncExitStack() as stack:
        source = Record(record) if record is not None else LiveFeed(target, settings.client_tls, api_key)
        if isinstance(source, LiveFeed):
            await stack.enter_async_context(source)
        application = guarded(make_app(source, hz), Hosts(f"{host}:0", settings.allowed_hosts))
        try:
            server = WebServer(application, f"{host}:{PORT if port is None else port}", "--port")
            listen = server.listen()
        except LorreryError:
            if port is not None:
                raise
            server = WebServer(application, f"{host}:0", "--port")
            listen = server.listen()
        address = dialable(listen)
        warn_if_exposed("--host", listen, TlsSettings(), protected=False, cure="leave --host out")
        shown = f"record {record}" if record is not None else f"cluster {target}"
        typer.echo(f"{shown}: http://{address}")
        if announce is not None:
            write_announcement(announce, {"http": address, "pid": os.getpid()})
        serving = asyncio.ensure_future(server.run())

        def end(_signal: signal.Signals) -> None:
            serving.cancel()

        with handled_by(asyncio.get_running_loop(), end), contextlib.suppress(asyncio.CancelledError):
            await serving
