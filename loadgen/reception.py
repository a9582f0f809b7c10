"""What a client of any protocol hands to the driver: how to ask, and what came of it.

A client never repeats a request: what fails once is reported as it failed.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lorrery.loadgen.cluster_view import ClusterView
from lorrery.loadgen.workload.request import WorkloadRequest

__all__ = ["NO_FINISH", "Ask", "Client", "Exchange", "FinishView", "Reception", "Send"]

NO_FINISH = "NO_FINISH"
"""Status of a stream that ended without an error and without saying why."""


@dataclass(frozen=True, slots=True)
class FinishView:
    """How a stream ended, as the server says.

    Attributes:
        completion_tokens: None if it did not say; nor did it then say anything of prompt or cache.
        prompt_tokens: in its own tokenizer.
        queue_seconds: None if it does not say where the request's time went, as with the other three.
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
    """What one stream has brought so far; a client fills it in as it comes, so it survives a cancellation.

    Attributes:
        keeps_output: whether the output is wanted, for the next turn of a session.
        message_seconds: `time.monotonic()` at which each message with tokens arrived.
        message_tokens: how many tokens each brought.
        status: `OK`, a gRPC status name, an HTTP status (`HTTP_429`), one of the client's own, or `NO_FINISH`; empty
            while the stream lasts.
        crc32: of the token ids, where the protocol has them.
        token_ids: the output, if wanted and if the protocol has ids.
        text: the output, if wanted and if the protocol has text.
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
        """Take note of a message with tokens that has just come."""
        self.message_seconds.append(time.monotonic())
        self.message_tokens.append(num_tokens)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier turn of a session: what was asked, and what came."""

    request: WorkloadRequest
    reception: Reception


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as the driver wants it sent.

    Attributes:
        seed: of the run; prompt and output are functions of it and the request.
        ignore_eos: the output is to have exactly `max_new_tokens`; otherwise the model ends it.
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
"""Sends a prepared request and notes its stream in a new reception; calls back with the tokens of each message.

A failed stream is noted, not raised.
"""


class Client(Protocol):
    """A connection to one server, in one protocol; opened and closed with `async with`."""

    tells_true_length: bool
    """Whether a server is told where the output ends by itself, so that its length is known either way."""

    async def cluster(self, timeout_seconds: float) -> ClusterView:
        """Learn what is served, waiting until it is.

        Raises:
            LorreryError: nothing is, within that time.
        """
        ...

    async def adapters(self, timeout_seconds: float) -> list[str]:
        """List the adapters that requests may name, in the server's order.

        Raises:
            LorreryError: the server does not say.
        """
        ...

    def prepare(self, ask: Ask) -> Send:
        """Make all of a request that can be made before its time."""
        ...
