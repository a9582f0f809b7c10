"""Why a request ends without (further) tokens, and the words in which its client reads it.

The reasons are the scheduler's; a service maps them to status codes. A text says what is wrong, the limit, and what to
do.
"""

from enum import Enum, auto

from lorrery.scheduler.core.limits import Limits
from lorrery.scheduler.core.plan import Dropped, DropReason
from lorrery.scheduler.core.sequence import Sequence


class RefusalReason(Enum):
    """Why a request ends without (further) tokens."""

    INVALID = auto()
    NEVER_FITS = auto()
    UNKNOWN_ADAPTER = auto()
    QUEUE_FULL = auto()
    NO_WORKER = auto()
    DRAINING = auto()
    SLO_UNATTAINABLE = auto()
    ADAPTER_LOAD = auto()
    INTERNAL = auto()


DRAINING = "the scheduler is about to stop"
WITHHELD = "internal error; the scheduler's log says more"
"""For the client, in place of what a policy raised."""


def unknown_adapter(adapter_id: str, num_adapters: int) -> str:
    """Say that a request names an adapter that is not registered."""
    return f"adapter_id {adapter_id!r} is not known; {num_adapters} adapters are, see ListAdapters"


def nothing_to_do(sequence: Sequence) -> str:
    """Say that a request has no prompt or asks for no tokens."""
    return (
        f"prompt has {sequence.prompt_tokens} tokens and max_new_tokens is {sequence.max_new_tokens};"
        " both must be at least 1"
    )


def too_long(wrong: str, sequence: Sequence, limits: Limits) -> str:
    """Add a request's lengths and the limits to what `check_lengths` found."""
    return (
        f"{wrong} (prompt has {sequence.prompt_tokens} tokens, max_new_tokens is {sequence.max_new_tokens};"
        f" max_req_input_len is {limits.max_req_input_len}, max_req_total_len is {limits.max_req_total_len})"
    )


def queue_full(num_waiting: int, max_waiting_requests: int) -> str:
    """Say that too many requests wait."""
    return f"{num_waiting} requests wait; max_waiting_requests is {max_waiting_requests}; try later"


def never_fits(why: str) -> str:
    """Say that every attached worker is too small, given why the first of them is."""
    return f"no attached worker can ever take it: {why}"


def no_worker(worker_wait_seconds: float) -> str:
    """Say that the wait for a worker is over."""
    return f"no worker has attached for {worker_wait_seconds:g} s (worker_wait_seconds)"


def dropped(event: Dropped) -> tuple[RefusalReason, str]:
    """Return the reason and the text for a sequence that its worker's queue gave up."""
    adapter = event.sequence.adapter
    if event.reason is DropReason.ADAPTER_LOAD and adapter is not None:
        return RefusalReason.ADAPTER_LOAD, f"adapter {adapter.adapter_id!r} could not be loaded; try later"
    return RefusalReason.SLO_UNATTAINABLE, "dropped: the service level can no longer be met; try later"
