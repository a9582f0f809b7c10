"""The table of workload options: each with its name, type, default, help, bounds and the workloads that it goes with.

`lorrery load`, `lorrery simulate` and its sweeps take these options, `lorrery.simulate` and `lorrery.LoadOptions` take
them from Python, and `option_rules` checks them, all from this table. Reports repeat them, so that a run can be
repeated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from lorrery.loadgen.option_texts import (
    DEFAULT_TARGETS,
    DEFAULT_WORKLOAD,
    TRACE,
    ProtocolName,
    WorkloadName,
    parse_range,
    parse_shared_prefix,
    protocol_name,
    workload_name,
)
from lorrery.loadgen.workload.request import MOST_TOKENS
from lorrery.service.files.shipped import TRACES
from lorrery.service.options import Option, given_to, options_of
from lorrery.service.settings.sections import MAX_ADAPTERS
from lorrery.vocabulary.units import LAST_SECONDS

GivenWorkload = Literal["given"]
GIVEN: GivenWorkload = "given"
"""The caller's own requests (`workload.arrays`), which no command can select."""

_WORKLOAD, _SESSIONS, _LENGTHS, _ADAPTERS, _DRIVE = (
    "Workload",
    "Sessions and shared prefixes",
    "Lengths",
    "Adapters",
    "How it is played",
)
_OF_SESSIONS = ("chat", "sharegpt")
RECORDED = ("azure", "mooncake", TRACE)
DRAWN = ("poisson", "constant", *_OF_SESSIONS)
_RATE_DRAWN = ("poisson", "constant", "slora", *_OF_SESSIONS)
_ARRIVALS_DRAWN = ("poisson", "slora", *_OF_SESSIONS)
_LENGTHS_DRAWN = ("poisson", "constant", "slora", "chat")

_MOST_CLIENTS = 1_000_000
"""In a closed loop; each is an object in memory."""
_MOST_CLIENTS_TYPED = 5000
_LEAST_TIMEOUT = 0.001
_MOST_FACTOR = 1e9
"""Limit on rates and on factors of time."""
_MOST_SEED = 2**32 - 1
_MOST_WARMUP = 1_000_000
_DEFAULT_TURNS = {"chat": (2, 6), "sharegpt": (1, 1)}
_DEFAULT_RANGE = (8, 512)  # S-LoRA's synthetic suites
_DEFAULT_REQUESTS_PER_CLIENT = 10  # InferenceX
_DEFAULT_DURATION_SECONDS = 60.0

_FASTER = "; its requests have times of their own, and --speed-up F plays them F times as fast"
_OWN_LENGTHS = "; its requests have lengths of their own"


