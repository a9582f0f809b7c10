"""What a run of the load generator is asked for, and what of it cannot be.

Reports repeat the options, so a run can be made again.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.shipped import TRACES

__all__ = [
    "ALL_ADAPTERS",
    "DEFAULT_WORKLOAD",
    "GIVEN",
    "OF_TARGET",
    "GivenWorkload",
    "LoadOptions",
    "ProtocolName",
    "WorkloadName",
    "expand_adapters",
    "parse_range",
    "protocol_name",
    "workload_name",
]

WorkloadName = Literal["slora", "azure", "mooncake", "poisson", "constant"]
DEFAULT_WORKLOAD: WorkloadName = "poisson"

ProtocolName = Literal["grpc", "openai", "openai-chat", "slora"]
DEFAULT_TARGETS: dict[ProtocolName, str] = {
    "grpc": "127.0.0.1:50051",
    "openai": "127.0.0.1:8000",
    "openai-chat": "127.0.0.1:8000",
    "slora": "127.0.0.1:8000",
}
OF_TARGET = ("target", "protocol", "model", "prompt_ids")
"""Options that a simulation has not."""

GivenWorkload = Literal["given"]
GIVEN: GivenWorkload = "given"
"""Requests of the caller's own (`workload.arrays`), which no command can ask for."""

ALL_ADAPTERS = "all"
"""In place of adapter ids: those that the cluster lists."""

_FAMILY = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_TRACE_ALONE = "--trace does not go with --workload {}; add --workload azure (CSV) or mooncake (JSON Lines)"
_DEFAULT_RANGE = (8, 512)  # S-LoRA's synthetic suites
_DEFAULT_DURATION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A run, as asked for. None: not given, the workload's own default.

    Attributes:
        target: the server, HOST:PORT or over HTTP a URL; empty where there is none to dial.
        protocol: what is spoken with it.
        model: the base model's name, over HTTP; empty: the first that the server lists.
        prompt_ids: `openai` only: send prompts as token ids.
        duration: device seconds of the schedule (after the speed-up).
        adapters: ids and families (`lora-{0..31}`), comma-separated; `all`: what the cluster lists.
        adapter_dirs: slora only: names by S-LoRA's rule.
        trace: azure and mooncake only; None: the excerpt that ships.
        jitter: mooncake only: seconds over which requests of one stamp are spread.
        skip_too_long: leave out requests that the cluster's limits would refuse; None: of the excerpts that ship.
        timeout: of each request, wall seconds.
    """

    target: str = ""
    protocol: ProtocolName = "grpc"
    model: str = ""
    prompt_ids: bool = False
    workload: WorkloadName | GivenWorkload = DEFAULT_WORKLOAD
    trace: Path | None = None
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
    input_range: tuple[int, int] = _DEFAULT_RANGE
    output_range: tuple[int, int] = _DEFAULT_RANGE
    jitter: float = 0.0
    concurrency: int | None = None
    warmup: int = 0
    seed: int = 42
    ignore_eos: bool = True
    max_new_tokens: int | None = None
    skip_too_long: bool | None = None
    timeout: float = 300.0

    @property
    def trace_file(self) -> Path | None:
        """The file whose requests are played: `trace`, or the excerpt that ships for this workload."""
        return self.trace or TRACES.get(self.workload)

    @property
    def skips_too_long(self) -> bool:
        """Whether requests that the cluster's limits would refuse are left out."""
        return self.trace is None and self.workload in TRACES if self.skip_too_long is None else self.skip_too_long

    @property
    def schedule_seconds(self) -> float | None:
        """How long sending goes on, device seconds; None: as long as the trace or the number of requests makes it."""
        has_end = self.trace_file is not None or self.workload == GIVEN
        if self.duration is None and self.num_requests is None and not has_end:
            return _DEFAULT_DURATION_SECONDS
        return self.duration

    @property
    def repeats(self) -> bool:
        """Whether the workload begins again at its end: a closed loop bounded by time alone."""
        return self.concurrency is not None and self.num_requests is None and self.schedule_seconds is not None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingsError: names the option.
        """
        for option, value in (("rate", self.rate), ("cv", self.cv), ("alpha", self.alpha), ("speed-up", self.speed_up)):
            if not 0 < value < math.inf:
                raise SettingsError(f"--{option} is {value:g}; it must be above 0")
        rules: tuple[tuple[bool, str], ...] = (
            (self.workload not in TRACES and self.trace is not None, _TRACE_ALONE.format(self.workload)),
            (bool(self.adapter_dirs) and self.workload != "slora", "--adapter-dirs goes with --workload slora only"),
            (bool(self.adapter_dirs and self.adapters), "give --adapters or --adapter-dirs, not both"),
            (bool(self.adapter_dirs) and self.num_adapters is None, "--adapter-dirs needs --num-adapters"),
            (self.adapter_exponent is not None and self.workload == "slora", "slora's skew is --alpha"),
            (self.jitter != 0 and self.workload != "mooncake", "--jitter goes with --workload mooncake only"),
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


def workload_name(text: str) -> WorkloadName:
    """Read a workload's name.

    Raises:
        SettingsError: no such workload.
    """
    names: tuple[WorkloadName, ...] = get_args(WorkloadName)
    for name in names:
        if name == text:
            return name
    raise SettingsError(f"--workload {text}: expected one of {', '.join(names)}")


def protocol_name(text: str) -> ProtocolName:
    """Read a protocol's name.

    Raises:
        SettingsError: no such protocol.
    """
    for name in DEFAULT_TARGETS:
        if name == text:
            return name
    raise SettingsError(f"--protocol {text}: expected one of {', '.join(DEFAULT_TARGETS)}")


def parse_range(text: str) -> tuple[int, int]:
    """Read `lo:hi` or a single number.

    Raises:
        SettingsError: anything else.
    """
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise SettingsError(f"range {text!r}: expected LOW:HIGH or one number, in tokens") from None


def expand_adapters(text: str) -> list[str]:
    """Spell out a comma-separated list of ids and families: `base-ft,lora-{0..3}`.

    Raises:
        SettingsError: an empty id, a family that runs backwards, or an id twice.
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        match = _FAMILY.fullmatch(part)
        if match is None:
            names.append(part)
            continue
        head, first, last, tail = match.groups()
        if int(last) < int(first):
            raise SettingsError(f"adapters: family {part!r} runs backwards")
        names.extend(f"{head}{number}{tail}" for number in range(int(first), int(last) + 1))
    if not all(names) or len(set(names)) < len(names):
        raise SettingsError(f"adapters: {text!r} has an empty id or names one twice")
    return names
