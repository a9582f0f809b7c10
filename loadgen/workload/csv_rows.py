"""Traces in tables: a header, then a row for each request, separated by commas or tabs.

Azure's LLM inference traces: github.com/Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv`, `..._code.csv`
(2023) and the one-week files of 2024; CC-BY 4.0. Lines end with CR LF, the last one without, the 2023 files have seven
fractional digits (one more than `strptime` takes) and no time zone.

BurstGPT: github.com/HPMLL/BurstGPT; CC-BY 4.0. Seconds from midnight of the first day. A request of 0 response tokens
failed there. Newer files have `Session ID` and `Elapsed time` as well.

Vidur: github.com/microsoft/vidur, `data/processed_traces`, those with arrivals: seconds.

splitwise-sim: github.com/Mutinifni/splitwise-sim, `traces`: seconds; `token_size` is the output.

LLMServingSim: github.com/casys-kaist/LLMServingSim, of versions before its JSON Lines: nanoseconds, tabs.

None has prompts or names of adapters or users, so adapters assigned to it are synthetic. Other columns, as a tool may
add, are not read.
"""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import TraceError

__all__ = ["CSV_FORMS", "CsvForm", "read_table", "split"]

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


def read_table(form: CsvForm, header: Sequence[str], lines: Iterable[tuple[str, str]], rows: RecordedRows) -> int:
    """Read the rows below the header; return how many were left out.

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
    num_failed = 0
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
            num_failed += 1
        else:
            rows.add(where, at, prompt, output)
    return num_failed


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
        match = _STAMP.fullmatch(text)
        if match is None:
            raise TraceError(
                f"{where}: expected {name} as 2024-05-10 00:00:00.000000, with T and an offset if need be, found"
                f" {text[:40]!r}"
            )
        try:
            nanoseconds = _nanoseconds(match[1] + (match[3] or ""), match[2] or "")
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        if first is None:
            first = nanoseconds
        return float(nanoseconds - first)

    return read


def _nanoseconds(whole: str, fraction: str) -> int:
    at = datetime.fromisoformat(whole)
    since = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))
