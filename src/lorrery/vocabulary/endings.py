"""Why a sequence finished, why a request ends before its sequence has, and what that counts as.

A router cancels a request at its scheduler; the cause goes with the cancel, into the scheduler's journal, and from
there into a replay. What each cause counts as, in which series, is `MEANINGS`; docs/failures.md shows it.

A stop string that shows only in the text is found by the router, as vLLM finds stop strings in its front end and aborts
the request in its engine core. The output has finished there, with the tokens that are kept, and the front end's
statistics, which are vLLM's series, count it like every other stop. Clients that leave are in none of those that count
finished requests.
"""

from enum import IntEnum
from typing import NamedTuple


class FinishReason(IntEnum):
    """Numbered as on the wire (`FinishReason` of types.proto); reports, metrics and journals use `word`."""

    UNSPECIFIED = 0
    EOS = 1
    STOP = 2
    LENGTH = 3
    ABORTED = 4

    @property
    def word(self) -> str:
        """The name in lower case: `eos`, `stop`, ..."""
        return _REASON_WORDS[self]

    @classmethod
    def of(cls, number: int) -> "FinishReason":
        """Return the reason with a number from the wire; UNSPECIFIED if this version does not know it."""
        return _REASONS.get(number, cls.UNSPECIFIED)


_REASONS = {int(reason): reason for reason in FinishReason}
_REASON_WORDS = {reason: reason.name.lower() for reason in FinishReason}


class CancelCause(IntEnum):
    """Numbered as on the wire (`CancelCause` of scheduler.proto)."""

    UNSPECIFIED = 0
    STOP_TEXT = 1
    CLIENT_LEFT = 2
    ABORTED = 3
    DEADLINE = 4
    KEY_TAKEN_BACK = 5
    SLOW_READER = 6
    FAULT = 7
    MOVED = 8
    FAILED = 9
    ROUTER_LEFT = 10
    """Never sent: the router's stream has ended."""
    REFUSED_TOGETHER = 11

    @property
    def word(self) -> str:
        """The name in lower case: `stop_text`, `client_left`, ..."""
        return _CAUSE_WORDS[self]

    @property
    def finish(self) -> FinishReason | None:
        """The reason with which the request has finished; None: it has not finished."""
        return MEANINGS[self].finish

    @classmethod
    def of(cls, number: int) -> "CancelCause":
        """Return the cause with a number from the wire; CLIENT_LEFT if this version does not know it."""
        return _CAUSES.get(number, cls.CLIENT_LEFT)

    @classmethod
    def named(cls, word: str) -> "CancelCause":
        """Return the cause with this `word`. Raises KeyError."""
        return _CAUSES_BY_WORD[word]


class Meaning(NamedTuple):
    """What a cause counts as.

    Attributes:
        finish: its finish reason in every series that counts finished requests (the worker's under vLLM's and SGLang's
            names, `lorrery_scheduler_requests_total`, phases), with the tokens that are kept; so too in the journal
            (`finished`), in traces and in the history. None: it has not finished, and no such series counts it.
        outcome: the label in `lorrery_scheduler_requests_total`, and in the history; empty: it is not counted there,
            since it goes on elsewhere, or may.
        at_the_edge: its outcome at the router: `lorrery_router_requests_total` and the root span. Empty: none, since it
            goes on, or has no router any more.
    """

    finish: FinishReason | None
    outcome: str
    at_the_edge: str


MEANINGS = {
    CancelCause.STOP_TEXT: Meaning(FinishReason.STOP, "stop", "ok"),
    CancelCause.CLIENT_LEFT: Meaning(None, "cancelled", "cancelled"),
    CancelCause.ABORTED: Meaning(None, "cancelled", "aborted"),
    CancelCause.DEADLINE: Meaning(None, "cancelled", "deadline"),
    CancelCause.KEY_TAKEN_BACK: Meaning(None, "cancelled", "unauthenticated"),
    CancelCause.SLOW_READER: Meaning(None, "cancelled", "overloaded"),
    CancelCause.FAULT: Meaning(None, "cancelled", "fault"),
    CancelCause.MOVED: Meaning(None, "", ""),
    CancelCause.FAILED: Meaning(None, "cancelled", "failed"),
    CancelCause.ROUTER_LEFT: Meaning(None, "", ""),
    CancelCause.REFUSED_TOGETHER: Meaning(None, "cancelled", "cancelled"),
}
MEANINGS[CancelCause.UNSPECIFIED] = MEANINGS[CancelCause.CLIENT_LEFT]

_CAUSES = {int(cause): cause for cause in CancelCause if cause}
_CAUSE_WORDS = {cause: cause.name.lower() for cause in CancelCause}
_CAUSES_BY_WORD = {word: cause for cause, word in _CAUSE_WORDS.items()}
