"""`lorrery faults`: sets and lists the faults of a running cluster."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer
from rich.console import Console
from rich.table import Table

from lorrery.cli.flags import VersionOption
from lorrery.service.commands import ApiKey, Command, command_app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.network.channel import check_target, open_channel
from lorrery.service.network.credentials import bearer
from lorrery.service.settings.cluster import load
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import router_pb2, router_pb2_grpc

TIMEOUT_SECONDS = 10.0

Rules = Annotated[list[str], typer.Argument(metavar="RULE...", help="Faults, in the syntax of docs/failures.md.")]
Target = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the router's gRPC (not of its HTTP).")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file; its client_tls is used to connect.")]
TARGET = "127.0.0.1:50051"
_WHERE = (
    "Lorrery's own gRPC: --target is the address at the end of the ready line of lorrery serve, whose port --grpc-port"
    " chooses, or router.listen"
)

app = command_app("Inject faults into requests, loads and workers of a running cluster.", no_args_is_help=True)


@app.callback()
def _faults(version: VersionOption = False) -> None:
    del version


@app.command("set", cls=Command)
def set_(rules: Rules, target: Target = TARGET, config: Config = None, api_key: ApiKey = "") -> None:
    """Inject these faults from now on, replacing those set or added before.

    Faults from the settings stay. Faults of requests apply at this router, those of loads and workers at every
    scheduler. docs/failures.md describes every kind.

    Examples:
      lorrery faults set refuse,share=0.1,status=RESOURCE_EXHAUSTED
      lorrery faults set stall,after=20,seconds=2,tenant=acme cut,after=5,first=3
      lorrery faults set slow_worker,worker=worker-0,factor=3,for=60
      lorrery faults set worker_loss,worker=worker-1,for=10
    """
    _call(target, config, api_key, _change(rules, add=False))


@app.command(cls=Command)
def add(rules: Rules, target: Target = TARGET, config: Config = None, api_key: ApiKey = "") -> None:
    """Inject these faults from now on, in addition to those set or added before.

    Earlier faults keep their times and counts; a fault that is already active stays as it is.

    Examples:
      lorrery faults add delay,seconds=0.5,adapter=lora-r8-0
      lorrery faults add freeze_worker,worker=worker-0,for=3
    """
    _call(target, config, api_key, _change(rules, add=True))


@app.command("list", cls=Command)
def list_(target: Target = TARGET, config: Config = None, api_key: ApiKey = "") -> None:
    """List active faults, including those from the settings, and how many requests, loads or workers each has affected.

    A fault for a worker that is not attached waits for a worker of that name; check that the name is not mistyped.

    Examples:
      lorrery faults list
      lorrery faults list --target 10.0.0.7:50051 --api-key lry_...
    """
    _call(target, config, api_key)


@app.command(cls=Command)
def clear(target: Target = TARGET, config: Config = None, api_key: ApiKey = "") -> None:
    """Remove the faults that were set or added. Those from the settings stay.

    A frozen worker resumes, and one that is kept away may attach again.

    Examples:
      lorrery faults clear
      lorrery faults clear --target 10.0.0.7:50051
    """
    _call(target, config, api_key, router_pb2.SetFaultsRequest())


def _change(rules: Sequence[str], *, add: bool) -> router_pb2.SetFaultsRequest:
    try:
        return router_pb2.SetFaultsRequest(rules=rules, add=add)
    except UnicodeEncodeError as error:
        raise SettingsError(f"RULE {error.object!r} is not UTF-8 text; docs/failures.md has every kind") from None


def _call(target: str, config: Path | None, api_key: str, change: router_pb2.SetFaultsRequest | None = None) -> None:
    """Change the faults of a cluster if `change` is given, and print the faults in force."""
    check_target("--target", target)
    _show(asyncio.run(changed_faults(target, load(config).client_tls, api_key, change)))


async def changed_faults(
    target: str, tls: TlsSettings, api_key: str, change: router_pb2.SetFaultsRequest | None
) -> Sequence[router_pb2.FaultRule]:
    """Change the faults of a cluster if `change` is given; return the faults in force.

    Raises:
        LorreryError: the router at `target` did not do it; the message says why, and where it is if HTTP is served.
    """
    metadata = bearer(api_key) if api_key else ()
    channel = open_channel(target, tls)
    try:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        if change is not None:
            await stub.SetFaults(change, timeout=TIMEOUT_SECONDS, metadata=metadata)
        listed = await stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and await _serves_http(target):
            raise LorreryError(f"{target} serves HTTP, and faults are set over {_WHERE}") from None
        raise LorreryError(f"{target}: {error.code().name}: {error.details()}") from None
    finally:
        await channel.close()
    return listed.faults


async def _serves_http(target: str) -> bool:
    """Return whether HTTP/1.1, in plain text or over TLS, is spoken at HOST:PORT."""
    host, _, port = target.rpartition(":")
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # nothing is said to it but a question
    for tls in (None, trusting):
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls)
                try:
                    writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    if (await reader.read(5)) == b"HTTP/":
                        return True
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError):
            pass
    return False


def _show(rules: Sequence[router_pb2.FaultRule]) -> None:
    if not rules:
        typer.echo("no faults")
        return
    table = Table("rule", "met")
    for rule in rules:
        met = "waits for a worker of that name" if rule.waits_for_worker else f"{rule.num_requests:,}"
        table.add_row(rule.rule, met)
    Console(soft_wrap=True).print(table)
