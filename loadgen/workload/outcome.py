"""The outcomes of requests as their clients saw them, one by one and column by column; the input of every figure.

Times are seconds from the start of the run; from a live run they are device seconds (wall time / `time_scale`), from
the simulator its own. The clock is the caller's. A live run collects `RequestOutcome`s, the simulator fills the columns
itself; a million requests take 130 MB.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.distribution import Distribution, distribution

OK = "OK"
"""Status of a request that completed as asked."""
INTERRUPTED = "INTERRUPTED"
"""Status of a request that the end of the run cut off; neither completed nor failed."""


def _no_seconds() -> npt.NDArray[np.float64]:
    return np.empty(0, np.float64)


def _no_tokens() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutcome:
    """One request's times and counts.

    Attributes:
        index: the workload's index.
        prompt_tokens: as sent.
        intended_seconds: scheduled send time.
        sent_seconds: actual send time.
        end_seconds: when its stream ended, well or not.
        status: `OK`, `INTERRUPTED`, or why it failed: a gRPC status name, or the client's own
            finding (`WRONG_TOKEN_COUNT`, `NO_FINISH`).
        adapter_id: as sent; None is the base model.
        tenant_id: as sent.
        message_seconds: shape (num_messages,), arrival time of each message with tokens, not decreasing.
        message_tokens: shape (num_messages,), number of tokens in each, 1 or more.
        detail: the error's message, or empty.
        finish_reason: `eos`, `stop`, `length`, `aborted`, or empty if none arrived.
        cached_tokens: prompt tokens found in a prefix cache, as reported by the server.
        queue_seconds: from arrival to admission, less `adapter_load_seconds`, as reported; None: not reported.
        adapter_load_seconds: time in which it waited only for its adapter, likewise.
        prefill_seconds: from admission to the first token, less `adapter_load_seconds`, likewise.
        decode_seconds: from the first token to the end, likewise.
        worker_id: worker of the last step, as reported.
        num_requeues: how often it was queued again, as reported.
        token_ids_crc32: of the token ids in order, as little-endian u32. Equal seeds give equal values, so it reveals a
            lost, repeated or exchanged token between two runs. None if no ids were seen.
        priority: as sent.
    """

    index: int
    prompt_tokens: int
    intended_seconds: float
    sent_seconds: float
    end_seconds: float
    status: str = OK
    adapter_id: str | None = None
    tenant_id: str = ""
    message_seconds: npt.NDArray[np.float64] = field(default_factory=_no_seconds)
    message_tokens: npt.NDArray[np.int64] = field(default_factory=_no_tokens)
    detail: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    queue_seconds: float | None = None
    adapter_load_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    worker_id: str = ""
    num_requeues: int = 0
    token_ids_crc32: int | None = None
    priority: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens received."""
        return int(self.message_tokens.sum())

    @property
    def first_token_seconds(self) -> float | None:
        """When the first token arrived, or None if none did."""
        return float(self.message_seconds[0]) if len(self.message_seconds) else None

    @property
    def last_token_seconds(self) -> float | None:
        """When the last token arrived, or None if none did."""
        return float(self.message_seconds[-1]) if len(self.message_seconds) else None


T = TypeVar("T", bound=Hashable)
_ROWS_AT_ONCE = 10_000


