"""A request in this scheduler until it ends: the core's sequence, and what the core must not see."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.subscribers.tracing import RequestTrace
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.service.telemetry.spans import TraceContext


class Counted(IntEnum):
    """How much of a request the metrics have counted: each value includes those before it."""

    NOTHING = 0
    ADMISSION = 1
    FIRST_TOKEN = 2


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, from its arrival to its end.

    Attributes:
        sequence: the core's view of it.
        router: that it came from.
        router_handle: its handle on that router's stream.
        adapter_id: that it names; empty: none.
        sampling: the wire's message, passed on unchanged to the worker, including the hidden true output length.
        token_ids: the output so far, for a resumption.
        num_repeats: tokens that its worker makes again and its router has: those lost in a preemption.
        counted: how much of it was counted on an earlier, broken stream.
        orphaned: whether its router's stream has ended.
        group: the client's request that it is one of several outputs of; None: it is the only one.
        context: the span that it is part of; None: none.
        trace: makes its spans; None: they are not kept.
    """

    sequence: Sequence
    router: RouterLink
    router_handle: int
    request_id: str
    adapter_id: str
    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_repeats: int = 0
    counted: Counted = Counted.NOTHING
    orphaned: bool = False
    group: OutputGroup | None = None
    context: TraceContext | None = None
    trace: RequestTrace | None = None

    @property
    def output_tokens(self) -> int:
        """Its output; of a request that its router has cut, what is kept."""
        withdrawal = self.sequence.withdrawal
        kept = None if withdrawal is None or withdrawal.cause.finish is None else withdrawal.kept_tokens
        return len(self.token_ids) if kept is None else min(kept, len(self.token_ids))

    @property
    def run_context(self) -> TraceContext | None:
        """The span of its run, for its worker; None: it is not kept."""
        return None if self.trace is None else self.trace.run_context()
