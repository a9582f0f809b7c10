"""The formats of recorded traces: JSON, an object for each request, and tables, a row for each.

JSON.

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

Tables: a header, then rows separated by commas or tabs. None has prompts or names of adapters or users, so adapters
assigned to it are synthetic. Other columns, as a tool may add, are not read.

Azure's LLM inference traces: github.com/Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv`, `..._code.csv`
(2023) and the one-week files of 2024; CC-BY 4.0. Lines end with CR LF, the last one without, the 2023 files have seven
fractional digits (one more than `strptime` takes) and no time zone.

BurstGPT: github.com/HPMLL/BurstGPT; CC-BY 4.0. Seconds from midnight of the first day. A request of 0 response tokens
failed there. Newer files have `Session ID` and `Elapsed time` as well.

Vidur: github.com/microsoft/vidur, `data/processed_traces`, those with arrivals: seconds.

splitwise-sim: github.com/Mutinifni/splitwise-sim, `traces`: seconds; `token_size` is the output.

LLMServingSim, of versions before its JSON Lines: nanoseconds, tabs.
"""

import csv
import hashlib
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import BLOCK_TOKENS, MOST_TOKENS, TraceError

_STAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-]\d\d:\d\d))?")
_NUMBER: Final = re.compile(r"(?:\d{1,20}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?")
_LENGTH: Final = re.compile(r"(\d{1,10})(?:\.0*)?")
_EPOCH: Final = datetime.fromisoformat("2000-01-01 00:00:00+00:00")


@dataclass(frozen=True, slots=True)
class CsvForm:
    """A table's form.

    Attributes:
        title: for the reader of a report.
        columns: of time, prompt tokens, output tokens.
        per_second: of the time's unit; None: a date and time.
        zero_failed: a row of 0 output tokens failed, and is left out.
        attribution: author and licence.
    """

    title: str
    columns: tuple[str, str, str]
    per_second: float | None = 1.0
    zero_failed: bool = False
    attribution: str = ""


CSV_FORMS: Final = (
    CsvForm(
        "Azure's LLM inference trace",
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        per_second=None,
        attribution="Azure Public Dataset, LLM inference trace (CC-BY 4.0); Patel et al., Splitwise: Efficient"
        " Generative LLM Inference Using Phase Splitting, ISCA 2024",
    ),
    CsvForm(
        "BurstGPT's trace",
        ("Timestamp", "Request tokens", "Response tokens"),
        zero_failed=True,
        attribution="BurstGPT (CC-BY 4.0); Wang et al., BurstGPT: A Real-World Workload Dataset to Optimize LLM Serving"
        " Systems, KDD 2025",
    ),
    CsvForm("Vidur's trace", ("arrived_at", "num_prefill_tokens", "num_decode_tokens")),
    CsvForm("splitwise-sim's trace", ("arrival_timestamp", "prompt_size", "token_size")),
    CsvForm("LLMServingSim's table", ("arrival_time_ns", "input_toks", "output_toks"), per_second=1e9),
)


def split(line: str) -> list[str]:
    """Return the fields of a line, which a tool may have quoted."""
    separator = "\t" if "\t" in line and "," not in line else ","
    fields = next(csv.reader([line], delimiter=separator)) if '"' in line else line.split(separator)
    return [field.strip() for field in fields] if " " in line else fields


def read_table(form: CsvForm, header: Sequence[str], lines: Iterable[tuple[str, str]], rows: RecordedRows) -> None:
    """Read the rows below the header.

    Args:
        form: one whose columns the header has.
        header: all its columns.
        lines: place and text of each.
        rows: where they go, until it is full.

    Raises:
        TraceError: a row that does not parse.
    """
    places = [header.index(name) for name in form.columns]
    stamp_name, *length_names = form.columns
    stamp_of = _dates() if form.per_second is None else _number
    for where, line in lines:
        if rows.is_full:
            break
        fields = split(line)
        if len(fields) != len(header):
            raise TraceError(f"{where}: expected {','.join(header)[:80]}, found {line[:80]!r}")
        stamp, *texts = [fields[place] for place in places]
        at = stamp_of(where, stamp_name, stamp)
        prompt, output = (_length(where, name, text) for name, text in zip(length_names, texts, strict=True))
        if form.zero_failed and not output:
            rows.num_failed += 1
        else:
            rows.add(where, at, prompt, output)


