"""Limits on a request, and why one ends without (further) tokens, with the message for its client.

The reasons are the scheduler's; a service maps them to status codes. A message says what is wrong, the limit, and what
to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on one request, all in tokens.

    Attributes:
        max_req_input_len: longest prompt.
        max_req_total_len: longest prompt plus output.
        max_total_token_num: the KV pool, which must hold the whole request and one token more.
    """

    max_req_input_len: int
    max_req_total_len: int
    max_total_token_num: int


def check_lengths(prompt_tokens: int, max_new_tokens: int, limits: Limits) -> str | None:
    """Return the violated limit of a request's lengths, or None if it is within every limit.

    The limits are S-LoRA's, in its order and with its words (slora/server/httpserver/manager.py, `generate`); the first
    violated one is reported:

        prompt_tokens                           <= max_req_input_len
        prompt_tokens + max_new_tokens          <= max_req_total_len
        prompt_tokens + max_new_tokens + 1      <= max_total_token_num

    The last one ignores the adapter's own 4 x rank pool tokens: a request may pass here and still never fit.

    Args:
        prompt_tokens: length of the tokenised prompt, its begin-of-sequence token included.
        max_new_tokens: most tokens the request may produce.
        limits: the limits to hold it against.
    """
    total_tokens = prompt_tokens + max_new_tokens
    if prompt_tokens > limits.max_req_input_len:
        return f"the input prompt token len {prompt_tokens} is too long > {limits.max_req_input_len}"
    if total_tokens > limits.max_req_total_len:
        return (
            "the req token total len (input len + output len) is too long > "
            f"max_req_total_len:{limits.max_req_total_len}"
        )
    if total_tokens + 1 > limits.max_total_token_num:
        return (
            "the req token total len + 1 (input len + output len + 1) is too long > "
            f"max_total_token_num:{limits.max_total_token_num}"
        )
    return None


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
    QUOTA_EXCEEDED = auto()
    WORKERS_LOST = auto()
    INTERNAL = auto()


class DropReason(Enum):
    """Why a waiting sequence was given up."""

    SERVICE_LEVEL = "service level"
    ADAPTER_LOAD = "adapter load"


