"""The workload options shared by `lorrery load` and `lorrery simulate`.

Each is the type of a command's parameter, including its flag and help.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from lorrery.chassis.errors import SettingsError
from lorrery.loadgen.option_texts import PARSERS
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
    str,
    typer.Option(
        help=f"What to play: {', '.join(get_args(WorkloadName))}.",
        metavar="NAME",
        rich_help_panel=_WORKLOAD,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="azure (CSV), mooncake (JSON Lines): the trace. Unset: the excerpt that ships. sharegpt: its JSON file.",
        rich_help_panel=_WORKLOAD,
    ),
]
SpeedUp = Annotated[
    float,
    typer.Option(metavar="FACTOR", help="Play so many times as fast as recorded or drawn.", rich_help_panel=_WORKLOAD),
]
NumRequests = Annotated[
    int | None,
    typer.Option("--num-requests", "-n", min=1, metavar="N", help="The first N requests.", rich_help_panel=_WORKLOAD),
]
Duration = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Requests (first turns of sessions) due within so many seconds; of drawn workloads 60 unless -n is given.",
        rich_help_panel=_WORKLOAD,
    ),
]
Rate = Annotated[
    float,
    typer.Option(
        metavar="R",
        help="Drawn ones: requests per second; chat, sharegpt: sessions per second.",
        rich_help_panel=_WORKLOAD,
    ),
]
Cv = Annotated[
    float,
    typer.Option(
        metavar="CV",
        help="All drawn but constant: coefficient of variation of the gaps (gamma); 1 is Poisson, more is uneven.",
        rich_help_panel=_WORKLOAD,
    ),
]
Bursts = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        help="poisson, chat, sharegpt: MMPP arrivals, factor=F,for=SECONDS[,share=p]: a share p (0.1) of the time is"
        " burst, SECONDS each on average, with the rate F * R / (1 - p + p * F); calm times have R / (1 - p + p * F).",
        rich_help_panel=_WORKLOAD,
    ),
]
Turns = Annotated[
    str | None,
    typer.Option(
        metavar="LOW[:HIGH]",
        help="chat: turns of a session, uniform (2:6); sharegpt: at most HIGH (1). Turn k + 1 has the whole history:"
        " prompt = shared + sum over j <= k of (own(j) + output(j)) + own(k + 1).",
        rich_help_panel=_SESSIONS,
    ),
]
Think = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="chat, sharegpt: mean of the exponential time from the end of an answer to the next turn.",
        rich_help_panel=_SESSIONS,
    ),
]
SharedPrefix = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS[:GROUPS]",
        help="Drawn ones but slora: so many tokens more before each prompt, of one of GROUPS (1), drawn for each"
        " session or request: a system prompt.",
        rich_help_panel=_SESSIONS,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="sharegpt: a tokenizer.json, or its folder, that says how long texts are. Unset: the one that ships.",
        rich_help_panel=_LENGTHS,
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="mooncake: spread requests of one stamp over so many seconds (its stamps step by 3).",
        rich_help_panel=_WORKLOAD,
    ),
]
Seed = Annotated[
    int,
    typer.Option(min=0, max=MOST_SEED, metavar="N", help="Of every draw, prompts included.", rich_help_panel=_WORKLOAD),
]
InputRange = Annotated[
    str | None,
    typer.Option(
        metavar="LOW[:HIGH]",
        help="Drawn ones: prompt tokens (slora leaves HIGH out, as S-LoRA does); chat: own ones of a turn. Unset:"
        " 8:512.",
        rich_help_panel=_LENGTHS,
    ),
]
OutputRange = Annotated[
    str | None,
    typer.Option(metavar="LOW[:HIGH]", help="The same for output tokens. Unset: 8:512.", rich_help_panel=_LENGTHS),
]
InputTokens = Annotated[
    int | None,
    typer.Option(
        "--input",
        "--input-tokens",
        min=1,
        metavar="N",
        help="poisson, constant, chat: in place of --input-range: prompts of N tokens, or with --length-ratio of R * N"
        " to N.",
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
        help="The same for output tokens.",
        rich_help_panel=_LENGTHS,
    ),
]
LengthRatio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="With --input, --output: lengths are drawn uniformly from R * N to N, both included. Unset: 1.",
        rich_help_panel=_LENGTHS,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Ask for exactly the workload's output length; otherwise the model ends there by itself.",
        rich_help_panel=_LENGTHS,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --no-ignore-eos: the limit that requests name, where the true length is not above it.",
        rich_help_panel=_LENGTHS,
    ),
]
SkipTooLong = Annotated[
    bool | None,
    typer.Option(
        "--skip-too-long/--keep-too-long",
        help="Leave out what the cluster's limits refuse, or send it. Unset: left out of the excerpts that ship.",
        rich_help_panel=_LENGTHS,
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(
        metavar="IDS",
        help="Ids and families, such as 'chat,lora-{0..31}'; 'all': those of the cluster. Unset: the base model.",
        rich_help_panel=_ADAPTERS,
    ),
]
NumAdapters = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="The first N of --adapters, or of the cluster's.", rich_help_panel=_ADAPTERS),
]
AdapterExponent = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="S",
        help="All but slora: Zipf's exponent over the adapters; 0 is uniform. Unset: 1.",
        rich_help_panel=_ADAPTERS,
    ),
]
Drift = Annotated[
    str | None,
    typer.Option(
        metavar="KIND,PARTS",
        help="All but slora: how popularity changes with the time t. diurnal,period=T[,amplitude=A]: weight of rank i"
        " of N times 1 + A * sin(2 pi * (t / T + i / N)). flash,at=S,for=S[,share=p][,adapter=i]: a share p (0.5) of"
        " all goes to one (the last). shift,every=S[,by=k]: rank i becomes i + k * floor(t / S) modulo N.",
        rich_help_panel=_ADAPTERS,
    ),
]
Alpha = Annotated[
    float,
    typer.Option(
        metavar="ALPHA",
        help="slora: its power law; 1 is uniform, less is more skewed (not Zipf's exponent).",
        rich_help_panel=_ADAPTERS,
    ),
]
AdapterDirs = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="slora: name adapter i as S-LoRA does, name number i mod k, then -(i div k); needs --num-adapters.",
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
        help="Closed loop: so many clients, each sending one request after another. Unset: open loop.",
        rich_help_panel=_DRIVE,
    ),
]
RequestsPerClient = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With -c: N requests for each client, in place of -n. Unset: 10 where --input or --output is given, and"
        " neither -n nor --duration.",
        rich_help_panel=_DRIVE,
    ),
]
Warmup = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Short requests before the run, in no figure.", rich_help_panel=_DRIVE),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, metavar="SECONDS", help="Deadline of each request, wall seconds.", rich_help_panel=_DRIVE),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write summary.json, requests.csv and report.html there.", rich_help_panel=_OUTPUT
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        " /--no-report",
        show_default=False,  # by default there is a report
        help="With --out: leave out report.html.",
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
    for name, parse in PARSERS.items():
        if isinstance(values[name], str):
            values[name] = parse(values[name])
    return LoadOptions(**(of_target or {}), **values)
