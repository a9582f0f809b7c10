"""Traces in JSON, an object for each request.

Mooncake: github.com/kvcache-ai/Mooncake, `FAST25-release/traces` (Apache-2.0). `timestamp` (milliseconds from the
start), `input_length`, `output_length` (tokens), `hash_ids` (ids of consecutive blocks of the prompt; the last is
usually partial; theirs have 512 tokens). Tools that write this format (NVIDIA's Dynamo and AIPerf) have other sizes of
blocks, hashes of 64 bits, and sessions: a row with a `delay` (milliseconds) is sent so long after the answer to the row
of its `session_id` before. `input_length` counts the whole prompt of such a row too. Rows may have a `priority`.

Qwen-Bailian: github.com/alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0). The same, with seconds, blocks of 16
tokens, and `chat_id`, `parent_chat_id`, `turn`, `type`. Each row has a time, and the blocks of all of its prompt, so
what a chat has in common with its parent needs no more.

LLMServingSim: github.com/casys-kaist/LLMServingSim, `workloads`. `input_toks`, `output_toks`, `arrival_time_ns`;
`input_tok_ids`, whose blocks are hashed here. An object with `sub_requests` is a session: each is sent
`tool_duration_ns` of the one before after that one's answer.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import BLOCK_TOKENS, MOST_TOKENS, TraceError

__all__ = ["JSON_FORMS", "JsonForm"]

Add = Callable[[RecordedRows, str, Mapping[str, Any]], None]

_HASHED_TOKENS: Final = 16
"""Of a block whose tokens are known: vLLM's own."""
_NS: Final = 1e9
_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A form of objects.

    Attributes:
        title: for the reader of a report.
        key: that tells it; the first form of `JSON_FORMS` whose key an object has is its.
        per_second: of the times' unit.
        add: adds an object to the rows.
        block_tokens: of a prompt's blocks, where the rows leave it open.
        attribution: author and licence.
    """

    title: str
    key: str
    per_second: float
    add: Add
    block_tokens: int = BLOCK_TOKENS
    attribution: str = ""


def _add_mooncake(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    session, delay = row.get("session_id"), row.get("delay")
    if session is not None and not isinstance(session, str | int):
        raise TraceError(f"{where}: session_id is {session!r}; expected a text or a whole number")
    follows = delay is not None or ("timestamp" not in row and rows.knows(session))
    rows.add(
        where,
        _time(where, row, "timestamp", is_needed=session is None),
        _tokens(where, row, "input_length"),
        _tokens(where, row, "output_length"),
        block_ids=_block_ids(where, row.get("hash_ids")),
        priority=_priority(where, row.get("priority", 0)),
        session=session,
        think_seconds=_time(where, row, "delay", is_needed=False) / _MS if follows else None,
    )


def _add_serving_sim(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    parts = row.get("sub_requests")
    if parts is None:
        _add_call(rows, where, row, _time(where, row, "arrival_time_ns"))
        return
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        raise TraceError(f"{where}: sub_requests must be a list of objects, one or more")
    at, think = _time(where, row, "arrival_time_ns"), None
    for part in parts:
        if rows.is_full:
            break
        _add_call(rows, where, part, at, where, think)
        think = _time(where, part, "tool_duration_ns", is_needed=False) / _NS


def _add_call(
    rows: RecordedRows,
    where: str,
    row: Mapping[str, Any],
    at: float,
    session: str | None = None,
    think_seconds: float | None = None,
) -> None:
    prompt, token_ids = _tokens(where, row, "input_toks"), row.get("input_tok_ids")
    if token_ids is not None:
        try:
            tokens = array("I", token_ids if isinstance(token_ids, list) else ["of another type"])
        except (TypeError, OverflowError):
            raise TraceError(f"{where}: input_tok_ids must be a list of token ids") from None
        if len(tokens) != prompt:
            raise TraceError(f"{where}: {len(tokens)} input_tok_ids for {prompt} tokens")
    rows.add(
        where,
        at,
        prompt,
        _tokens(where, row, "output_toks"),
        block_ids=None if token_ids is None else _hashed(tokens),
        session=session,
        think_seconds=think_seconds,
    )


def _hashed(tokens: "array[int]") -> "array[int]":
    """Return the hash of each block of tokens and all before it."""
    hashes, before = array("Q"), b""
    for begin in range(0, len(tokens), _HASHED_TOKENS):
        block = tokens[begin : begin + _HASHED_TOKENS].tobytes()
        before = hashlib.blake2b(before + block, digest_size=8).digest()
        hashes.frombytes(before)
    return hashes


def _time(where: str, row: Mapping[str, Any], name: str, *, is_needed: bool = True) -> float:
    if is_needed and name not in row:
        raise TraceError(f"{where}: no field {name!r}")
    value = row.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: {name} is {value!r}; expected a number, 0 or more")
    return float(value)


def _tokens(where: str, row: Mapping[str, Any], name: str) -> int:
    if name not in row:
        raise TraceError(f"{where}: no field {name!r}")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: {name} is {value!r}; expected a number, 0 or more")
    if not (isinstance(value, int) or value.is_integer()):
        raise TraceError(f"{where}: {name} is {value!r}; expected a whole number of tokens")
    if value > MOST_TOKENS:
        raise TraceError(f"{where}: {name} is {value!r}; at most {MOST_TOKENS} tokens can be")
    return int(value)


def _priority(where: str, value: object) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise TraceError(f"{where}: priority is {value!r}; expected a whole number of 32 bits, signed")
    return value


def _block_ids(where: str, found: object) -> "array[int] | None":
    if found is None:
        return None
    try:
        return array("Q", found if isinstance(found, list) else ["of another type"])
    except (TypeError, OverflowError):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers from 0 to 2**64 - 1") from None


JSON_FORMS: Final = (
    JsonForm("LLMServingSim's sessions", "sub_requests", _NS, _add_serving_sim, _HASHED_TOKENS),
    JsonForm("LLMServingSim's requests", "input_toks", _NS, _add_serving_sim, _HASHED_TOKENS),
    JsonForm(
        "Qwen-Bailian's trace",
        "parent_chat_id",
        1.0,
        _add_mooncake,
        16,
        "Qwen-Bailian anonymous dataset (Apache-2.0); Wang et al., KVCache Cache in the Wild, ATC 2025",
    ),
    JsonForm(
        "rows of Mooncake's format",
        "input_length",
        _MS,
        _add_mooncake,
        attribution="Mooncake traces (Apache-2.0); Qin et al., Mooncake: Trading More Storage for Less Computation,"
        " FAST 2025",
    ),
)
