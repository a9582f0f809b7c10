"""The command: `lorrery load`, and the same as `python -m loadgen`."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from chassis.errors import LorreryError, SettingsError
from chassis.settings import load as load_settings
from chassis.version import VERSION
from loadgen.options import LoadOptions, WorkloadName, parse_range
from loadgen.session import run_load

__all__ = ["app", "load"]

_WORKLOAD, _LENGTHS, _ADAPTERS, _DRIVE, _OUTPUT = "Workload", "Lengths", "Adapters", "How it is played", "Output"


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lorrery load {VERSION}")
        raise typer.Exit


@app.command()
def load(
    target: Annotated[str, typer.Option(help="The router, HOST:PORT.", metavar="HOST:PORT")] = "127.0.0.1:50051",
    workload: Annotated[
        str,
        typer.Option(
            help=f"What to play: {', '.join(get_args(WorkloadName))}.",
            metavar="NAME",
            rich_help_panel=_WORKLOAD,
        ),
    ] = "poisson",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="azure (CSV) or mooncake (JSON Lines): the trace.", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    speed_up: Annotated[
        float,
        typer.Option(
            metavar="FACTOR", help="Play so many times as fast as recorded or drawn.", rich_help_panel=_WORKLOAD
        ),
    ] = 1.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests", "-n", min=1, metavar="N", help="The first N requests.", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Requests due within so many seconds; of synthetic workloads 60 unless -n is given.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(metavar="R", help="Synthetic ones: requests per second.", rich_help_panel=_WORKLOAD)
    ] = 2.0,
    cv: Annotated[
        float,
        typer.Option(
            metavar="CV",
            help="poisson, slora: coefficient of variation of the gaps; 1 is Poisson, more is bursts.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 1.0,
    jitter: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="mooncake: spread requests of one stamp over so many seconds (its stamps step by 3).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32 - 1, metavar="N", help="Of every draw, prompts included.", rich_help_panel=_WORKLOAD
        ),
    ] = 42,
    input_range: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH",
            help="Synthetic ones: prompt tokens (slora leaves HIGH out, as S-LoRA does).",
            rich_help_panel=_LENGTHS,
        ),
    ] = "8:512",
    output_range: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="The same for output tokens.", rich_help_panel=_LENGTHS)
    ] = "8:512",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for exactly the workload's output length; otherwise the model ends there by itself.",
            rich_help_panel=_LENGTHS,
        ),
    ] = True,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --no-ignore-eos: the limit that requests name, where the true length is not above it.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None,
    skip_too_long: Annotated[
        bool,
        typer.Option("--skip-too-long", help="Leave out what the cluster's limits refuse.", rich_help_panel=_LENGTHS),
    ] = False,
    adapters: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Ids and families, such as 'chat,lora-{0..31}'; 'all': those of the cluster. Unset: the base model.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    num_adapters: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="The first N of --adapters, or of the cluster's.", rich_help_panel=_ADAPTERS
        ),
    ] = None,
    adapter_exponent: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="S",
            help="All but slora: Zipf's exponent over the adapters; 0 is uniform. Unset: 1.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(
            metavar="ALPHA",
            help="slora: its power law; 1 is uniform, less is more skewed (not Zipf's exponent).",
            rich_help_panel=_ADAPTERS,
        ),
    ] = 1.0,
    adapter_dirs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="slora: name adapter i as S-LoRA does, name number i mod k, then -(i div k); needs --num-adapters.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            max=5000,
            metavar="N",
            help="Closed loop: so many clients, each sending one request after another. Unset: open loop.",
            rich_help_panel=_DRIVE,
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Short requests before the run, in no figure.", rich_help_panel=_DRIVE),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001, metavar="SECONDS", help="Deadline of each request, wall seconds.", rich_help_panel=_DRIVE
        ),
    ] = 300.0,
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
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write summary.json and requests.csv there.", rich_help_panel=_OUTPUT),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Show lorrery_loadgen_* to Prometheus there.", rich_help_panel=_OUTPUT),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Drive a cluster with a workload, measure as its client, and report.

    For example:

      lorrery load --rate 4 --duration 30 --adapters all
      lorrery load --workload azure --trace deploy/traces/azure_llm_2023_conv_excerpt.csv
      lorrery load --workload azure --trace FILE --adapters 'lora-{0..31}' --out out/azure
      lorrery load --workload slora --rate 2 --duration 300 --alpha 0.3 --num-adapters 32
      lorrery load -c 256 -n 2000 --input-range 64 --output-range 128     (closed loop)

    Requests go out at their intended times however slow the answers are (open loop), and
    latencies count from these times; those from the actual send stand beside them. All times
    but deadlines are device seconds: with the cluster's time_scale 2 the schedule takes twice
    as long on the wall.

    With s the origin, t1 and tn the first and last token's arrival, n the output tokens:

      TTFT = t1 - s                         E2E = tn - s
      TPOT = (E2E - TTFT) / (n - 1)         normalised TPOT = E2E / n
      ITL = gaps between tokens, pooled over all requests

    Exit code: 0 all completed, 1 some failed or no cluster, 2 wrong usage, 130 interrupted.
    """
    console = Console(soft_wrap=False)
    try:
        options = LoadOptions(
            target=target,
            workload=_workload_name(workload),
            trace=trace,
            speed_up=speed_up,
            num_requests=num_requests,
            duration=duration,
            rate=rate,
            cv=cv,
            alpha=alpha,
            num_adapters=num_adapters,
            adapters=adapters,
            adapter_dirs=adapter_dirs,
            adapter_exponent=adapter_exponent,
            input_range=parse_range(input_range),
            output_range=parse_range(output_range),
            jitter=jitter,
            concurrency=concurrency,
            warmup=warmup,
            seed=seed,
            ignore_eos=ignore_eos,
            max_new_tokens=max_new_tokens,
            skip_too_long=skip_too_long,
            timeout=timeout,
        )
        code = run_load(
            options,
            tls=load_settings(config).client_tls,
            out=out,
            metrics_address=metrics,
            connect_timeout_seconds=connect_timeout,
            console=console,
        )
    except LorreryError as error:
        typer.echo(f"lorrery load: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None
    raise typer.Exit(code)


def _workload_name(text: str) -> WorkloadName:
    names: tuple[WorkloadName, ...] = get_args(WorkloadName)
    for name in names:
        if name == text:
            return name
    raise SettingsError(f"--workload {text}: expected one of {', '.join(names)}")