class Labels(Sequence[T], Generic[T]):
    """A column of a few distinct values, such as worker names: four bytes a row, whatever the values are.

    Args:
        codes: shape (rows,), int32: index of each row's value.
        values: all distinct.
    """

    __slots__ = ("codes", "values")

    def __init__(self, codes: npt.NDArray[np.int32], values: Sequence[T]) -> None:
        self.codes = codes
        self.values = values

    @classmethod
    def of(cls, rows: Iterable[T]) -> "Labels[T]":
        """Encode values given one by one."""
        code_of: dict[T, int] = {}
        codes = np.fromiter((code_of.setdefault(one, len(code_of)) for one in rows), np.int32)
        return cls(codes, list(code_of))

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[T]:
        values = self.values
        for begin in range(0, len(self.codes), _ROWS_AT_ONCE):
            for code in self.codes[begin : begin + _ROWS_AT_ONCE].tolist():
                yield values[code]

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> "Labels[T]": ...
    def __getitem__(self, row: int | slice) -> "T | Labels[T]":
        return Labels(self.codes[row], self.values) if isinstance(row, slice) else self.values[self.codes[row]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any sequence that equals a list

    def are(self, value: T) -> npt.NDArray[np.bool_]:
        """Return which rows have a value; shape (rows,)."""
        codes = [code for code, one in enumerate(self.values) if one == value]
        return np.isin(self.codes, codes)

    def rows_of(self) -> "list[tuple[T, npt.NDArray[np.int64]]]":
        """Return each value that there is, and its rows in order; values in order of their first rows."""
        order = np.argsort(self.codes, kind="stable")
        counts = np.bincount(self.codes, minlength=len(self.values))
        parts = np.split(order, np.cumsum(counts)[:-1]) if len(self.values) else []
        found = [(value, rows) for value, rows in zip(self.values, parts, strict=True) if len(rows)]
        return sorted(found, key=lambda one: int(one[1][0]))

    def as_text(self, text: "Callable[[T], str]" = str) -> npt.NDArray[np.str_]:
        """Return the rows as an array of texts."""
        if not len(self):
            return np.array([], np.str_)
        return np.array([text(value) for value in self.values], np.str_)[self.codes]


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeTable:
    """One row per request, in order of index; columns have equal lengths, and the meaning of `RequestOutcome`'s fields.

    Attributes:
        first_token_seconds: NaN without a token, as in `last_token_seconds`.
        queue_seconds: NaN if not reported, as in the next three.
        num_messages: messages with tokens.
        detail: by row, if there is any.
        itl_ms: gaps between the tokens of completed requests, pooled; in simulations, of all that ran.
    """

    index: Ints
    status: Labels[str]
    adapter_id: Labels[str | None]
    tenant_id: Labels[str]
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    num_messages: Ints
    num_requeues: Ints
    intended_seconds: Floats
    sent_seconds: Floats
    first_token_seconds: Floats
    last_token_seconds: Floats
    end_seconds: Floats
    queue_seconds: Floats
    adapter_load_seconds: Floats
    prefill_seconds: Floats
    decode_seconds: Floats
    worker_id: Labels[str]
    finish_reason: Labels[str]
    token_ids_crc32: Sequence[int | None]
    detail: dict[int, str]
    itl_ms: Distribution
    priority: Ints

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Shape (n,): whether each completed as asked."""
        return self._has(OK)

    @property
    def interrupted(self) -> npt.NDArray[np.bool_]:
        """Shape (n,): whether the end of the run cut each off."""
        return self._has(INTERRUPTED)

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Shape (n,): whether each is neither `ok` nor `interrupted`."""
        return ~(self.ok | self.interrupted)

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Shape (n,): whether each counts in latencies: completed, with a token."""
        return self.ok & ~np.isnan(self.first_token_seconds)

    def _has(self, status: str) -> npt.NDArray[np.bool_]:
        return self.status.are(status)

    @classmethod
    def of(cls, outcomes: Iterable[RequestOutcome]) -> "OutcomeTable":
        """Build the table from the outcomes of a live run."""
        rows = sorted(outcomes, key=lambda outcome: outcome.index)
        completed = [row for row in rows if row.status == OK]
        gaps = [token_gaps(row.message_seconds, row.message_tokens) for row in completed]
        pooled = np.concatenate(gaps) if gaps else np.empty(0, np.float64)
        return cls(
            index=_ints(row.index for row in rows),
            status=Labels.of(row.status for row in rows),
            adapter_id=Labels.of(row.adapter_id for row in rows),
            tenant_id=Labels.of(row.tenant_id for row in rows),
            prompt_tokens=_ints(row.prompt_tokens for row in rows),
            output_tokens=_ints(row.output_tokens for row in rows),
            cached_tokens=_ints(row.cached_tokens for row in rows),
            num_messages=_ints(len(row.message_tokens) for row in rows),
            num_requeues=_ints(row.num_requeues for row in rows),
            intended_seconds=_floats(row.intended_seconds for row in rows),
            sent_seconds=_floats(row.sent_seconds for row in rows),
            first_token_seconds=_floats(row.first_token_seconds for row in rows),
            last_token_seconds=_floats(row.last_token_seconds for row in rows),
            end_seconds=_floats(row.end_seconds for row in rows),
            queue_seconds=_floats(row.queue_seconds for row in rows),
            adapter_load_seconds=_floats(row.adapter_load_seconds for row in rows),
            prefill_seconds=_floats(row.prefill_seconds for row in rows),
            decode_seconds=_floats(row.decode_seconds for row in rows),
            worker_id=Labels.of(row.worker_id for row in rows),
            finish_reason=Labels.of(row.finish_reason for row in rows),
            token_ids_crc32=[row.token_ids_crc32 for row in rows],
            detail={position: row.detail for position, row in enumerate(rows) if row.detail},
            itl_ms=distribution(pooled * 1e3),
            priority=_ints(row.priority for row in rows),
        )


def token_gaps(message_seconds: Floats, message_tokens: Ints) -> Floats:
    """Return one request's gaps between tokens, seconds; shape (output tokens - tokens of the first message,)."""
    if len(message_seconds) < 2:  # no gap without a second message
        return np.empty(0, np.float64)
    tokens = message_tokens[1:]
    return np.repeat(np.diff(message_seconds) / tokens, tokens)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _floats(values: Iterable[float | None]) -> Floats:
    return np.fromiter((np.nan if value is None else value for value in values), np.float64)
