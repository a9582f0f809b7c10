"""The outcome of one request, as its client saw it; the input of every figure.

Times are seconds from the start of the run; from a live run they are device seconds (wall time / `time_scale`), from
the simulator its own. The clock is the caller's.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["INTERRUPTED", "OK", "RequestOutcome"]

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
