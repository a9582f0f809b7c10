"""Options of a load-generator run, and their validation.

Reports repeat the options, so that a run can be repeated.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.sections import MAX_ADAPTERS
from lorrery.chassis.shipped import TRACES
from lorrery.loadgen.options_in_vain import why_in_vain
from lorrery.loadgen.specs import parse_bursts, parse_drift
from lorrery.loadgen.workload.request import MOST_TOKENS
from lorrery.vocabulary.units import LAST_SECONDS

__all__ = [
    "ALL_ADAPTERS",
    "DEFAULT_WORKLOAD",
    "GIVEN",
    "OF_TARGET",
    "TRACE",
    "GivenWorkload",
    "LoadOptions",
    "ProtocolName",
    "WorkloadName",
]

WorkloadName = Literal["slora", "azure", "mooncake", "poisson", "constant", "chat", "sharegpt", "trace"]
DEFAULT_WORKLOAD: WorkloadName = "poisson"
TRACE: WorkloadName = "trace"
"""What the file of `trace` has, whatever its form."""

ProtocolName = Literal["grpc", "openai", "openai-chat", "slora"]
DEFAULT_TARGETS: dict[ProtocolName, str] = {
    "grpc": "127.0.0.1:50051",
    "openai": "127.0.0.1:8000",
    "openai-chat": "127.0.0.1:8000",
    "slora": "127.0.0.1:8000",
}
OF_TARGET = ("target", "protocol", "model", "prompt_ids")
"""Options that do not apply to a simulation."""

GivenWorkload = Literal["given"]
GIVEN: GivenWorkload = "given"
"""The caller's own requests (`workload.arrays`), which no command can select."""

ALL_ADAPTERS = "all"
"""In place of adapter ids: all that the cluster lists."""

