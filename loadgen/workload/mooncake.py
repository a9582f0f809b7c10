"""Reader of Mooncake's traces (JSON Lines).

Source: github.com/kvcache-ai/Mooncake, `FAST25-release/traces` (Apache-2.0); Qin et al., "Mooncake: Trading More
Storage for Less Computation", FAST 2025. Fields: `timestamp` (milliseconds from the start), `input_length`,
`output_length` (tokens), `hash_ids` (ids of consecutive 512-token blocks of the prompt; the last is usually partial).
Rows may have a `priority` as well, which theirs have not.

Stamps step by about 3,000 ms: requests that share one arrived somewhere in that window, in the file's order. Replayed
unchanged they come in bursts of about ten; `spread` moves them apart. A report must say which was used.
"""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import numpy as np

from lorrery.loadgen.workload.request import MOST_TOKENS, TraceError, WorkloadRequest

__all__ = ["ATTRIBUTION", "BLOCK_TOKENS", "WINDOW_SECONDS", "read_mooncake", "spread"]

ATTRIBUTION = "Mooncake traces (Apache-2.0); Qin et al., Mooncake: Trading More Storage for Less Computation, FAST 2025"
BLOCK_TOKENS = 512
"""Prompt tokens per entry of `hash_ids`."""
WINDOW_SECONDS = 3.0
"""Distance of two stamps in the conversation trace."""


def read_mooncake(lines: Iterable[str], limit: int | None = None) -> list[WorkloadRequest]:
    """Read a trace; the earliest row is sent at 0.

    Args:
        lines: the file's lines, with or without their ends; empty ones are skipped.
        limit: most rows to read.

    Returns:
        Requests in time order; rows with equal stamps stay in file order. A length of 0 counts as one token, because
        empty requests do not exist here.

    Raises:
        TraceError: a row that does not parse, or whose `hash_ids` do not fit its length; no row at all.
    """
    filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    rows = [_read_row(number, line) for number, line in islice(filled, limit)]
    if not rows and limit != 0:
        raise TraceError("there is no row in it")
    rows.sort(key=lambda row: row[0])
    return [
        WorkloadRequest(
            index, (stamp - rows[0][0]) / 1e3, prompt_tokens, output_tokens, hash_ids=hash_ids, priority=priority
        )
        for index, (stamp, prompt_tokens, output_tokens, hash_ids, priority) in enumerate(rows)
    ]


def spread(
    workload: Sequence[WorkloadRequest], rng: np.random.Generator, window_seconds: float = WINDOW_SECONDS
) -> list[WorkloadRequest]:
    """Place requests that share a stamp at random within the window that follows it, in their order.

    Args:
        workload: in send order.
        rng: one uniform draw per request.
        window_seconds: length of the window, in the workload's own seconds.
    """
    placed: list[WorkloadRequest] = []
    for stamp, same in groupby(workload, key=lambda request: request.at_seconds):
        group = list(same)
        offsets = np.sort(rng.uniform(0.0, window_seconds, len(group))).tolist()
        placed.extend(
            replace(request, at_seconds=stamp + offset) for request, offset in zip(group, offsets, strict=True)
        )
    placed.sort(key=lambda request: request.at_seconds)
    return [replace(request, index=index) for index, request in enumerate(placed)]


def _read_row(number: int, line: str) -> tuple[float, int, int, "array[int] | None", int]:
    try:
        row: Any = json.loads(line.removeprefix("\ufeff") if number == 1 else line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"line {number}: expected one JSON object in each line, found {line.strip()[:80]}")
    try:
        stamp, prompt_tokens, output_tokens = row["timestamp"], row["input_length"], row["output_length"]
    except KeyError as error:
        raise TraceError(f"line {number}: no field {error}") from None
    hash_ids, priority = row.get("hash_ids"), row.get("priority", 0)
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise TraceError(f"line {number}: priority is {priority!r}; expected a whole number of 32 bits, signed")
    for name, value in (("timestamp", stamp), ("input_length", prompt_tokens), ("output_length", output_tokens)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise TraceError(f"line {number}: {name} is {value!r}; expected a number, 0 or more")
        if name != "timestamp" and not (isinstance(value, int) or value.is_integer()):
            raise TraceError(f"line {number}: {name} is {value!r}; expected a whole number of tokens")
        if name != "timestamp" and value > MOST_TOKENS:
            raise TraceError(f"line {number}: {name} is {value!r}; at most {MOST_TOKENS} tokens can be")
    prompt_tokens, output_tokens = max(int(prompt_tokens), 1), max(int(output_tokens), 1)
    if hash_ids is None:
        return float(stamp), prompt_tokens, output_tokens, None, priority
    if not isinstance(hash_ids, list) or not all(type(block) is int and 0 <= block < 2**64 for block in hash_ids):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers from 0 to 2**64 - 1")
    num_blocks = -(-prompt_tokens // BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise TraceError(f"line {number}: {len(hash_ids)} hash_ids for {prompt_tokens} tokens; expected {num_blocks}")
    return float(stamp), prompt_tokens, output_tokens, array("Q", hash_ids), priority
