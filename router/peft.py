"""Adapters as PEFT keeps them: a folder with `adapter_config.json`, whose `r` is the rank."""

import json
from pathlib import Path

_MAX_CONFIG_BYTES = 1 << 16


def rank_in(folder: str) -> int | None:
    """Return the rank of the adapter in a folder on this machine; None: no readable adapter."""
    try:
        with (Path(folder) / "adapter_config.json").open("rb") as file:
            rank = json.loads(file.read(_MAX_CONFIG_BYTES)).get("r")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return rank if type(rank) is int and 0 <= rank < 2**32 else None
