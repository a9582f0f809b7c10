"""Converts the arguments of `vllm serve` and similar programs into the form that this command line takes.

--max_num_seqs 8                 --max-num-seqs 8              vLLM takes underscores
--lora-modules a=8 b=8           --lora-modules a=8 --lora-modules b=8
--enable-prefix-caching=false    --no-enable-prefix-caching    Go's flags have values
-tp 2                            --tensor-parallel-size 2
--max-num-seq 8                  --max-num-seqs 8              argparse takes the beginning of a name, if it is of one
--load-format auto                                             taken without effect, with a line that says so
"""

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from lorrery.cli.flags import Flag
from lorrery.cli.serve.flags import FLAGS, NOT_VLLMS, NOTHING
from lorrery.service.errors import SettingsError
from lorrery.service.names import cut

Values = Literal["flags", "lists", "switches"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A flag without effect.

    Attributes:
        values: `flags` have one, `lists` any number, `switches` none.
        why: it has no effect.
    """

    values: Values
    why: str


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("lorrery.cli.serve") / "other_flags.toml").read_text(encoding="utf-8"))


@cache
def refused() -> list[tuple[str, list[str]]]:
    """Return (what to do instead, flags) for each group."""
    return [
        (" ".join(one["instead"].split()), [*one.get("flags", "").split(), *one.get("others", "").split()])
        for one in _tables()["refused"]
    ]


@cache
def others() -> list[str]:
    """Return the refused flags that are not vLLM's."""
    return [flag for one in _tables()["refused"] for flag in one.get("others", "").split()]


@cache
def taken() -> dict[str, Taken]:
    """Return the flags that are taken without effect, by name."""
    kinds: tuple[Values, ...] = ("flags", "lists", "switches")
    return {
        flag: Taken(kind, " ".join(one["why"].split()))
        for one in _tables()["taken"]
        for kind in kinds
        for flag in one.get(kind, "").split()
    }


def instead_of(flag: str) -> str | None:
    """Return what to do instead of giving a flag, with or without `--no-`; None: it is not among the refused ones."""
    names = {flag, f"--{flag.removeprefix('--no-')}"}
    return next((why for why, flags in refused() if names & set(flags)), None)


_OWN = (
    *("--set", "--print-config", "--dry-run", "--replicas", "--ports", "--announce", "--version", "--help"),
    "-h",
)
_SHORT = {
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-pcp": "--prefill-context-parallel-size",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
}
"""Short names of flags that are not in the table."""
_ADAPTERS = "; adapters are --lora-modules NAME=RANK or NAME=PATH"
_ATTACHED = re.compile(r"(-[A-Za-z])(\d+)")
_NEGATIVE = re.compile(r"-\d+")
_BY_NAME = {part: flag for flag in FLAGS for name in flag.names for part in name.split("/")}
_NOT_VLLMS = {*NOT_VLLMS, *others(), *_OWN}
_SWITCHES = (
    *(name for name, flag in _BY_NAME.items() if flag.kind is bool and name.startswith("--")),
    *(name for name, flag in taken().items() if flag.values == "switches"),
)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _print_nothing(line: str) -> None:
    del line


def arranged(arguments: Iterable[str], notice: Callable[[str], None] = _print_nothing) -> list[str]:
    """Return the arguments in this command's form.

    Args:
        arguments: as given.
        notice: called with a line for each flag that is taken without effect.

    Raises:
        SettingsError: a flag that is not taken; the message says what to do instead.
    """
    found: list[str] = []
    several: str | None = None  # flag that may take further values
    rest = list(reversed(list(arguments)))
    while rest:
        argument = rest.pop()
        if argument == "--":
            return [*found, argument, *reversed(rest)]
        if not _is_flag(argument):
            found += [several, argument] if several is not None and found[-1] != several else [argument]
            continue
        several = None
        name, flag, value = _named(argument)
        if isinstance(flag, Taken):
            shown = " ".join([name, *_values(flag, value, rest)])
            notice(f"{cut(shown)} has no effect: {flag.why}")
        elif flag is None:
            found.append(name if value is None else f"{name}={value}")
        elif flag.kind is bool:
            if flag.sets == NOTHING:
                notice(f"{name} has no effect: {flag.help}")
            found.append(_switch(name, flag, value))
        else:
            if flag.sets == NOTHING and flag.only is None:
                notice(f"{name} has no effect: {flag.help}")
            name = flag.names[0]
            found.append(name if value is None else f"{name}={value}")
            several = name if flag.kind == list[str] else None
    return found


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NEGATIVE.fullmatch(argument)


def _values(flag: Taken, attached: str | None, rest: list[str]) -> list[str]:
    """Take the values of a flag without effect from the reversed arguments that remain."""
    if attached is not None:
        return [attached]
    most = {"switches": 0, "flags": 1, "lists": len(rest)}[flag.values]
    found: list[str] = []
    while rest and len(found) < most and not _is_flag(rest[-1]):
        found.append(rest.pop())
    return found


def _named(argument: str) -> tuple[str, Flag | Taken | None, str | None]:
    """Return a flag's name, the flag if it is in a table, and the value attached with `=`."""
    if attached := _ATTACHED.fullmatch(argument):
        argument = "=".join(attached.groups())
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    given = value if equals else None
    if name in _OWN:
        return name, None, given
    if (flag := _flag_of(name)) is not None:
        return name, flag, given
    bare, _, key = name.partition(".")  # vLLM takes --some-config.key too
    whole = _SHORT.get(bare) or _completed(bare)
    if (flag := _flag_of(whole)) is not None and not (key and isinstance(flag, Flag)):
        return f"{whole}.{key}" if key else whole, flag, given
    if whole in _OWN:
        return whole, None, given
    if why := instead_of(name) or instead_of(whole):
        raise SettingsError(f"{whole} is not for this command: {why}")
    near = get_close_matches(name, (*_BY_NAME, *taken(), *_OWN), n=1)
    raise SettingsError(f"{name}: no such flag{f'; did you mean {near[0]}?' if near else ''} (lorrery serve --help)")


def _flag_of(name: str) -> Flag | Taken | None:
    """Return the flag of this name; of a switch, also with `--no-`."""
    known = _BY_NAME.get(name) or taken().get(name)
    if known is not None or not name.startswith("--no-"):
        return known
    switch = _flag_of(f"--{name.removeprefix('--no-')}")
    is_switch = switch.values == "switches" if isinstance(switch, Taken) else switch is not None and switch.kind is bool
    return switch if is_switch else None


def _completed(name: str) -> str:
    """Return the one flag whose name begins like this, and the name itself if there is none.

    Raises:
        SettingsError: there are several.
    """
    if not name.startswith("--") or name == "--":
        return name
    explained = [flag for _, flags in refused() for flag in flags]
    if {name, f"--{name.removeprefix('--no-')}"} & {*explained}:
        return name
    found: dict[str, str] = {}  # by the flag's own name
    negatable = (*_SWITCHES, *explained) if name.startswith("--no-") else ()
    negated = [f"--no-{flag.removeprefix('--')}" for flag in negatable]
    begun = [whole for whole in (*_BY_NAME, *taken(), *explained, *_OWN, *negated) if whole.startswith(name)]
    for whole in [whole for whole in begun if whole not in _NOT_VLLMS] or begun:
        own = _BY_NAME[whole].key if whole in _BY_NAME else whole
        found.setdefault(own, whole)
    if len(found) > 1:
        cure = _ADAPTERS if "--lora-modules".startswith(name) else ""
        raise SettingsError(f"{name}: several flags begin so: {', '.join(sorted(found.values()))}{cure}")
    return next(iter(found.values()), name)


def _switch(name: str, flag: Flag, value: str | None) -> str:
    on, _, off = flag.names[0].partition("/")
    wanted = name != off and not name.startswith("--no-")
    if value is not None:
        if value.lower() not in _TRUTH:
            raise SettingsError(f"{name}={value}: true or false expected")
        wanted = wanted == _TRUTH[value.lower()]
    if not wanted and not off:
        raise SettingsError(f"{on} cannot be turned off; leave it out")
    return on if wanted else off