class Scope(Enum):
    """Which other requests the same refusal would hit at that time."""

    REQUEST = auto()
    TENANT = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal: message for people, facts for programs.

    Attributes:
        message: what is wrong, the limit, what to do.
        facts: by name: the field, its value, its limit.
        retry_ps: after how long the same request may be accepted; None: unknown.
        scope: which other requests would be refused until then.
        retry_step_ps: further delay of each of those after the one before it.
    """

    reason: RefusalReason
    message: str
    facts: Mapping[str, object] = field(default_factory=dict)
    retry_ps: int | None = None
    scope: Scope = Scope.REQUEST
    retry_step_ps: int = 0


def draining() -> Refusal:
    """The scheduler accepts nothing new."""
    return Refusal(RefusalReason.DRAINING, "the scheduler is about to stop")


def unknown_adapter(adapter_id: str) -> Refusal:
    """A request names an adapter that is not registered."""
    message = f"adapter_id {adapter_id!r} is not known; see ListAdapters"
    return Refusal(RefusalReason.UNKNOWN_ADAPTER, message, {"field": "adapter_id", "value": adapter_id})


def malformed(why: str) -> Refusal:
    """A request cannot be read: its sender has another version, or is broken."""
    return Refusal(RefusalReason.INVALID, f"the scheduler cannot read the request: {why}")


def nothing_to_do(sequence: Sequence) -> Refusal:
    """A request has no prompt or asks for no tokens."""
    return Refusal(
        RefusalReason.INVALID,
        f"prompt has {sequence.prompt_tokens} tokens and max_new_tokens is {sequence.max_new_tokens};"
        " both must be at least 1",
    )


def too_long(wrong: str, sequence: Sequence, limits: Limits) -> Refusal:
    """A request exceeds a limit on lengths; `wrong` is the result of `check_lengths`."""
    message = (
        f"{wrong} (prompt has {sequence.prompt_tokens} tokens, max_new_tokens is {sequence.max_new_tokens};"
        f" max_req_input_len is {limits.max_req_input_len}, max_req_total_len is {limits.max_req_total_len})"
    )
    facts = {"max_req_input_len": limits.max_req_input_len, "max_req_total_len": limits.max_req_total_len}
    return Refusal(RefusalReason.NEVER_FITS, message, _lengths(sequence) | facts)


def queue_full(num_waiting: int, max_waiting_requests: int, retry_ps: int | None = None, step_ps: int = 0) -> Refusal:
    """Too many requests wait; `retry_ps`: until there may be a place for this one; `step_ps`: between two places."""
    return Refusal(
        RefusalReason.QUEUE_FULL,
        f"{num_waiting} requests wait; max_waiting_requests is {max_waiting_requests}; try later",
        {"field": "max_waiting_requests", "value": num_waiting, "limit": max_waiting_requests},
        retry_ps,
        Scope.ALL,
        step_ps,
    )


def tenant_queue_full(tenant_id: str, num_waiting: int, most: int, retry_ps: int | None, step_ps: int) -> Refusal:
    """Too many requests of one tenant wait; `retry_ps` and `step_ps` as in `queue_full`."""
    return Refusal(
        RefusalReason.QUEUE_FULL,
        f"{num_waiting} requests of tenant {tenant_id!r} wait; max_waiting_requests_per_tenant is {most}; try later",
        {"field": "max_waiting_requests_per_tenant", "value": num_waiting, "limit": most},
        retry_ps,
        Scope.TENANT,
        step_ps,
    )


def too_late(wait_ps: int, left_ps: int, retry_ps: int | None, step_ps: int, *, all_alike: bool) -> Refusal:
    """A request is not expected to start before its deadline.

    Args:
        wait_ps: until it would start.
        left_ps: until its deadline.
        retry_ps: until a retry may succeed.
        step_ps: between two places.
        all_alike: whether all requests have this deadline.
    """
    wait, left = _seconds(wait_ps), _seconds(max(left_ps, 0))
    return Refusal(
        RefusalReason.SLO_UNATTAINABLE,
        f"the request would start in about {wait} s, and must within {left} s; try later, or allow more time",
        {"field": "deadline", "value": wait, "limit": left},
        retry_ps,
        Scope.ALL if all_alike else Scope.REQUEST,
        step_ps,
    )


def waited_too_long(waited_ps: int, retry_ps: int | None) -> Refusal:
    """A request still waits at its deadline; `retry_ps`: until another one may be accepted."""
    waited = _seconds(waited_ps)
    return Refusal(
        RefusalReason.SLO_UNATTAINABLE,
        f"the request has waited for {waited} s, and its deadline has passed before it could start; try later",
        {"field": "deadline", "value": waited},
        retry_ps,
    )


def too_many_waiting(num_waiting: int, max_waiting: int) -> Refusal:
    """Too many requests of one key wait."""
    return Refusal(
        RefusalReason.QUOTA_EXCEEDED,
        f"{num_waiting} requests of this key wait; max_waiting of the key is {max_waiting}; try later",
        {"field": "max_waiting", "value": num_waiting, "limit": max_waiting},
    )


def over_rate(name: str, amount: int, per_minute: int, retry_ps: int) -> Refusal:
    """A key has used up its share of a minute; `retry_ps`: until enough is left for this request."""
    return Refusal(
        RefusalReason.QUOTA_EXCEEDED,
        f"{name} of this key is {per_minute}, of which too little is left for {amount} now; try again in"
        f" {retry_ps / PS_PER_SECOND:.3g} s",
        {"field": name, "value": amount, "limit": per_minute},
        retry_ps,
    )


def never_fits(sequence: Sequence, why: str) -> Refusal:
    """Every attached worker is too small; `why`: the reason of the first of them."""
    return Refusal(RefusalReason.NEVER_FITS, f"no attached worker can ever take it: {why}", _lengths(sequence))


def no_worker(worker_wait_seconds: float | None, why_not_the_others: str | None = None) -> Refusal:
    """The wait for a worker is over (None: none will come); `why_not_the_others`: why attached ones cannot take it."""
    if worker_wait_seconds is None:
        which = "" if why_not_the_others is None else f" that can take it: {why_not_the_others}"
        return Refusal(RefusalReason.NO_WORKER, f"the last worker has ended, and none is to come{which}")
    seconds = f"{worker_wait_seconds:g} s (worker_wait_seconds)"
    message = f"no worker has attached for {seconds}"
    if why_not_the_others is not None:
        message = f"no worker that can take it has attached for {seconds}: {why_not_the_others}"
    return Refusal(RefusalReason.NO_WORKER, message, {"field": "worker_wait_seconds", "limit": worker_wait_seconds})


def given_up(num_losses: int, max_worker_losses: int) -> Refusal:
    """Several workers in a row were lost with the request in their batch, which may be no accident."""
    return Refusal(
        RefusalReason.WORKERS_LOST,
        f"{num_losses} workers were lost while they ran this request; max_worker_losses is {max_worker_losses}; it may"
        " be the cause, and is not moved to another",
        {"field": "max_worker_losses", "value": num_losses, "limit": max_worker_losses},
    )


def dropped(sequence: Sequence, reason: DropReason) -> Refusal:
    """A sequence was given up by its worker's queue."""
    adapter = sequence.adapter
    if reason is DropReason.ADAPTER_LOAD and adapter is not None:
        message = f"adapter {adapter.adapter_id!r} could not be loaded; try later"
        return Refusal(RefusalReason.ADAPTER_LOAD, message)
    return Refusal(RefusalReason.SLO_UNATTAINABLE, "dropped: the service level can no longer be met; try later")


def raised(message: str) -> Refusal:
    """A policy raised; the message names it, and is not for a live client (`withheld`)."""
    return Refusal(RefusalReason.INTERNAL, message)


def withheld(refusal: Refusal) -> Refusal:
    """Return a refusal as a client may see it: without what a policy raised."""
    if refusal.reason is not RefusalReason.INTERNAL:
        return refusal
    return Refusal(refusal.reason, "internal error; the scheduler's log says more")


def _seconds(ps: int) -> str:
    return f"{ps / PS_PER_SECOND:.3g}"


def _lengths(sequence: Sequence) -> dict[str, object]:
    return {"prompt_tokens": sequence.prompt_tokens, "max_new_tokens": sequence.max_new_tokens}
