"""Flags that `lorrery serve` refuses: `not_taken.toml`, which gives the alternative for each."""

import tomllib
from functools import cache
from importlib.resources import files


@cache
def groups() -> list[tuple[str, list[str]]]:
    """Return (what to do instead, flags) for each group."""
    tables = tomllib.loads((files("lorrery.cli.serve") / "not_taken.toml").read_text(encoding="utf-8"))["group"]
    return [(" ".join(one["instead"].split()), one["flags"].split()) for one in tables]


def instead_of(flag: str) -> str | None:
    """Return what to do instead of giving a flag, with or without `--no-`; None: no such program has the flag."""
    bare = flag.partition(".")[0]  # vLLM takes --some-config.key too
    names = {flag, bare, f"--{flag.removeprefix('--no-')}"}
    return next((why for why, flags in groups() if names & set(flags)), None)
