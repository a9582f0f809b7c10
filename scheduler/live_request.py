"""A request while it lives in this scheduler: the core's sequence, and what the core must not see."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from lorrery.chassis.trace_context import TraceContext
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.tracing import RequestTrace


class Counted(IntEnum):
    """How much of a request the metrics have: each includes those before it."""

    NOTHING = 0
    ADMISSION = 1
    FIRST_TOKEN = 2


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, from its arrival to its end.

    Attributes:
        sequence: what the core knows.
        router: whose it is.
        router_handle: its name on that router's stream.
        sampling: the wire's message, passed on to the worker as it came, the hidden true length in it.
        token_ids: the output so far, for a resumption.
        counted: what has been counted of it on a stream that broke.
        orphaned: its router's stream has ended.
        refused: its router has been told that it ends, but its worker has not let go of it yet.
        context: the span that it is part of; None: none.
        trace: makes its spans; None: nobody keeps them.
    """

    sequence: Sequence
    router: RouterLink
    router_handle: int
    request_id: str
    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    counted: Counted = Counted.NOTHING
    orphaned: bool = False
    refused: bool = False
    context: TraceContext | None = None
    trace: RequestTrace | None = None

    @property
    def run_context(self) -> TraceContext | None:
        """The span of its run, for its worker; None: nobody keeps it."""
        return None if self.trace is None else self.trace.run_context()
