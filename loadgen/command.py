"""The command: `lorrery load`, and the same as `python -m lorrery.loadgen`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.commands import ApiKey, Command, command_app
from lorrery.chassis.errors import LorreryError, SettingsError
from lorrery.chassis.terminal import table_console
from lorrery.chassis.version import VERSION
from lorrery.loadgen import flags
from lorrery.loadgen.option_texts import protocol_name
from lorrery.loadgen.options import DEFAULT_TARGETS
from lorrery.loadgen.session import run_load
from lorrery.settings import load as load_settings

__all__ = ["app", "load"]

OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
"""Variable with the API key for HTTP servers, used if neither the flag nor Lorrery's own variable is set."""
_DRIVE, _OUTPUT = "How it is played", "Output"


app = command_app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery load {VERSION}")
        raise typer.Exit


@app.command(cls=Command)
def load(
    target: Annotated[
        str | None,
        typer.Option(
            help="Address of the server; over HTTP a URL also works. Unset: the router's default address.",
            metavar="HOST:PORT",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Protocol: {', '.join(DEFAULT_TARGETS)}. All but grpc are HTTP, for any server.",
        ),
    ] = "grpc",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="HTTP: name of the base model. Unset: the first model that the server lists."
        ),
    ] = "",
    prompt_ids: Annotated[
        bool, typer.Option("--prompt-ids", help="openai: send prompts as token ids, not as text.")
    ] = False,
    workload: flags.Workload = None,
    trace: flags.Trace = None,
    block_tokens: flags.BlockTokens = None,
    speed_up: flags.SpeedUp = 1.0,
    num_requests: flags.NumRequests = None,
    duration: flags.Duration = None,
    rate: flags.Rate = 2.0,
    cv: flags.Cv = 1.0,
    bursts: flags.Bursts = None,
    jitter: flags.Jitter = 0.0,
    turns: flags.Turns = None,
    think: flags.Think = 5.0,
    shared_prefix: flags.SharedPrefix = None,
    seed: flags.Seed = 42,
    input_tokens: flags.InputTokens = None,
    output_tokens: flags.OutputTokens = None,
    length_ratio: flags.LengthRatio = None,
    input_range: flags.InputRange = None,
    output_range: flags.OutputRange = None,
    tokenizer: flags.Tokenizer = None,
    ignore_eos: flags.IgnoreEos = True,
    max_new_tokens: flags.MaxNewTokens = None,
    skip_too_long: flags.SkipTooLong = None,
    adapters: flags.Adapters = None,
    num_adapters: flags.NumAdapters = None,
    adapter_exponent: flags.AdapterExponent = None,
    drift: flags.Drift = None,
    alpha: flags.Alpha = 1.0,
    adapter_dirs: flags.AdapterDirs = None,
    concurrency: flags.Concurrency = None,
    requests_per_client: flags.RequestsPerClient = None,
    warmup: flags.Warmup = 0,
    timeout: flags.Timeout = 300.0,
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
    given = locals()
    console = table_console()
    try:
        spoken = protocol_name(protocol)
        of_target = {
            "target": DEFAULT_TARGETS[spoken] if target is None else target,
            "protocol": spoken,
            "model": model,
            "prompt_ids": prompt_ids,
        }
        options = flags.load_options(given, of_target)
        flags.check_report(out, report=report)
        code = run_load(
            options,
            tls=load_settings(config).client_tls,
            api_key=api_key or ("" if spoken == "grpc" else os.environ.get(OPENAI_KEY_VARIABLE, "")),
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
