"""Flags of `other_flags.toml`: taken without effect, or refused, each with a reason."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

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
