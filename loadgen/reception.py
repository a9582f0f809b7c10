"""The interface between a client of any protocol and the driver: a request to send, and its reception.

A client never retries: the first failure is reported.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lorrery.loadgen.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The facts about a cluster that a run and its report need.

    Attributes:
        time_scale: wall seconds per device second.
        max_req_input_len: smallest of the shards', tokens; None if no shard reports one.
        max_req_total_len: likewise for prompt and output together.
        workers: (kind, number of ready or draining workers), by kind as in `count_kinds`; None: not reported by the
            server.
    """

    model: str
    time_scale: float
    num_shards: int
    num_connected_shards: int
    max_req_input_len: int | None
    max_req_total_len: int | None
    workers: tuple[tuple[str, int], ...] | None


NO_FINISH = "NO_FINISH"
"""Status of a stream that ended without an error and without a finish reason."""


@dataclass(frozen=True, slots=True)
class FinishView:
    """How a stream ended, according to the server.

    Attributes:
        completion_tokens: None if not reported; prompt and cache figures are then missing too.
        prompt_tokens: in the server's own tokenizer.
        queue_seconds: None if not reported, as the other three phases.
    """

    reason: str
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    queue_seconds: float | None = None
    worker_id: str = ""
    num_requeues: int = 0
    adapter_load_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(slots=True)
class Reception:
    """What one stream has received so far; filled in as messages arrive, so that it survives a cancellation.

    Attributes:
        keeps_output: whether the output is needed, for the next turn of a session.
        message_seconds: `time.monotonic()` at which each message with tokens arrived.
        message_tokens: number of tokens in each.
        status: `OK`, a gRPC status name, an HTTP status (`HTTP_429`), one of the client's own, or `NO_FINISH`; empty
            while the stream is open.
        crc32: of the token ids, if the protocol has them.
        token_ids: the output, if needed and if the protocol has ids.
        text: the output, if needed and if the protocol has text.
    """

    keeps_output: bool = False
    message_seconds: list[float] = field(default_factory=list)
    message_tokens: list[int] = field(default_factory=list)
    crc32: int | None = None
    finish: FinishView | None = None
    status: str = ""
    detail: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def note(self, num_tokens: int) -> None:
        """Record a message with tokens that has just arrived."""
        self.message_seconds.append(time.monotonic())
        self.message_tokens.append(num_tokens)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier turn of a session: the request and its reception."""

    request: WorkloadRequest
    reception: Reception


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for a client to send.

    Attributes:
        seed: of the run; prompt and output are functions of it and the request.
        ignore_eos: whether the output must have exactly `max_new_tokens`; otherwise the model ends it.
        max_new_tokens: at least the true length.
        history: the earlier turns of its session, in order.
        timeout_seconds: the deadline, wall time from the sending.
    """

    request: WorkloadRequest
    seed: int
    ignore_eos: bool
    max_new_tokens: int
    timeout_seconds: float
    history: Sequence[Exchange] = ()


Send = Callable[[Reception, Callable[[int], None]], Awaitable[None]]
"""Send a prepared request, record its stream in a new reception, and call back with the tokens of each message.

A failed stream is recorded, not raised.
"""


class Client(Protocol):
    """A connection to one server, in one protocol; opened and closed with `async with`."""

    tells_true_length: bool
    """Whether the server is told the true output length, so that it is known with and without `ignore_eos`."""

    async def cluster(self, timeout_seconds: float) -> ClusterView:
        """Describe the cluster, waiting until it is served.

        Raises:
            LorreryError: not within that time.
        """
        ...

    async def adapters(self, timeout_seconds: float) -> list[str]:
        """List the adapters that requests may name, in the server's order.

        Raises:
            LorreryError: the server does not list them.
        """
        ...

    def prepare(self, ask: Ask) -> Send:
        """Prepare as much of a request as possible before its time."""
        ...
