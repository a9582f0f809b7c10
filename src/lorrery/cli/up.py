"""`lorrery up`: runs a cluster in the foreground, one process per service; one Ctrl-C stops all of them."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from lorrery.cli.flags import ConfigOption, SetOption, VersionOption, takes_deployment, with_deployment
from lorrery.service.commands import Command, command_app
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.local.processes import ForkServer

app = command_app()


@app.command(cls=Command)
@takes_deployment(before="workers")
def up(
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of worker processes. Unset: as in [\\[workers]], else 2, or 1 if an engine is named or a"
            " process hosts several GPUs.",
        ),
    ] = None,
    free_ports: Annotated[
        bool,
        typer.Option(
            "--free-ports", help="Listen on free ports instead of those in the settings, for a second cluster."
        ),
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Restart processes that die, on the same ports.")] = False,
    page: Annotated[
        bool, typer.Option("--web/--no-web", help="Serve the page that shows the cluster, like lorrery web.")
    ] = True,
    monitoring: Annotated[
        Path | None,
        typer.Option(
            "--monitoring",
            metavar="DIR",
            help="Keep the files for Prometheus and Grafana in this folder; unset: they are deleted at exit.",
        ),
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale", help="Scale workers by the rule of \\[autoscaler]; --workers is the initial number."
        ),
    ] = False,
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="FAULT", help="Fault to inject, and when; repeatable. See below."),
    ] = None,
    version: VersionOption = False,
    **given: Any,  # noqa: ANN401  the table's options
) -> None:
    """Run a cluster on this machine: scheduler, workers, router, and the page that shows it.

    Prints all addresses once it is ready. Ctrl-C drains and stops it; a second one kills it. If a process exits by
    itself, the others are stopped and the exit code is 1; with --restart it is started again after half a second, and
    with a growing delay if it keeps dying early.

    Prints a configuration file for Prometheus, whose targets follow the processes. With --monitoring DIR the files are
    kept and reused by the next cluster, including your changes to them.

    Faults are those of lorrery simulate, with times in device seconds after the cluster is ready.

    Examples:
      lorrery up
      lorrery up --workers 4 --set scheduler.policy=vtc_fair
      lorrery up --engine vllm --gpu H200-SXM
      lorrery up --gpus 8
      lorrery up --set 'workers=[{gpu = "H100-SXM"}, {count = 2, gpu = "L40S"}]'
      lorrery up --free-ports --no-web
      lorrery up --monitoring monitoring
      lorrery up --autoscale --set autoscaler.target=2
      lorrery up --restart --fault worker_loss,at=30,worker=worker-1,for=10
      lorrery up --fault slow_worker,at=30,worker=worker-0,factor=1.5,for=60
      lorrery up --fault freeze_worker,at=30,worker=worker-0,for=8
      lorrery up --fault adapter_load_failure,adapter=lora-r8-0,first=2 --fault slow_adapter_load,factor=20,share=0.1
    """
    del version
    with ForkServer() as fork_server:
        overrides = with_deployment(given, overrides)
        if autoscale:
            overrides = [*overrides, "autoscaler.enabled=true"]
        from lorrery.cli.up_cluster import run  # while the fork server imports the services

        code = asyncio.run(
            run(
                fork_server,
                config,
                overrides,
                faults or [],
                workers,
                free_ports=free_ports,
                restart=restart,
                monitoring=monitoring,
                page=page,
            )
        )
    raise typer.Exit(code)
