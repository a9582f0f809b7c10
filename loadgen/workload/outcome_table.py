"""The outcomes of all requests of a run, column by column; the input of reports.

A live run collects `RequestOutcome`s, the simulator fills the columns itself; a million requests take 130 MB.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.distribution import Distribution, distribution
from lorrery.loadgen.workload.labels import Labels
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK, RequestOutcome

__all__ = ["OutcomeTable", "token_gaps"]

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
