"""`lorrery faults`: sets and lists the faults of a running cluster."""

import asyncio
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer
from rich.console import Console
from rich.table import Table

from lorrery.chassis.channel import check_target, open_channel
from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.credentials import bearer
from lorrery.chassis.errors import LorreryError
from lorrery.cli.version import VersionOption
from lorrery.loadgen import flags
from lorrery.settings import load
from lorrery.v1 import router_pb2, router_pb2_grpc

TIMEOUT_SECONDS = 10.0

app = command_app()


@app.command(cls=Command)
def faults(
    rules: Annotated[
        list[str] | None, typer.Argument(metavar="[RULE]...", help="Faults; unset: list what holds.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take back the rules that were set so.")] = False,
    target: Annotated[str, typer.Option(metavar="HOST:PORT", help="The router.")] = "127.0.0.1:50051",
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings file; its client_tls is used to dial.")
    ] = None,
    api_key: flags.ApiKey = "",
    version: VersionOption = False,
) -> None:
    """Let requests, loads and workers of a running cluster fail, and see how many have.

    Rules take the place of those of the call before; those of the settings stay. Faults of requests hold
    at this router, those of loads and workers at every scheduler. docs/faults.md has every kind.

    Examples:
      lorrery faults refuse,share=0.1,status=RESOURCE_EXHAUSTED
      lorrery faults stall,after=20,seconds=2,tenant=acme cut,after=5,first=3
      lorrery faults slow_worker,worker=worker-0,factor=3,for=60
      lorrery faults worker_loss,worker=worker-1,for=10
      lorrery faults
      lorrery faults --clear
    """
    del version
    if rules and clear:
        raise typer.BadParameter("--clear goes without rules")
    check_target("--target", target)
    asyncio.run(_faults(target, rules or [], config, api_key, change=bool(rules) or clear))


async def _faults(target: str, rules: list[str], config: Path | None, api_key: str, *, change: bool) -> None:
    metadata = bearer(api_key) if api_key else ()
    channel = open_channel(target, load(config).client_tls)
    try:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        if change:
            await stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules), timeout=TIMEOUT_SECONDS, metadata=metadata)
        listed = await stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise LorreryError(f"{target}: {error.code().name}: {error.details()}") from None
    finally:
        await channel.close()
    if not listed.faults:
        typer.echo("no faults")
        return
    table = Table("rule", "met")
    for rule in listed.faults:
        table.add_row(rule.rule, f"{rule.num_requests:,}")
    Console(soft_wrap=True).print(table)
