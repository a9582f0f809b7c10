"""Converts the arguments of `vllm serve` and similar programs into the form that this command line takes.

--max_num_seqs 8                 --max-num-seqs 8              vLLM takes underscores
--lora-modules a=8 b=8           --lora-modules a=8 --lora-modules b=8
--enable-prefix-caching=false    --no-enable-prefix-caching    Go's flags have values
-tp 2                            --tensor-parallel-size 2
-O3                              -O=3
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from lorrery.chassis.errors import SettingsError
from lorrery.cli.serve.flag import Flag
from lorrery.cli.serve.flags import FLAGS
from lorrery.cli.serve.not_taken import instead_of

_OWN = ("--set", "--print-config", "--dry-run", "--version", "--help", "-h")
_SHORT = {"-O": "--optimization-level", "-r": "--node-rank"}
_ATTACHED = re.compile(r"(-[A-Za-z])(\d+)")
_NEGATIVE = re.compile(r"-\d+")
_BY_NAME = {part: flag for flag in FLAGS for name in flag.names for part in name.split("/")}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def arranged(arguments: Iterable[str]) -> list[str]:
    """Return the arguments in this command's form.

    Raises:
        SettingsError: a flag that is not taken; the message says what to do instead.
    """
    found: list[str] = []
    several: str | None = None  # flag that may take further values
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*found, argument, *rest]
        if not argument.startswith("-") or argument == "-" or _NEGATIVE.fullmatch(argument):
            found += [several, argument] if several is not None and found[-1] != several else [argument]
            continue
        several = None
        name, flag, value = _named(argument)
        if flag is None:
            found.append(name if value is None else f"{name}={value}")
        elif flag.kind is bool:
            found.append(_switch(name, flag, value))
        else:
            name = flag.names[0]
            found.append(name if value is None else f"{name}={value}")
            several = name if flag.kind == list[str] else None
    return found


def _named(argument: str) -> tuple[str, Flag | None, str | None]:
    """Return a flag's name, the flag if it is in the table, and the value attached with `=`."""
    if attached := _ATTACHED.fullmatch(argument):
        argument = "=".join(attached.groups())
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    given = value if equals else None
    if name in _BY_NAME or name in _OWN:
        return name, _BY_NAME.get(name), given
    switch = _BY_NAME.get(f"--{name.removeprefix('--no-')}")
    if name.startswith("--no-") and switch is not None and switch.kind is bool:
        return name, switch, given
    name = _SHORT.get(name, name)
    if why := instead_of(name):
        raise SettingsError(f"{name} is not for this command: {why}")
    near = get_close_matches(name, (*_BY_NAME, *_OWN), n=1)
    raise SettingsError(f"{name}: no such flag{f'; did you mean {near[0]}?' if near else ''} (lorrery serve --help)")


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


def values_of(given: Iterable[str]) -> Iterator[str]:
    """Yield the values of a flag that takes several; they may also be separated by commas."""
    for text in given:
        yield from (part.strip() for part in text.split(",") if part.strip())
