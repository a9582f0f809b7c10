"""The command: `lorrery load`, and the same as `python -m lorrery.loadgen`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.errors import LorreryError, SettingsError
from lorrery.chassis.version import VERSION
from lorrery.loadgen import flags
from lorrery.loadgen.session import run_load
from lorrery.settings import load as load_settings

__all__ = ["app", "load"]

_DRIVE, _OUTPUT = "How it is played", "Output"


app = command_app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery load {VERSION}")
        raise typer.Exit


@app.command(cls=Command)
def load(
    target: Annotated[str, typer.Option(help="The router, HOST:PORT.", metavar="HOST:PORT")] = "127.0.0.1:50051",
    workload: flags.Workload = "poisson",
    trace: flags.Trace = None,
    speed_up: flags.SpeedUp = 1.0,
    num_requests: flags.NumRequests = None,
    duration: flags.Duration = None,
    rate: flags.Rate = 2.0,
    cv: flags.Cv = 1.0,
    jitter: flags.Jitter = 0.0,
    seed: flags.Seed = 42,
    input_range: flags.InputRange = "8:512",
    output_range: flags.OutputRange = "8:512",
    ignore_eos: flags.IgnoreEos = True,
    max_new_tokens: flags.MaxNewTokens = None,
    skip_too_long: flags.SkipTooLong = None,
    adapters: flags.Adapters = None,
    num_adapters: flags.NumAdapters = None,
    adapter_exponent: flags.AdapterExponent = None,
    alpha: flags.Alpha = 1.0,
    adapter_dirs: flags.AdapterDirs = None,
    concurrency: flags.Concurrency = None,
    warmup: flags.Warmup = 0,
    timeout: flags.Timeout = 300.0,
    connect_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Wait so long for the cluster, wall seconds.", rich_help_panel=_DRIVE
        ),
    ] = 10.0,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings file; its client_tls is used to dial.", rich_help_panel=_DRIVE),
    ] = None,
    api_key: flags.ApiKey = "",
    out: flags.Out = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Show lorrery_loadgen_* to Prometheus there.", rich_help_panel=_OUTPUT),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Drive a cluster with a workload, measure as its client, and report.

    Examples:
      lorrery load --rate 4 --duration 30 --adapters all
      lorrery load --workload azure --adapters all
      lorrery load --workload azure --trace requests.csv --adapters 'lora-{0..31}' --out out/azure
      lorrery load --workload slora --rate 2 --duration 300 --alpha 0.3 --num-adapters 32
      lorrery load -c 256 -n 2000 --input-range 64 --output-range 128

    Requests go out at their intended times however slow the answers are (open loop; with -c so many
    clients send one after another), and
    latencies count from these times; those from the actual send stand beside them. All times
    but deadlines are device seconds: with the cluster's time_scale 2 the schedule takes twice
    as long on the wall.

    With s the origin, t1 and tn the first and last token's arrival, n the output tokens:

      TTFT = t1 - s                         E2E = tn - s
      TPOT = (E2E - TTFT) / (n - 1)         normalised TPOT = E2E / n
      ITL = gaps between tokens, pooled over all requests

    Exit code: 0 all completed, 1 some failed or no cluster, 2 wrong usage, 130 interrupted.
    """
    given = locals()
    console = Console(soft_wrap=False)
    try:
        options = flags.load_options(target, given)
        code = run_load(
            options,
            tls=load_settings(config).client_tls,
            api_key=api_key,
            out=out,
            metrics_address=metrics,
            connect_timeout_seconds=connect_timeout,
            console=console,
        )
    except LorreryError as error:
        typer.echo(f"lorrery load: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None
    raise typer.Exit(code)
