"""A request while it lives in this scheduler: the core's sequence, and what the core must not see."""

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lorrery.scheduler.core.sequence import Sequence

if TYPE_CHECKING:
    from lorrery.scheduler.routers import RouterLink
    from lorrery.scheduler.workers import Dispatcher


@dataclass(slots=True, eq=False)
class Live:
    """A request, from its arrival to its end.

    Attributes:
        sequence: what the core knows.
        router: whose it is.
        router_handle: its name on that router's stream.
        sampling: the wire's message, passed on to the worker as it came, the hidden true length in it.
        token_ids: the output so far, for a resumption.
        dispatcher: the worker that has it; None while it waits for one to attach.
        queue_ps: from arrival to first admission.
        cached_tokens: prompt tokens that were cached at first admission.
        unplaced: ends the wait for a worker.
    """

    sequence: Sequence
    router: "RouterLink"
    router_handle: int
    request_id: str
    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    dispatcher: "Dispatcher | None" = None
    queue_ps: int | None = None
    cached_tokens: int | None = None
    unplaced: asyncio.TimerHandle | None = None
