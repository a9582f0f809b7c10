"""Reads options in their command-line form: names, ranges, families of adapters, and options with parts.

Parts are written as faults are: `flash,at=60,for=30,share=0.8`.
"""

import math
import re
from collections.abc import Mapping
from typing import Literal, get_args

from lorrery.loadgen.workload.arrivals import Bursts
from lorrery.loadgen.workload.popularity import MOST_ADAPTERS, Diurnal, Drift, Flash, Shift
from lorrery.service.errors import SettingsError
from lorrery.service.settings.sections import MAX_ADAPTERS

WorkloadName = Literal["slora", "azure", "mooncake", "poisson", "constant", "chat", "sharegpt", "trace"]
DEFAULT_WORKLOAD: WorkloadName = "poisson"
TRACE: WorkloadName = "trace"
"""What the file of `trace` has, whatever its form."""

ALL_ADAPTERS = "all"
"""In place of adapter ids: all that the cluster lists."""

ProtocolName = Literal["grpc", "openai", "openai-chat", "slora"]
DEFAULT_TARGETS: dict[ProtocolName, str] = {
    "grpc": "127.0.0.1:50051",
    "openai": "127.0.0.1:8000",
    "openai-chat": "127.0.0.1:8000",
    "slora": "127.0.0.1:8000",
}

_FAMILY = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_MOST_DIGITS = 100
"""In a family's first and last number: Python reads at most 4,300, and messages should stay readable."""
_DRIFT = {
    "diurnal": ("period", "amplitude"),
    "flash": ("at", "for", "share", "adapter"),
    "shift": ("every", "by"),
}
_BURSTS = ("factor", "for", "share")


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


def parse_shared_prefix(text: str) -> tuple[int, int]:
    """Read TOKENS or TOKENS:GROUPS.

    Raises:
        SettingsError: anything else.
    """
    tokens, colon, groups = text.partition(":")
    try:
        found = int(tokens), int(groups if colon else 1)
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise SettingsError(f"--shared-prefix {text}: expected TOKENS or TOKENS:GROUPS, both 1 or more")
    return found


def parse_range(text: str) -> tuple[int, int]:
    """Read `lo:hi` or a single number.

    Raises:
        SettingsError: anything else.
    """
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise SettingsError(f"range {text!r}: expected LOW:HIGH or one number") from None


def expand_adapters(text: str) -> list[str]:
    """Expand a comma-separated list of ids and families: `base-ft,lora-{0..3}`.

    Raises:
        SettingsError: an empty id, a descending family, a duplicate id, or more than `MAX_ADAPTERS`.
    """
    names: list[str] = []
    num_wanted = 0
    for part in (part.strip() for part in text.split(",")):
        match = _FAMILY.fullmatch(part)
        if match is None:
            names.append(part)
            continue
        head, first, last, tail = match.groups()
        most_digits = max(len(first), len(last))
        if most_digits > _MOST_DIGITS:
            raise SettingsError(
                f"adapters: a family is numbered with {most_digits} digits; {_MOST_DIGITS} at most are read, and a"
                f" workload has at most {MAX_ADAPTERS:,} adapters"
            )
        if int(last) < int(first):
            raise SettingsError(f"adapters: family {part!r} runs backwards")
        num_wanted += int(last) - int(first) + 1
        if num_wanted > MAX_ADAPTERS:
            raise SettingsError(
                f"adapters: family {part!r} makes {num_wanted:,}; a workload has at most {MAX_ADAPTERS:,}; end the"
                " family at a smaller number"
            )
        names.extend(f"{head}{number}{tail}" for number in range(int(first), int(last) + 1))
    if not all(names) or len(set(names)) < len(names):
        raise SettingsError(f"adapters: {text!r} has an empty id or names one twice")
    return names


def parse_drift(text: str) -> Drift:
    """Read a drift of popularity.

    Raises:
        SettingsError: names the error.
    """
    kind, _, rest = text.partition(",")
    if kind not in _DRIFT:
        raise SettingsError(f"--drift {text}: expected {', '.join(_DRIFT)}, then its parts, as in flash,at=60,for=30")
    parts = _parts("--drift", text, rest, _DRIFT[kind])
    try:
        match kind:
            case "diurnal":
                return Diurnal(parts["period"], parts.get("amplitude", 1.0))
            case "flash":
                adapter = parts.get("adapter")
                index = None if adapter is None else _whole("--drift", text, "adapter", adapter)
                return Flash(parts["at"], parts["for"], parts.get("share", 0.5), index)
            case _:
                return Shift(parts["every"], _whole("--drift", text, "by", parts.get("by", 1.0)))
    except KeyError as error:
        raise SettingsError(f"--drift {text}: {error.args[0]} is not given") from None
    except ValueError as error:
        raise SettingsError(f"--drift {text}: {error}") from None


def parse_bursts(text: str) -> Bursts:
    """Read the parameters of bursts.

    Raises:
        SettingsError: names the error.
    """
    parts = _parts("--bursts", text, text, _BURSTS)
    try:
        return Bursts(parts["factor"], parts["for"], parts.get("share", 0.1))
    except KeyError as error:
        raise SettingsError(f"--bursts {text}: {error.args[0]} is not given") from None
    except ValueError as error:
        raise SettingsError(f"--bursts {text}: {error}") from None


def _parts(flag: str, text: str, rest: str, known: tuple[str, ...]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in known or name in found:
            raise SettingsError(f"{flag} {text}: {name!r}; expected each of {', '.join(known)} once at most")
        try:
            found[name] = float(value)
        except ValueError:
            raise SettingsError(f"{flag} {text}: {name} is {value!r}; expected a number") from None
        if not math.isfinite(found[name]):
            raise SettingsError(f"{flag} {text}: {name} is {value}; it must be finite")
    return found


def _whole(flag: str, text: str, name: str, value: float) -> int:
    if value != int(value) or abs(value) > MOST_ADAPTERS:
        raise SettingsError(
            f"{flag} {text}: {name} is {value:g}; expected a whole number from -{MOST_ADAPTERS:,} to {MOST_ADAPTERS:,}"
        )
    return int(value)
