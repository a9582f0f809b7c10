"""Parses options in their command-line form: ranges, names, families of adapters."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.sections import MAX_ADAPTERS
from lorrery.loadgen.options import DEFAULT_TARGETS, DEFAULT_WORKLOAD, TRACE, ProtocolName, WorkloadName

_FAMILY = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_MOST_DIGITS = 100
"""In a family's first and last number: Python reads at most 4,300, and messages should stay readable."""


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


def workload_of(trace: object) -> WorkloadName:
    """Return the workload if none is named; `trace`: the file's path, or None."""
    return DEFAULT_WORKLOAD if trace is None else TRACE


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


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "workload": workload_name,
    "input_range": parse_range,
    "output_range": parse_range,
    "turns": parse_range,
    "shared_prefix": parse_shared_prefix,
    "trace": Path,
    "tokenizer": Path,
}
"""Parsers of options that are not plain text."""