@dataclass(frozen=True, slots=True)
class LoadOption(Option):
    """A row of the table, beside the field's name, type and default.

    Attributes:
        live_only: does not apply to a simulation.
        must_be: words for the bounds, where the usual ones do not fit.
        workloads: those in which it has an effect; empty: all.
        cure: what to do instead with another workload.
        refusal: words for another workload, where the usual ones do not fit.
        needs: what it has no effect without: `times` of requests (a closed loop has none), `adapters`.
    """

    live_only: bool = False
    must_be: str = ""
    workloads: tuple[str, ...] = ()
    cure: str = ""
    refusal: str = ""
    needs: tuple[Literal["times", "adapters"], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run. None: not given, the workload's default applies.

    `target` is empty if there is no server; ranges and `shared_prefix` are pairs; `workload` may be `given`.
    """

    target: Annotated[
        str,
        LoadOption(
            "Address of the server; over HTTP a URL also works. Unset: the router's default address.",
            metavar="HOST:PORT",
            derived=True,
            live_only=True,
        ),
    ] = ""
    protocol: Annotated[
        ProtocolName,
        LoadOption(
            f"Protocol: {', '.join(DEFAULT_TARGETS)}. All but grpc are HTTP, for any server.",
            metavar="NAME",
            parse=protocol_name,
            live_only=True,
        ),
    ] = "grpc"
    model: Annotated[
        str,
        LoadOption(
            "HTTP: name of the base model. Unset: the first model that the server lists.",
            metavar="NAME",
            live_only=True,
        ),
    ] = ""
    prompt_ids: Annotated[
        bool, LoadOption("openai: send prompts as token ids, not as text.", names=("--prompt-ids",), live_only=True)
    ] = False
    workload: Annotated[
        WorkloadName | GivenWorkload,
        LoadOption(
            f"Workload: {', '.join(get_args(WorkloadName))}. Unset: poisson, or with --trace what its file has.",
            _WORKLOAD,
            "NAME",
            parse=workload_name,
            derived=True,
        ),
    ] = DEFAULT_WORKLOAD
    trace: Annotated[
        Path | None,
        LoadOption(
            "File of recorded requests or conversations, in any form of docs/load.md. Unset: for azure and"
            " mooncake the shipped excerpt.",
            _WORKLOAD,
            "FILE",
            names=("--trace", "--from-metrics"),
            parse=Path,
        ),
    ] = None
    block_tokens: Annotated[
        int | None,
        LoadOption(
            "Traces with hash_ids: tokens of a prompt's blocks. Unset: what the rows say.",
            _WORKLOAD,
            "N",
            least=1,
            most=MOST_TOKENS,
            workloads=RECORDED,
            refusal=f"--block-tokens goes with --workload {', '.join(RECORDED)} only",
        ),
    ] = None
    speed_up: Annotated[
        float,
        LoadOption(
            "Play the workload this many times as fast as recorded or drawn.",
            _WORKLOAD,
            "FACTOR",
            above=0,
            most=_MOST_FACTOR,
        ),
    ] = 1.0
    num_requests: Annotated[
        int | None, LoadOption("Only the first N requests.", _WORKLOAD, "N", names=("--num-requests", "-n"), least=1)
    ] = None
    duration: Annotated[
        float | None,
        LoadOption(
            "Only requests (first turns of sessions) due within this time; for drawn workloads 60 unless -n is"
            " given. slora: R times as many requests, whenever they are due.",
            _WORKLOAD,
            "SECONDS",
            least=0.0,
            most=LAST_SECONDS,
        ),
    ] = None
    rate: Annotated[
        float,
        LoadOption(
            "Drawn workloads: requests per second; chat, sharegpt: sessions per second.",
            _WORKLOAD,
            "R",
            above=0,
            most=_MOST_FACTOR,
            workloads=_RATE_DRAWN,
            cure=_FASTER,
            needs=("times",),
        ),
    ] = 2.0
    cv: Annotated[
        float,
        LoadOption(
            "Drawn workloads except constant: coefficient of variation of the gaps (gamma); 1 is Poisson, more is"
            " burstier.",
            _WORKLOAD,
            "CV",
            workloads=_ARRIVALS_DRAWN,
            cure=_FASTER,
            needs=("times",),
        ),
    ] = 1.0
    bursts: Annotated[
        str | None,
        LoadOption(
            "poisson, chat, sharegpt: MMPP arrivals, factor=F,for=SECONDS[,share=p]: bursts take a share p (0.1) of"
            " the time, last SECONDS each on average, and have the rate F * R / (1 - p + p * F); calm times have R /"
            " (1 - p + p * F).",
            _WORKLOAD,
            "PARTS",
            workloads=("poisson", *_OF_SESSIONS),
            refusal="--bursts goes with --workload poisson, chat and sharegpt only",
            needs=("times",),
        ),
    ] = None
    jitter: Annotated[
        float,
        LoadOption(
            "Recorded requests: spread those of the same time over this time.",
            _WORKLOAD,
            "SECONDS",
            least=0.0,
            most=LAST_SECONDS,
            workloads=RECORDED,
            refusal=f"--jitter goes with --workload {', '.join(RECORDED)} only",
            needs=("times",),
        ),
    ] = 0.0
    seed: Annotated[
        int,
        LoadOption(
            "Seed of all random draws, including prompts.",
            _WORKLOAD,
            "N",
            least=0,
            most=_MOST_SEED,
            most_typed=_MOST_SEED,
            must_be=f"from 0 to {_MOST_SEED:,}",
        ),
    ] = 42
    turns: Annotated[
        tuple[int, int] | None,
        LoadOption(
            "chat: turns per session, uniform (2:6); sharegpt: at most HIGH (1). Turn k + 1 repeats the whole"
            " history: prompt = shared + sum over j <= k of (own(j) + output(j)) + own(k + 1).",
            _SESSIONS,
            "LOW[:HIGH]",
            parse=parse_range,
            workloads=_OF_SESSIONS,
            refusal="--turns goes with --workload chat and sharegpt only",
        ),
    ] = None
    think: Annotated[
        float,
        LoadOption(
            "chat, sharegpt: mean of the exponential think time between the end of a response and the next turn.",
            _SESSIONS,
            "SECONDS",
            least=0.0,
            most=LAST_SECONDS,
            must_be=f"0 or more, and at most {LAST_SECONDS:,} s",
            workloads=_OF_SESSIONS,
        ),
    ] = 5.0
    shared_prefix: Annotated[
        tuple[int, int] | None,
        LoadOption(
            "Drawn workloads except slora: shared system prompt of N tokens before each prompt, one of GROUPS (1),"
            " drawn per session or request.",
            _SESSIONS,
            "TOKENS[:GROUPS]",
            parse=parse_shared_prefix,
            workloads=DRAWN,
            refusal=f"--shared-prefix goes with --workload {', '.join(DRAWN)} only",
        ),
    ] = None
    input_tokens: Annotated[
        int | None,
        LoadOption(
            "poisson, constant, chat: instead of --input-range, prompts of N tokens, or with --length-ratio from R *"
            " N to N.",
            _LENGTHS,
            "N",
            names=("--input", "--input-tokens"),
            least=1,
            workloads=("poisson", "constant", "chat"),
        ),
    ] = None
    output_tokens: Annotated[
        int | None,
        LoadOption(
            "Likewise for output tokens.",
            _LENGTHS,
            "N",
            names=("--output", "--output-tokens"),
            least=1,
            workloads=("poisson", "constant", "chat"),
        ),
    ] = None
    length_ratio: Annotated[
        float | None,
        LoadOption(
            "With --input, --output: draw lengths uniformly from R * N to N inclusive. Unset: 1.",
            _LENGTHS,
            "R",
            above=0,
            most=1,
        ),
    ] = None
    input_range: Annotated[
        tuple[int, int] | None,
        LoadOption(
            "Drawn workloads: prompt tokens (slora excludes HIGH, as S-LoRA does); chat: new tokens per turn. Unset:"
            " 8:512.",
            _LENGTHS,
            "LOW[:HIGH]",
            parse=parse_range,
            workloads=_LENGTHS_DRAWN,
            cure=_OWN_LENGTHS,
        ),
    ] = None
    output_range: Annotated[
        tuple[int, int] | None,
        LoadOption(
            "Likewise for output tokens. Unset: 8:512.",
            _LENGTHS,
            "LOW[:HIGH]",
            parse=parse_range,
            workloads=_LENGTHS_DRAWN,
            cure=_OWN_LENGTHS,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        LoadOption(
            "sharegpt: a tokenizer.json or its folder, to measure the lengths of texts. Unset: the shipped one.",
            _LENGTHS,
            "FILE",
            parse=Path,
            workloads=("sharegpt",),
            refusal="--tokenizer goes with --workload sharegpt only",
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        LoadOption(
            "Request exactly the workload's output length; otherwise the model ends at that length by itself.", _LENGTHS
        ),
    ] = True
    max_new_tokens: Annotated[
        int | None,
        LoadOption(
            "With --no-ignore-eos: max_new_tokens of each request, or its true length if that is longer.",
            _LENGTHS,
            "N",
            least=1,
        ),
    ] = None
    skip_too_long: Annotated[
        bool | None,
        LoadOption(
            "Skip requests that the cluster's limits refuse, or send them. Unset: skip them in the shipped excerpts.",
            _LENGTHS,
            names=("--skip-too-long/--keep-too-long",),
        ),
    ] = None
    adapters: Annotated[
        str | None,
        LoadOption(
            "Adapter ids and families, such as 'chat,lora-{0..31}'; 'all': those of the cluster. Unset: the base"
            " model.",
            _ADAPTERS,
            "IDS",
        ),
    ] = None
    num_adapters: Annotated[
        int | None,
        LoadOption(
            "Use the first N of --adapters, or of the cluster's adapters.", _ADAPTERS, "N", least=0, most=MAX_ADAPTERS
        ),
    ] = None
    adapter_exponent: Annotated[
        float | None,
        LoadOption(
            "All but slora: Zipf exponent over the adapters; 0 is uniform. Unset: 1.",
            _ADAPTERS,
            "S",
            least=0.0,
            needs=("adapters",),
        ),
    ] = None
    drift: Annotated[
        str | None,
        LoadOption(
            "All but slora: how popularity changes with the time t. diurnal,period=T[,amplitude=A]: weight of rank i"
            " of N times 1 + A * sin(2 pi * (t / T + i / N)). flash,at=S,for=S[,share=p][,adapter=i]: a share p (0.5)"
            " of all requests goes to one adapter (the last). shift,every=S[,by=k]: rank i becomes i + k * floor(t /"
            " S) modulo N.",
            _ADAPTERS,
            "KIND,PARTS",
            needs=("times", "adapters"),
        ),
    ] = None
    alpha: Annotated[
        float,
        LoadOption(
            "slora: exponent of its power law; 1 is uniform, less is more skewed (not a Zipf exponent).",
            _ADAPTERS,
            "ALPHA",
            above=0,
            most=_MOST_FACTOR,
            workloads=("slora",),
            cure="; the skew of others is --adapter-exponent",
            needs=("adapters",),
        ),
    ] = 1.0
    adapter_dirs: Annotated[
        str | None,
        LoadOption(
            "slora: name adapter i as S-LoRA does: name number i mod k, then -(i div k); needs --num-adapters.",
            _ADAPTERS,
            "NAMES",
            workloads=("slora",),
            refusal="--adapter-dirs goes with --workload slora only",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        LoadOption(
            "Closed loop: N clients, each sending one request after another. Unset: open loop.",
            _DRIVE,
            "N",
            names=("--concurrency", "-c"),
            least=1,
            most=_MOST_CLIENTS,
            most_typed=_MOST_CLIENTS_TYPED,
        ),
    ] = None
    requests_per_client: Annotated[
        int | None,
        LoadOption(
            "With -c: N requests per client, instead of -n. Unset: 10 if --input or --output is given, and neither -n"
            " nor --duration.",
            _DRIVE,
            "N",
            least=1,
        ),
    ] = None
    warmup: Annotated[
        int,
        LoadOption(
            "Number of short requests before the run, excluded from all figures.",
            _DRIVE,
            "N",
            least=0,
            most=_MOST_WARMUP,
        ),
    ] = 0
    timeout: Annotated[
        float, LoadOption("Deadline of each request, wall seconds.", _DRIVE, "SECONDS", least=_LEAST_TIMEOUT)
    ] = 300.0

    @property
    def trace_file(self) -> Path | None:
        """The trace file: `trace`, or the shipped excerpt for this workload."""
        return self.trace or TRACES.get(self.workload)

    @property
    def skips_too_long(self) -> bool:
        """Whether requests that the cluster's limits would refuse are dropped."""
        return self.trace is None and self.workload in TRACES if self.skip_too_long is None else self.skip_too_long

    @property
    def is_drawn(self) -> bool:
        """Whether another seed makes other requests: of recorded ones only jitter, adapters and prefixes are drawn."""
        lengths = (*self.prompt_lengths, *self.output_lengths)
        is_fixed = self.workload in (*RECORDED, GIVEN) or (self.workload == "constant" and len(set(lengths)) == 1)
        return not is_fixed or bool(self.adapters or self.num_adapters or self.jitter or self.shared_prefix)

    @property
    def prompt_lengths(self) -> tuple[int, int]:
        """Prompt tokens of drawn workloads, from and to."""
        return self._lengths(self.input_tokens, self.input_range)

    @property
    def output_lengths(self) -> tuple[int, int]:
        """Output tokens of drawn workloads, from and to."""
        return self._lengths(self.output_tokens, self.output_range)

    def _lengths(self, most: int | None, given: tuple[int, int] | None) -> tuple[int, int]:
        if most is None:
            return given or _DEFAULT_RANGE
        ratio = Fraction(1 if self.length_ratio is None else str(self.length_ratio))
        return max(int(ratio * most), 1), most

    @property
    def most_requests(self) -> int | None:
        """Largest number of requests; None: given by the trace or the duration."""
        if self.num_requests is not None or self.concurrency is None:
            return self.num_requests
        each = self.requests_per_client
        if each is None and self.duration is None and (self.input_tokens or self.output_tokens):
            each = _DEFAULT_REQUESTS_PER_CLIENT
        return None if each is None else each * self.concurrency

    @property
    def schedule_seconds(self) -> float | None:
        """How long requests are sent, device seconds; None: given by the trace or the number of requests."""
        has_end = self.trace_file is not None or self.workload == GIVEN
        if self.duration is None and self.most_requests is None and not has_end:
            return _DEFAULT_DURATION_SECONDS
        return self.duration

    @property
    def has_sessions(self) -> bool:
        """Whether requests are turns of sessions."""
        return self.workload in _OF_SESSIONS

    @property
    def turns_range(self) -> tuple[int, int]:
        """Turns of a session, from and to."""
        return self.turns or _DEFAULT_TURNS.get(self.workload, (1, 1))

    @property
    def repeats(self) -> bool:
        """Whether the workload restarts at its end: a closed loop limited by time alone."""
        return self.concurrency is not None and self.most_requests is None and self.schedule_seconds is not None

    @property
    def is_recorded(self) -> bool:
        """Whether requests have recorded times: those of a trace, if its file has no conversations."""
        return self.workload in RECORDED


OPTIONS: Mapping[str, LoadOption] = {
    name: option for name, option in options_of(LoadOptions).items() if isinstance(option, LoadOption)
}
"""The rows by field, in the order of the help."""

DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(LoadOptions)}
OF_TARGET = tuple(name for name, option in OPTIONS.items() if option.live_only)
PARSERS: Mapping[str, Callable[[str], Any]] = {
    name: option.parse for name, option in OPTIONS.items() if option.parse is not None and not option.live_only
}
"""Parsers of a simulation's options that are neither plain text nor numbers."""


def workload_of(trace: object) -> WorkloadName:
    """Return the workload if none is named; `trace`: the file's path, or None."""
    return DEFAULT_WORKLOAD if trace is None else TRACE


def load_options(given: Mapping[str, Any], *, live: bool) -> LoadOptions:
    """Build the options from a command line.

    Args:
        given: values by field, as text where the option has a parser; other entries are ignored.
        live: whether there is a target; without one, its options keep their defaults.

    Raises:
        SettingsError: an unknown workload or protocol, or an invalid range.
    """
    own = {name: given[name] for name, option in OPTIONS.items() if live or not option.live_only}
    values = given_to(LoadOptions, own)
    values.setdefault("workload", workload_of(values.get("trace")))
    if live:
        values.setdefault("target", DEFAULT_TARGETS[values["protocol"]])
    return LoadOptions(**values)
