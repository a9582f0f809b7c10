"""The requests of a run as columns, read from `requests.csv`: some 110 bytes a request.

Files of older versions lack columns, and foreign files may lack more. Missing values are NaN, and the page shows less.
Without `status` or times there is nothing to show.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lorrery.service.errors import FormatError
from lorrery.view.reports.columns import read_header, read_rows

__all__ = ["PHASES", "Requests", "read_requests"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

PHASES = ("queue_seconds", "adapter_load_seconds", "prefill_seconds", "decode_seconds")
"""Columns whose sum is a request's time in the scheduler. Older files have only the first."""
_TIMES = ("intended_seconds", "sent_seconds", "first_token_seconds", "last_token_seconds", "end_seconds")
_COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens", "num_requeues")
_INDEX = "index"
_DOUBLES = (*_TIMES, _INDEX)
_NAMES = ("status", "adapter_id", "tenant_id", "worker_id")
_NEEDED = ("status", *_TIMES, "prompt_tokens", "output_tokens")
_OK, _INTERRUPTED = "OK", "INTERRUPTED"


@dataclass(frozen=True, eq=False)
class Requests:
    """Columns of one length, in order of the intended send time.

    Attributes:
        numbers: by the file's column name: NaN if a field is empty, or the column is missing.
        codes: by column name (`status`, `adapter_id`, ...), index of each row's text in `names`.
        details: the row's error message, if there is one.
    """

    numbers: dict[str, npt.NDArray[Any]]
    codes: dict[str, Ints]
    names: dict[str, list[str]]
    details: dict[int, str]

    def __len__(self) -> int:
        return len(self.codes["status"])

    def __getitem__(self, column: str) -> Floats:
        values: Floats = self.numbers[column].astype(np.float64, copy=False)
        return values

    def has(self, column: str) -> bool:
        """Return whether any request has a value in a column."""
        values = self.numbers[column]
        return bool(np.isfinite(values).any())

    def _is(self, status: str) -> Flags:
        names = self.names["status"]
        if status not in names:
            return np.zeros(len(self), np.bool_)
        found: Flags = self.codes["status"] == names.index(status)
        return found

    @cached_property
    def ok(self) -> Flags:
        """Shape (n,): whether each completed as asked."""
        return self._is(_OK)

    @cached_property
    def failed(self) -> Flags:
        """Shape (n,): whether each was refused or broke off; being cut off by the end of the run is not a failure."""
        return ~(self.ok | self._is(_INTERRUPTED))

    @cached_property
    def completed(self) -> Flags:
        """Shape (n,): whether each counts in latencies: completed, with a token."""
        return self.ok & np.isfinite(self["first_token_seconds"]) & np.isfinite(self["last_token_seconds"])

    @cached_property
    def ttft(self) -> Floats:
        """Shape (n,), seconds from the intended send to the first token; NaN unless completed."""
        return np.where(self.completed, self["first_token_seconds"] - self["intended_seconds"], np.nan)

    @cached_property
    def e2e(self) -> Floats:
        """Shape (n,), seconds from the intended send to the last token; NaN unless completed."""
        return np.where(self.completed, self["last_token_seconds"] - self["intended_seconds"], np.nan)

    @cached_property
    def tpot(self) -> Floats:
        """Shape (n,), seconds; NaN below 2 output tokens."""
        gaps = self["output_tokens"] - 1
        spans = self["last_token_seconds"] - self["first_token_seconds"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.completed & (gaps > 0), spans / gaps, np.nan)

    @cached_property
    def start(self) -> float:
        """Start of the run: 0, or the first send if that is earlier."""
        return min(0.0, _finite(self["sent_seconds"], np.fmin.reduce, 0.0))

    @cached_property
    def end(self) -> float:
        """End of the last request, seconds."""
        ends = (_finite(self[name], np.fmax.reduce, 0.0) for name in ("end_seconds", "last_token_seconds"))
        return max(*ends, self.start)

    @cached_property
    def duration(self) -> float:
        """First send to last end, seconds."""
        return max(0.0, self.end - _finite(self["sent_seconds"], np.fmin.reduce, self.start))


def _finite(values: Floats, reduce: np.ufunc | object, otherwise: float) -> float:
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if len(finite) else otherwise  # type: ignore[operator]


def read_requests(path: Path, warnings: list[str]) -> Requests:
    """Read a file of requests.

    Args:
        path: of the file.
        warnings: receives remarks for the reader of the page.

    Raises:
        FormatError: not such a file; names the line, and what to do.
    """
    try:
        with path.open("rb") as file:
            header = read_header(file, path)
            if missing := [name for name in _NEEDED if name not in header]:
                raise FormatError(
                    f"{path}: no column {', '.join(missing)}; expected what `lorrery load --out` or `lorrery simulate"
                    " --out` writes"
                )
            number_names = [*_TIMES, *PHASES, *_COUNTS, _INDEX]
            numbers: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in number_names}
            codes: dict[str, list[Ints]] = {name: [] for name in _NAMES}
            names: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
            details: dict[int, str] = {}
            num_rows = 0
            for rows in read_rows(file, path, len(header), warnings):
                for name in number_names:
                    column = rows.floats(header.index(name)) if name in header else np.full(len(rows), np.nan)
                    column[~np.isfinite(column)] = np.nan
                    numbers[name].append(column if name in _DOUBLES else column.astype(np.float32))
                for name in _NAMES:
                    column_codes = (
                        rows.codes(header.index(name), names[name])
                        if name in header
                        else np.full(len(rows), names[name].setdefault("", 0), np.int32)
                    )
                    codes[name].append(column_codes)
                if "detail" in header:
                    not_ok = np.flatnonzero(codes["status"][-1] != names["status"].get(_OK, -1))
                    texts = rows.texts(header.index("detail"), not_ok)
                    details.update(
                        (num_rows + row, text) for row, text in zip(not_ok.tolist(), texts, strict=True) if text
                    )
                num_rows += len(rows)
    except FileNotFoundError:
        raise FormatError(
            f"{path} is not there; a run's folder has it when the run has ended: run again with --out, or copy the"
            " whole folder"
        ) from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    return _in_order(
        {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in numbers.items()},
        {name: np.concatenate(parts) if parts else np.empty(0, np.int32) for name, parts in codes.items()},
        {name: list(known) for name, known in names.items()},
        details,
    )


def _in_order(
    numbers: dict[str, npt.NDArray[Any]],
    codes: dict[str, Ints],
    names: dict[str, list[str]],
    details: dict[int, str],
) -> Requests:
    intended = numbers["intended_seconds"]
    if (np.diff(intended) < 0).any():
        order = np.argsort(intended, kind="stable")
        numbers = {name: values[order] for name, values in numbers.items()}
        codes = {name: values[order] for name, values in codes.items()}
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        details = {int(place[row]): text for row, text in details.items()}
    return Requests(numbers, codes, names, details)
