"""Whether what a stream ended with is one of the endings that its request and the events allow.

Whatever came is the beginning of the tokens that an undisturbed run gives; a stream that ended well has them all, with
the right usage. A request may end otherwise for three reasons: it asked for that, its key is over a quota or its
adapter is not loaded, or its router was killed or told to stop. What happens to workers and schedulers is never one,
but where a request's workers were lost `max_worker_losses` times.
"""

from collections.abc import Sequence

from lorrery.service.settings.cluster import Settings
from tests.chaos.clients import TIMEOUT_SECONDS, Kind, Outcome
from tests.chaos.cluster import History
from tests.chaos.plan import ADAPTERS
from tests.chaos.plan import Kind as Action

ROUTER_GONE = frozenset({"UNAVAILABLE", "CANCELLED"})
ENDS = (Action.KILL, Action.TERMINATE, Action.REMOVE)

_ASKED_FOR: dict[Kind, tuple[str, str]] = {
    Kind.TOO_LONG: ("INVALID_ARGUMENT", "NEVER_FITS"),
    Kind.UNKNOWN_ADAPTER: ("NOT_FOUND", "UNKNOWN_ADAPTER"),
    Kind.WRONG_KEY: ("UNAUTHENTICATED", "UNAUTHENTICATED"),
    Kind.FORBIDDEN: ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    Kind.CUT: ("DATA_LOSS", "FAULT_INJECTED"),
    Kind.REFUSED: ("ABORTED", "FAULT_INJECTED"),
}
_QUOTA = {"few": "requests_per_minute", "narrow": "max_waiting"}


def wrong_with(outcome: Outcome, settings: Settings, history: History, losses: Sequence[float]) -> str:
    """Return what is wrong with how a request ended; empty: nothing.

    Args:
        outcome: of the request.
        settings: of the cluster.
        history: of what was done to it.
        losses: when workers were lost.
    """
    stream = outcome.stream
    expected, _ = stream.ask.expected(settings)
    if stream.token_ids != expected[: len(stream.token_ids)]:
        return "its tokens are not those of an undisturbed run"
    if outcome.code == "OK":
        return _wrong_with_end(outcome, settings)
    if _allowed(outcome, settings, history, losses):
        return ""
    if outcome.ended - outcome.began > TIMEOUT_SECONDS - 1:
        return "it was forgotten"
    return "nothing allows this end"


def _wrong_with_end(outcome: Outcome, settings: Settings) -> str:
    if outcome.kind in _ASKED_FOR and (outcome.kind is not Kind.CUT or _could_cut(outcome, settings)):
        return "it ended well"
    try:
        outcome.stream.check(settings)
    except AssertionError as error:
        return f"not as an undisturbed run: {error}"
    return ""


def _could_cut(outcome: Outcome, settings: Settings) -> bool:
    return len(outcome.stream.ask.expected(settings)[0]) >= outcome.cut_after


def _allowed(outcome: Outcome, settings: Settings, history: History, losses: Sequence[float]) -> bool:
    code, reason = outcome.code, outcome.reason
    if (code, reason) == _ASKED_FOR.get(outcome.kind):
        return outcome.kind is not Kind.CUT or len(outcome.stream.token_ids) == outcome.cut_after
    gone = code in ROUTER_GONE and reason in ("", "DRAINING")
    if gone and history.touched([outcome.router], outcome.began, outcome.ended, ENDS):
        return True
    match code, reason:
        case "CANCELLED", "":
            return outcome.kind is Kind.CANCELLED
        case "DEADLINE_EXCEEDED", "":
            return outcome.kind is Kind.DEADLINE
        case "RESOURCE_EXHAUSTED", "SLOW_READER":
            return outcome.kind is Kind.SLOW
        case "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED":
            return outcome.key in _QUOTA and not outcome.stream.token_ids
        case "NOT_FOUND", "UNKNOWN_ADAPTER":
            return outcome.stream.ask.adapter_id in ADAPTERS
        case "INTERNAL", "WORKERS_LOST":
            near = [at for at in losses if outcome.began - 1 <= at <= outcome.ended + 1]
            return len(near) >= settings.scheduler.max_worker_losses
        case _:
            return False