_TRACE_ALONE = "--trace does not go with --workload {}; --workload trace plays a file of any known form"
_SESSIONS = ("chat", "sharegpt")
_RECORDED = ("azure", "mooncake", TRACE)
MOST_CLIENTS = 1_000_000
"""In a closed loop; each is an object in memory."""
LEAST_TIMEOUT = 0.001
MOST_FACTOR = 1e9
"""Limit on rates and on factors of time."""
MOST_SEED = 2**32 - 1
MOST_TURNS = 10_000
"""In a session."""
LEAST_CV, MOST_CV = 1e-6, 1e6
"""Of arrivals; beyond these limits the gamma distribution exceeds doubles."""
_DRAWN = ("poisson", "constant", *_SESSIONS)
_WITH_LENGTHS = ("poisson", "constant", "chat")
_DEFAULT_TURNS = {"chat": (2, 6), "sharegpt": (1, 1)}
_DEFAULT_RANGE = (8, 512)  # S-LoRA's synthetic suites
_MOST_WARMUP = 1_000_000
_DEFAULT_REQUESTS_PER_CLIENT = 10  # InferenceX
_DEFAULT_DURATION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run. None: not given, the workload's default applies.

    Attributes:
        target: the server, HOST:PORT or over HTTP a URL; empty if there is no server.
        protocol: of the server.
        model: the base model's name, over HTTP; empty: the first that the server lists.
        prompt_ids: `openai` only: send prompts as token ids.
        duration: device seconds of the schedule (after the speed-up).
        input_range: prompt tokens of drawn workloads, from and to; None: 8 to 512, unless `input_tokens` is given.
        output_range: likewise for output tokens.
        input_tokens: in place of `input_range`: most prompt tokens; `length_ratio` sets the fewest.
        output_tokens: likewise for output tokens.
        length_ratio: shortest length as a share of the longest one; None: 1, fixed lengths.
        requests_per_client: closed loop: requests of each client; None: given by `num_requests`, or, without that and
            `duration`, 10 if `input_tokens` or `output_tokens` is given.
        adapters: ids and families (`lora-{0..31}`), comma-separated; `all`: all that the cluster lists.
        adapter_dirs: slora only: names by S-LoRA's rule.
        trace: trace, azure, mooncake and sharegpt only: a file of a form that `workload.traces` knows; None: the
            shipped excerpt.
        block_tokens: of the blocks of its prompts; None: what its rows say.
        bursts: burst arrivals (`specs.parse_bursts`); None: only as uneven as `cv`.
        drift: change of the adapters' popularity (`specs.parse_drift`); None: constant.
        turns: chat and sharegpt only: turns of a session; None: the workload's default.
        think: chat and sharegpt only: mean seconds from an answer to the next turn.
        shared_prefix: length of shared prompt prefixes in tokens, and their number; None: none.
        tokenizer: sharegpt only: a tokenizer.json or its folder; None: the shipped one.
        jitter: recorded requests only: seconds over which those of one time are spread.
        skip_too_long: drop requests that the cluster's limits would refuse; None: for shipped excerpts only.
        timeout: of each request, wall seconds.
    """

    target: str = ""
    protocol: ProtocolName = "grpc"
    model: str = ""
    prompt_ids: bool = False
    workload: WorkloadName | GivenWorkload = DEFAULT_WORKLOAD
    trace: Path | None = None
    block_tokens: int | None = None
    speed_up: float = 1.0
    num_requests: int | None = None
    duration: float | None = None
    rate: float = 2.0
    cv: float = 1.0
    alpha: float = 1.0
    num_adapters: int | None = None
    adapters: str | None = None
    adapter_dirs: str | None = None
    adapter_exponent: float | None = None
    input_range: tuple[int, int] | None = None
    output_range: tuple[int, int] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    length_ratio: float | None = None
    jitter: float = 0.0
    bursts: str | None = None
    drift: str | None = None
    turns: tuple[int, int] | None = None
    think: float = 5.0
    shared_prefix: tuple[int, int] | None = None
    tokenizer: Path | None = None
    concurrency: int | None = None
    requests_per_client: int | None = None
    warmup: int = 0
    seed: int = 42
    ignore_eos: bool = True
    max_new_tokens: int | None = None
    skip_too_long: bool | None = None
    timeout: float = 300.0

    @property
    def trace_file(self) -> Path | None:
        """The trace file: `trace`, or the shipped excerpt for this workload."""
        return self.trace or TRACES.get(self.workload)

    @property
    def skips_too_long(self) -> bool:
        """Whether requests that the cluster's limits would refuse are dropped."""
        return self.trace is None and self.workload in TRACES if self.skip_too_long is None else self.skip_too_long

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
        return self.workload in _SESSIONS

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
        return self.workload in _RECORDED

    def check(self) -> None:
        """Check all options and their combinations.

        Of `trace`, whose file is not open yet, those are refused that go neither with recorded requests nor with
        conversations; `check_opened` checks again.

        Raises:
            SettingsError: names the option.
        """
        if self.workload == TRACE and self.trace is not None:
            with suppress(SettingsError):
                replace(self, workload="sharegpt").check_opened()
                return
        self.check_opened()

    def check_opened(self) -> None:
        """Check all options and their combinations, `trace` as recorded requests.

        Raises:
            SettingsError: names the option.
        """
        for option, value in (("rate", self.rate), ("alpha", self.alpha), ("speed-up", self.speed_up)):
            if not 0 < value <= MOST_FACTOR:
                raise SettingsError(f"--{option} is {value:g}; it must be above 0 and at most {MOST_FACTOR:g}")
        if not LEAST_CV <= self.cv <= MOST_CV:
            raise SettingsError(f"--cv is {self.cv:g}; it must be from {LEAST_CV:g} to {MOST_CV:g}")
        self._check_bounds()
        rules: tuple[tuple[bool, str], ...] = (
            (not 0 <= self.seed <= MOST_SEED, f"--seed is {self.seed}; it must be from 0 to {MOST_SEED:,}"),
            (
                self.workload not in (*_RECORDED, "sharegpt") and self.trace is not None,
                _TRACE_ALONE.format(self.workload),
            ),
            (self.workload == TRACE and self.trace is None, "--workload trace needs --trace FILE"),
            (self.workload == "sharegpt" and self.trace is None, "--workload sharegpt needs --trace FILE"),
            (
                self.tokenizer is not None and self.workload != "sharegpt",
                "--tokenizer goes with --workload sharegpt only",
            ),
            (
                self.turns is not None and self.turns[1] > MOST_TURNS,
                f"--turns goes to {self.turns_range[1]}; a session has {MOST_TURNS:,} at most",
            ),
            (self.turns is not None and not self.has_sessions, "--turns goes with --workload chat and sharegpt only"),
            (
                not 0 <= self.think <= LAST_SECONDS,
                f"--think is {self.think:g}; it must be 0 or more, and at most {LAST_SECONDS:,} s",
            ),
            (
                self.shared_prefix is not None and self.workload not in _DRAWN,
                f"--shared-prefix goes with --workload {', '.join(_DRAWN)} only",
            ),
            (
                self.bursts is not None and (self.workload not in _DRAWN or self.workload == "constant"),
                "--bursts goes with --workload poisson, chat and sharegpt only",
            ),
            (self.bursts is not None and self.cv != 1, "give --bursts or --cv, not both"),
            (self.drift is not None and self.workload == "slora", "--drift does not go with --workload slora"),
            *self._length_rules(),
            (
                self.prompt_ids and self.turns_range[1] > 1,
                "--prompt-ids does not go with sessions of several turns: answers come as text",
            ),
            (bool(self.adapter_dirs) and self.workload != "slora", "--adapter-dirs goes with --workload slora only"),
            (bool(self.adapter_dirs and self.adapters), "give --adapters or --adapter-dirs, not both"),
            (bool(self.adapter_dirs) and self.num_adapters is None, "--adapter-dirs needs --num-adapters"),
            (self.adapter_exponent is not None and self.workload == "slora", "slora's skew is --alpha"),
            (self.jitter != 0 and not self.is_recorded, f"--jitter goes with --workload {', '.join(_RECORDED)} only"),
            (
                self.block_tokens is not None and not self.is_recorded,
                f"--block-tokens goes with --workload {', '.join(_RECORDED)} only",
            ),
            (self.ignore_eos and self.max_new_tokens is not None, "--max-new-tokens needs --no-ignore-eos"),
            (
                bool(self.model) and self.protocol == "grpc",
                "--model goes with --protocol openai, openai-chat and slora",
            ),
            (self.prompt_ids and self.protocol != "openai", "--prompt-ids goes with --protocol openai (grpc has ids)"),
        )
        for broken, message in rules:
            if broken:
                raise SettingsError(message)
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        given = {name: value for name, (value, default) in values.items() if value != default}
        if in_vain := why_in_vain(given, self.workload):
            raise SettingsError(in_vain)
        if self.length_ratio is not None and not 0 < self.length_ratio <= 1:
            raise SettingsError(f"--length-ratio is {self.length_ratio:g}; it must be above 0 and at most 1")
        lengths = {"--input-range": self.prompt_lengths, "--output-range": self.output_lengths}
        for option, (least, most) in lengths.items():
            if most > MOST_TOKENS:
                raise SettingsError(f"{option} goes to {most} tokens; at most {MOST_TOKENS} can be drawn")
            _check_range(option, least, most, half_open=self.workload == "slora")
        _check_range("--turns", *self.turns_range)
        if self.shared_prefix is not None:
            self._check_shared_prefix(*self.shared_prefix)
        if self.bursts is not None:
            parse_bursts(self.bursts)
        if self.drift is not None:
            parse_drift(self.drift)

    def _check_bounds(self) -> None:
        """Check the bounds that the command line enforces itself, for callers from Python."""
        bounds: tuple[tuple[str, float | None, float, float], ...] = (
            ("num-requests", self.num_requests, 1, math.inf),
            ("duration", self.duration, 0, LAST_SECONDS),
            ("concurrency", self.concurrency, 1, MOST_CLIENTS),
            ("num-adapters", self.num_adapters, 0, MAX_ADAPTERS),
            ("adapter-exponent", self.adapter_exponent, 0, math.inf),
            ("warmup", self.warmup, 0, _MOST_WARMUP),
            ("max-new-tokens", self.max_new_tokens, 1, math.inf),
            ("jitter", self.jitter, 0, LAST_SECONDS),
            ("block-tokens", self.block_tokens, 1, MOST_TOKENS),
            ("timeout", self.timeout, LEAST_TIMEOUT, math.inf),
        )
        for option, value, least, most in bounds:
            if value is not None and not least <= value <= most:
                limit = f" and at most {most:,.0f}" if most < math.inf else ""
                raise SettingsError(f"--{option} is {value}; it must be {least:g} or more{limit}")

    def _check_shared_prefix(self, tokens: int, groups: int) -> None:
        own = 0 if self.workload == "sharegpt" else self.prompt_lengths[1]
        if tokens + own > MOST_TOKENS:
            raise SettingsError(
                f"--shared-prefix {tokens} and prompts of up to {own} tokens after it; at most {MOST_TOKENS} together"
            )
        if groups > MOST_TOKENS:
            raise SettingsError(f"--shared-prefix has {groups} groups; at most {MOST_TOKENS} can be drawn from")

    def _length_rules(self) -> Iterable[tuple[bool, str]]:
        """Yield rules on lengths and the number of requests: (broken, message)."""
        both = ("input", self.input_tokens, self.input_range), ("output", self.output_tokens, self.output_range)
        for name, most, given in both:
            if most is None:
                continue
            shown = "" if given is None else ":".join(map(str, given))
            yield given is not None, f"--{name} {most} and --{name}-range {shown} both say how long it is; give one"
            yield most < 1, f"--{name} is {most}; it must be 1 or more"
            yield (
                self.workload not in _WITH_LENGTHS,
                f"--{name} {most} goes with --workload {', '.join(_WITH_LENGTHS)} only; --workload is {self.workload}",
            )
        yield (
            self.length_ratio is not None and self.input_tokens is None and self.output_tokens is None,
            f"--length-ratio {self.length_ratio} needs --input or --output, whose share it is",
        )
        each = self.requests_per_client
        yield each is not None and each < 1, f"--requests-per-client is {each}; it must be 1 or more"
        yield (
            each is not None and self.concurrency is None,
            f"--requests-per-client {each} needs clients: add -c N, or give -n instead",
        )
        yield (
            each is not None and self.num_requests is not None,
            f"--requests-per-client {each} and -n {self.num_requests} both say how many requests; give one",
        )


def _check_range(option: str, low: int, high: int, *, half_open: bool = False) -> None:
    if low < 1:
        raise SettingsError(f"{option} is {low}:{high}; it must begin at 1 or more")
    if high < low + half_open:
        why = "slora draws below HIGH, so HIGH must be above LOW" if half_open else "HIGH must be LOW or more"
        raise SettingsError(f"{option} is {low}:{high}, which is empty; {why}")
