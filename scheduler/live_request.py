"""A request while it lives in this scheduler: the core's sequence, and what the core must not see."""

from array import array
from dataclasses import dataclass, field

from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.routers import RouterLink


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, from its arrival to its end.

    Attributes:
        sequence: what the core knows.
        router: whose it is.
        router_handle: its name on that router's stream.
        sampling: the wire's message, passed on to the worker as it came, the hidden true length in it.
        token_ids: the output so far, for a resumption.
    """

    sequence: Sequence
    router: RouterLink
    router_handle: int
    request_id: str
    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
