"""`lorrery monitoring`: writes the files with which Prometheus and Grafana show a cluster without containers."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.flags import ConfigOption, VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.service.files.shipped import DEFAULT_SETTINGS

app = command_app()


@app.command(cls=Command)
def monitoring(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing.")],
    config: ConfigOption = DEFAULT_SETTINGS,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Number of workers of `lorrery up` to scrape; their ports count up; unset: as in [\\[workers]], else"
            " 2.",
        ),
    ] = None,
    prometheus_url: Annotated[
        str, typer.Option("--prometheus-url", metavar="URL", help="URL at which Grafana reaches Prometheus.")
    ] = "http://127.0.0.1:9090",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files that differ.")] = False,
    version: VersionOption = False,
) -> None:
    """Write Prometheus' configuration, rules and alerts, and the Grafana dashboards.

    The targets are the processes that lorrery up starts with these settings; for a cluster started in another way,
    edit targets/cluster.json. lorrery up --monitoring DIR writes the same folder and keeps its targets up to date.

    Examples:
      lorrery monitoring monitoring
      lorrery monitoring monitoring --config cluster.toml --workers 8
      lorrery monitoring monitoring --force --prometheus-url http://10.0.0.5:9090
    """
    del version
    from lorrery.service.local.monitoring import Monitoring, expected_targets
    from lorrery.service.settings.cluster import load

    settings = load(config)
    targets = expected_targets(settings, settings.num_worker_processes(workers))
    files = Monitoring(folder, prometheus_url)
    written = files.write(force=force)
    files.write_targets(targets)
    typer.echo(f"wrote {len(written) + 1} files to {folder}; then\n")
    typer.echo(f"  prometheus --config.file={shlex.quote(str(files.config))}")
    provisioning = shlex.quote(str(files.grafana_provisioning.absolute()))
    typer.echo(f"  GF_PATHS_PROVISIONING={provisioning} grafana server --homepath /usr/share/grafana\n")
