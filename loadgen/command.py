"""The command: `lorrery load`, and the same as `python -m lorrery.loadgen`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lorrery.loadgen import flags
from lorrery.loadgen.options import load_options
from lorrery.loadgen.session import run_load
from lorrery.service.commands import ApiKey, Command, command_app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.settings.cluster import load as load_settings
from lorrery.view.terminal import table_console

OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
"""Variable with the API key for HTTP servers, used if neither the flag nor Lorrery's own variable is set."""
_DRIVE, _OUTPUT = "How it is played", "Output"


app = command_app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery load {VERSION}")
        raise typer.Exit


@app.command(cls=Command)
@flags.takes_load_options(before="connect_timeout", live=True)
def load(
    connect_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="How long to wait for the cluster, wall seconds.", rich_help_panel=_DRIVE
        ),
    ] = 10.0,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings file; its client_tls is used to connect.", rich_help_panel=_DRIVE),
    ] = None,
    api_key: ApiKey = "",
    out: flags.Out = None,
    report: flags.Report = True,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Export lorrery_loadgen_* to Prometheus at this address.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    **given: Any,  # noqa: ANN401  the table's options
) -> None:
    """Send a workload to a cluster, or to any server with a known protocol; measure as a client, and report.

    Examples:
      lorrery load --rate 4 --duration 30 --adapters all
      lorrery load --workload azure --adapters all
      lorrery load --workload azure --trace requests.csv --adapters 'lora-{0..31}' --out out/azure
      lorrery load --workload slora --rate 2 --duration 300 --alpha 0.3 --num-adapters 32
      lorrery load -c 64 --input 1024 --output 256 --length-ratio 0.8
      lorrery load --protocol openai --adapters all --rate 4 --duration 30
      lorrery load --protocol openai-chat --target https://vllm.example/v1 --workload chat

    Requests are sent at their intended times, however slow the responses are (open loop; with -c
    each of N clients sends one request after another). Latencies count from the intended times;
    those from the actual send are reported beside them. All times except deadlines are device
    seconds: with the cluster's time_scale = 2 the schedule takes twice as long on the wall clock.

    With s the origin, t1 and tn the arrival of the first and last token, n the output tokens:

      TTFT = t1 - s                         E2E = tn - s
      TPOT = (E2E - TTFT) / (n - 1)         normalised TPOT = E2E / n
      ITL = gaps between tokens, pooled over all requests

    Over HTTP, n is taken from the server's usage. Events without a token (a role, a last chunk
    that only ends the stream) do not count; an event with k tokens after a gap g counts as k gaps
    of g / k. Nothing is sent twice. The key may also be in $OPENAI_API_KEY.

    Exit code: 0 all completed, 1 some failed or no cluster, 2 wrong usage, 130 interrupted.
    """
    console = table_console()
    try:
        options = load_options(given, live=True)
        flags.check_report(out, report=report)
        code = run_load(
            options,
            tls=load_settings(config).client_tls,
            api_key=api_key or ("" if options.protocol == "grpc" else os.environ.get(OPENAI_KEY_VARIABLE, "")),
            out=out,
            with_page=report,
            metrics_address=metrics,
            connect_timeout_seconds=connect_timeout,
            console=console,
        )
    except LorreryError as error:
        typer.echo(f"lorrery load: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None
    raise typer.Exit(code)