def _length(where: str, name: str, text: str) -> int:
    if not (match := _LENGTH.fullmatch(text)):
        raise TraceError(f"{where}: expected a number of tokens; {name} is {text[:40]!r}")
    return int(match[1])


def _number(where: str, name: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise TraceError(f"{where}: expected a number, 0 or more; {name} is {text[:40]!r}")
    return float(text)


def _dates() -> Callable[[str, str, str], float]:
    """Return a reader of dates and times, as nanoseconds from the first one that it reads.

    A double holds nanoseconds of a hundred days; since an epoch they would need more.
    """
    first: int | None = None

    def read(where: str, name: str, text: str) -> float:
        nonlocal first
        nanoseconds = nanoseconds_of(where, name, text)
        if first is None:
            first = nanoseconds
        return float(nanoseconds - first)

    return read


def nanoseconds_of(where: str, name: str, text: str) -> int:
    """Return a date and time as nanoseconds from the year 2000. Raises TraceError."""
    match = _STAMP.fullmatch(text)
    if match is None:
        raise TraceError(
            f"{where}: expected {name} as 2024-05-10 00:00:00.000000, with T and an offset if need be, found"
            f" {text[:40]!r}"
        )
    try:
        return _nanoseconds(match[1] + (match[3] or ""), match[2] or "")
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from None


def _nanoseconds(whole: str, fraction: str) -> int:
    at = datetime.fromisoformat(whole)
    since = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))


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
        fits: tells it where one key does not.
    """

    title: str
    key: str
    per_second: float
    add: Add
    block_tokens: int = BLOCK_TOKENS
    attribution: str = ""
    fits: Callable[[Mapping[str, Any]], bool] | None = None


def _add_mooncake(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    session, delay = row.get("session_id"), row.get("delay")
    if session is not None and not isinstance(session, str | int):
        raise TraceError(f"{where}: session_id is {session!r}; expected a text or a whole number")
    follows = delay is not None or ("timestamp" not in row and rows.knows(session))
    rows.add(
        where,
        time_of(where, row, "timestamp", is_needed=session is None),
        tokens_of(where, row, "input_length"),
        tokens_of(where, row, "output_length"),
        block_ids=_block_ids(where, row.get("hash_ids")),
        priority=_priority(where, row.get("priority", 0)),
        session=session,
        think_seconds=time_of(where, row, "delay", is_needed=False) / _MS if follows else None,
    )


def _add_serving_sim(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    parts = row.get("sub_requests")
    if parts is None:
        _add_call(rows, where, row, time_of(where, row, "arrival_time_ns"))
        return
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        raise TraceError(f"{where}: sub_requests must be a list of objects, one or more")
    at, think = time_of(where, row, "arrival_time_ns"), None
    for part in parts:
        if rows.is_full:
            break
        _add_call(rows, where, part, at, where, think)
        think = time_of(where, part, "tool_duration_ns", is_needed=False) / _NS


def _add_call(
    rows: RecordedRows,
    where: str,
    row: Mapping[str, Any],
    at: float,
    session: str | None = None,
    think_seconds: float | None = None,
) -> None:
    prompt, token_ids = tokens_of(where, row, "input_toks"), row.get("input_tok_ids")
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
        tokens_of(where, row, "output_toks"),
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


def time_of(where: str, row: Mapping[str, Any], name: str, *, is_needed: bool = True) -> float:
    """Return a row's number of some unit of time. Raises TraceError."""
    if is_needed and name not in row:
        raise TraceError(f"{where}: no field {name!r}")
    value = row.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: {name} is {value!r}; expected a number, 0 or more")
    return float(value)


def tokens_of(where: str, row: Mapping[str, Any], name: str) -> int:
    """Return a row's number of tokens. Raises TraceError."""
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
