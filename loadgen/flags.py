"""The workload options shared by `lorrery load` and `lorrery simulate`.

Each is the type of a command's parameter, including its flag and help.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from lorrery.chassis.errors import SettingsError
from lorrery.loadgen.option_texts import PARSERS, workload_of
from lorrery.loadgen.options import MOST_SEED, OF_TARGET, LoadOptions, WorkloadName

_WORKLOAD, _SESSIONS, _LENGTHS, _ADAPTERS, _DRIVE, _OUTPUT = (
    "Workload",
    "Sessions and shared prefixes",
    "Lengths",
    "Adapters",
    "How it is played",
    "Output",
)

Workload = Annotated[
    str | None,
    typer.Option(
        help=f"Workload: {', '.join(get_args(WorkloadName))}. Unset: poisson, or with --trace what its file has.",
        metavar="NAME",
        rich_help_panel=_WORKLOAD,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of recorded requests or conversations, in any form of docs/workloads.md. Unset: for azure and"
        " mooncake the shipped excerpt.",
        rich_help_panel=_WORKLOAD,
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Traces with hash_ids: tokens of a prompt's blocks. Unset: what the rows say.",
        rich_help_panel=_WORKLOAD,
    ),
]
SpeedUp = Annotated[
    float,
    typer.Option(
        metavar="FACTOR",
        help="Play the workload this many times as fast as recorded or drawn.",
        rich_help_panel=_WORKLOAD,
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        "--num-requests", "-n", min=1, metavar="N", help="Only the first N requests.", rich_help_panel=_WORKLOAD
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Only requests (first turns of sessions) due within this time; for drawn workloads 60 unless -n is given."
        " slora: R times as many requests, whenever they are due.",
        rich_help_panel=_WORKLOAD,
    ),
]
Rate = Annotated[
    float,
    typer.Option(
        metavar="R",
        help="Drawn workloads: requests per second; chat, sharegpt: sessions per second.",
        rich_help_panel=_WORKLOAD,
    ),
]
Cv = Annotated[
    float,
    typer.Option(
        metavar="CV",
        help="Drawn workloads except constant: coefficient of variation of the gaps (gamma); 1 is Poisson, more is"
        " burstier.",
        rich_help_panel=_WORKLOAD,
    ),
]
Bursts = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        help="poisson, chat, sharegpt: MMPP arrivals, factor=F,for=SECONDS[,share=p]: bursts take a share p (0.1) of"
        " the time, last SECONDS each on average, and have the rate F * R / (1 - p + p * F); calm times have R / (1 -"
        " p + p * F).",
        rich_help_panel=_WORKLOAD,
    ),
]
Turns = Annotated[
    str | None,
    typer.Option(
        metavar="LOW[:HIGH]",
        help="chat: turns per session, uniform (2:6); sharegpt: at most HIGH (1). Turn k + 1 repeats the whole"
        " history: prompt = shared + sum over j <= k of (own(j) + output(j)) + own(k + 1).",
        rich_help_panel=_SESSIONS,
    ),
]
Think = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="chat, sharegpt: mean of the exponential think time between the end of a response and the next turn.",
        rich_help_panel=_SESSIONS,
    ),
]
SharedPrefix = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS[:GROUPS]",
        help="Drawn workloads except slora: shared system prompt of N tokens before each prompt, one of GROUPS (1),"
        " drawn per session or request.",
        rich_help_panel=_SESSIONS,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="sharegpt: a tokenizer.json or its folder, to measure the lengths of texts. Unset: the shipped one.",
        rich_help_panel=_LENGTHS,
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Recorded requests: spread those of the same time over this time.",
        rich_help_panel=_WORKLOAD,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST_SEED,
        metavar="N",
        help="Seed of all random draws, including prompts.",
        rich_help_panel=_WORKLOAD,
    ),
]
InputRange = Annotated[
    str | None,
    typer.Option(
        metavar="LOW[:HIGH]",
        help="Drawn workloads: prompt tokens (slora excludes HIGH, as S-LoRA does); chat: new tokens per turn. Unset:"
        " 8:512.",
        rich_help_panel=_LENGTHS,
    ),
]
OutputRange = Annotated[
    str | None,
    typer.Option(metavar="LOW[:HIGH]", help="Likewise for output tokens. Unset: 8:512.", rich_help_panel=_LENGTHS),
]
InputTokens = Annotated[
    int | None,
    typer.Option(
        "--input",
        "--input-tokens",
        min=1,
        metavar="N",
        help="poisson, constant, chat: instead of --input-range, prompts of N tokens, or with --length-ratio from R *"
        " N to N.",
        rich_help_panel=_LENGTHS,
    ),
]
OutputTokens = Annotated[
    int | None,
    typer.Option(
        "--output",
        "--output-tokens",
        min=1,
        metavar="N",
        help="Likewise for output tokens.",
        rich_help_panel=_LENGTHS,
    ),
]
LengthRatio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="With --input, --output: draw lengths uniformly from R * N to N inclusive. Unset: 1.",
        rich_help_panel=_LENGTHS,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Request exactly the workload's output length; otherwise the model ends at that length by itself.",
        rich_help_panel=_LENGTHS,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --no-ignore-eos: max_new_tokens of each request, or its true length if that is longer.",
        rich_help_panel=_LENGTHS,
    ),
]
SkipTooLong = Annotated[
    bool | None,
    typer.Option(
        "--skip-too-long/--keep-too-long",
        help="Skip requests that the cluster's limits refuse, or send them. Unset: skip them in the shipped excerpts.",
        rich_help_panel=_LENGTHS,
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(
        metavar="IDS",
        help="Adapter ids and families, such as 'chat,lora-{0..31}'; 'all': those of the cluster. Unset: the base"
        " model.",
        rich_help_panel=_ADAPTERS,
    ),
]
NumAdapters = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Use the first N of --adapters, or of the cluster's adapters.",
        rich_help_panel=_ADAPTERS,
    ),
]
AdapterExponent = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="S",
        help="All but slora: Zipf exponent over the adapters; 0 is uniform. Unset: 1.",
        rich_help_panel=_ADAPTERS,
    ),
]
Drift = Annotated[
    str | None,
    typer.Option(
        metavar="KIND,PARTS",
        help="All but slora: how popularity changes with the time t. diurnal,period=T[,amplitude=A]: weight of rank i"
        " of N times 1 + A * sin(2 pi * (t / T + i / N)). flash,at=S,for=S[,share=p][,adapter=i]: a share p (0.5) of"
        " all requests goes to one adapter (the last). shift,every=S[,by=k]: rank i becomes i + k * floor(t / S)"
        " modulo N.",
        rich_help_panel=_ADAPTERS,
    ),
]
Alpha = Annotated[
    float,
    typer.Option(
        metavar="ALPHA",
        help="slora: exponent of its power law; 1 is uniform, less is more skewed (not a Zipf exponent).",
        rich_help_panel=_ADAPTERS,
    ),
]
AdapterDirs = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="slora: name adapter i as S-LoRA does: name number i mod k, then -(i div k); needs --num-adapters.",
        rich_help_panel=_ADAPTERS,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-c",
        min=1,
        max=5000,
        metavar="N",
        help="Closed loop: N clients, each sending one request after another. Unset: open loop.",
        rich_help_panel=_DRIVE,
    ),
]
RequestsPerClient = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With -c: N requests per client, instead of -n. Unset: 10 if --input or --output is given, and neither -n"
        " nor --duration.",
        rich_help_panel=_DRIVE,
    ),
]
Warmup = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Number of short requests before the run, excluded from all figures.",
        rich_help_panel=_DRIVE,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, metavar="SECONDS", help="Deadline of each request, wall seconds.", rich_help_panel=_DRIVE),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write summary.json, requests.csv and report.html to this folder.", rich_help_panel=_OUTPUT
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        " /--no-report",
        show_default=False,  # by default there is a report
        help="With --out: do not write report.html.",
        rich_help_panel=_OUTPUT,
    ),
]


def check_report(out: Path | None, *, report: bool) -> None:
    """Check that `--no-report` is given only together with a folder.

    Raises:
        SettingsError: `--no-report` without a folder.
    """
    if out is None and not report:
        raise SettingsError("--no-report goes with --out DIR only: without it no report.html is written; leave it out")


def load_options(given: Mapping[str, Any], of_target: Mapping[str, Any] | None = None) -> LoadOptions:
    """Build the options from a command's parameters.

    Args:
        given: every option above by its parameter's name, and anything else (a command's `locals()`).
        of_target: options that do not apply to a simulation (`options.OF_TARGET`), by name; None: their defaults.

    Raises:
        SettingsError: an unknown workload or an invalid range.
    """
    values = {field.name: given[field.name] for field in fields(LoadOptions) if field.name not in OF_TARGET}
    if values["workload"] is None:
        values["workload"] = workload_of(values["trace"])
    for name, parse in PARSERS.items():
        if isinstance(values[name], str):
            values[name] = parse(values[name])
    return LoadOptions(**(of_target or {}), **values)
