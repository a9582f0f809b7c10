"""Reader of Azure's LLM inference traces (CSV).

Source: github.com/Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv`, `..._code.csv` (2023) and the one-week
files of 2024; CC-BY 4.0; Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA
2024.

Three columns: TIMESTAMP, ContextTokens (prompt), GeneratedTokens (output); others, as a tool may add, are not read.
Pitfalls: lines end with CR LF, the last one
without, the 2023 files have seven fractional digits (one more than `strptime` takes) and no time zone. There are no
prompts and no adapter or user names, so adapters assigned to it are synthetic.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice

from lorrery.loadgen.workload.request import MOST_TOKENS, TraceError, WorkloadRequest

__all__ = ["ATTRIBUTION", "read_azure"]

ATTRIBUTION = (
    "Azure Public Dataset, LLM inference trace (CC-BY 4.0); Patel et al., Splitwise: Efficient Generative LLM"
    " Inference Using Phase Splitting, ISCA 2024"
)

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-]\d\d:\d\d))?")
_LENGTH = re.compile(r"\d{1,10}")
_EPOCH = datetime.fromisoformat("2000-01-01 00:00:00+00:00")


def read_azure(lines: Iterable[str], limit: int | None = None) -> list[WorkloadRequest]:
    """Read a trace; the first row is sent at 0.

    Args:
        lines: the file's lines, with or without their ends.
        limit: most rows to read.

    Returns:
        Requests in time order; rows with equal stamps stay in file order. A length of 0 counts as one token, because
        empty requests do not exist here.

    Raises:
        TraceError: another header, no rows, or one that does not parse.
    """
    numbered = iter(enumerate(lines, start=1))
    _, header = next(numbered, (1, ""))
    columns = _fields(header.strip().lstrip("\ufeff"))
    if not set(_COLUMNS) <= set(columns):
        raise TraceError(f"line 1: expected the header {','.join(_COLUMNS)!r}, found {header.strip()[:80]!r}")
    places = [columns.index(name) for name in _COLUMNS]
    rows: list[tuple[int, int, int]] = []
    filled = ((number, line.strip()) for number, line in numbered if line.strip())
    for number, line in islice(filled, limit):
        fields = _fields(line)
        if len(fields) != len(columns):
            raise TraceError(f"line {number}: expected {','.join(columns)[:80]}, found {line[:80]!r}")
        stamp, *lengths = [fields[place] for place in places]
        match = _STAMP.fullmatch(stamp)
        if match is None:
            raise TraceError(
                f"line {number}: expected TIMESTAMP as 2024-05-10 00:00:00.000000, with T and an offset if need be,"
                f" found {stamp[:40]!r}"
            )
        for name, length in zip(_COLUMNS[1:], lengths, strict=True):
            if not _LENGTH.fullmatch(length):
                raise TraceError(f"line {number}: expected a number of tokens; {name} is {length[:40]!r}")
        prompt_tokens, output_tokens = (max(int(length), 1) for length in lengths)
        if max(prompt_tokens, output_tokens) > MOST_TOKENS:
            raise TraceError(f"line {number}: a prompt or an answer has at most {MOST_TOKENS} tokens, found {line!r}")
        try:
            nanoseconds = _nanoseconds(match[1] + (match[3] or ""), match[2] or "")
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
        rows.append((nanoseconds, prompt_tokens, output_tokens))
    if not rows and limit != 0:
        raise TraceError("there is no row after the header")
    rows.sort(key=lambda row: row[0])
    return [
        WorkloadRequest(index, (nanoseconds - rows[0][0]) / 1e9, prompt_tokens, output_tokens)
        for index, (nanoseconds, prompt_tokens, output_tokens) in enumerate(rows)
    ]


def _fields(line: str) -> list[str]:
    """Return the fields of a line, which a tool may have quoted; none of them has a comma."""
    fields = line.split(",")
    return [field.removeprefix('"').removesuffix('"') for field in fields] if '"' in line else fields


def _nanoseconds(whole: str, fraction: str) -> int:
    # Integers, because a float of seconds since any epoch cannot hold seven fractional digits.
    at = datetime.fromisoformat(whole)
    since = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))
