"""The exceptions, and how clients see them.

    LorreryError
    |-- SettingsError        a settings file, variable or flag is wrong
    |-- FormatError          a file is malformed, or has an unknown format version
    `-- RequestError         one request ends without (further) output
        |-- InvalidRequest   a bad value
        |-- NeverFits        prompt or total over a limit
        |-- UnknownName      no such adapter or model
        |-- Overloaded       a queue or quota is full, or the reader is too slow
        |-- Unattainable     dropped by a service-level policy
        |-- RankOverLimit    an adapter over the deployment's rank limit
        |-- Conflict         the name is in use
        |-- NotOffered       an unsupported call of another server's protocol
        |-- WrongWorker      a worker does not match the cluster
        |-- NoKvEvents       the deployment's prefix cache has no blocks
        |-- RunIsOver        a simulation in lock step has ended
        |-- WorkerGivenUp    a worker's stream is ended because of its behaviour
        |-- Unauthenticated  no valid key, token or certificate
        |-- PermissionDenied the caller may not do this
        |-- Unavailable      no worker or shard, or draining
        |-- InjectedFault    injected by a rule of `faults`
        `-- Internal         a broken invariant of ours

`service.network.status` maps each to a status code; `Reason` is a finer, machine-readable cause that accompanies the
text. docs/failures.md lists both.
"""

# ruff: noqa: N818  the names say what is wrong with the request; "Error" would say it twice

from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import ClassVar


class Reason(StrEnum):
    """Cause of an error: `reason` of `google.rpc.ErrorInfo`. Clients compare these strings; never change them."""

    INVALID_VALUE = "INVALID_VALUE"
    NEVER_FITS = "NEVER_FITS"
    UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    RANK_OVER_LIMIT = "RANK_OVER_LIMIT"
    ADAPTER_EXISTS = "ADAPTER_EXISTS"
    TOO_MANY_ADAPTERS = "TOO_MANY_ADAPTERS"
    REQUEST_EXISTS = "REQUEST_EXISTS"
    NAME_TAKEN = "NAME_TAKEN"
    WRONG_WORKER = "WRONG_WORKER"
    NO_KV_EVENTS = "NO_KV_EVENTS"
    RUN_IS_OVER = "RUN_IS_OVER"
    WORKER_GIVEN_UP = "WORKER_GIVEN_UP"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    TOO_MANY_OPEN_REQUESTS = "TOO_MANY_OPEN_REQUESTS"
    SLOW_READER = "SLOW_READER"
    SLO_UNATTAINABLE = "SLO_UNATTAINABLE"
    NO_SCHEDULER = "NO_SCHEDULER"
    NO_WORKER = "NO_WORKER"
    ADAPTER_LOAD = "ADAPTER_LOAD"
    DRAINING = "DRAINING"
    WORKERS_LOST = "WORKERS_LOST"
    NOT_OFFERED = "NOT_OFFERED"
    FAULT_INJECTED = "FAULT_INJECTED"
    INTERNAL = "INTERNAL"


class LorreryError(Exception):
    """Base class of all errors."""


class SettingsError(LorreryError):
    """A settings file, variable or flag is wrong; the message names the key."""


class FormatError(LorreryError):
    """A file is malformed, or has an unknown format version."""


class RequestError(LorreryError):
    """One request ends without (further) output.

    Args:
        message: what is wrong, the limit, what to do.
        reason: cause, for classes with several.
        retry_seconds: when the same request may succeed, if known; `service.network.status` has default times.
        facts: machine-readable contents of the message: `field`, `value`, `limit` and the like.
    """

    usual_reason: ClassVar[Reason]

    def __init__(
        self, message: str, reason: Reason | None = None, retry_seconds: float | None = None, /, **facts: object
    ) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.reason = self.usual_reason if reason is None else reason
        self.facts = {name: str(value) for name, value in facts.items()}


class InvalidRequest(RequestError):
    """A bad value."""

    usual_reason = Reason.INVALID_VALUE


class NeverFits(RequestError):
    """Prompt or total over a limit."""

    usual_reason = Reason.NEVER_FITS


class UnknownName(RequestError):
    """No such adapter or model."""

    usual_reason = Reason.UNKNOWN_ADAPTER


class Overloaded(RequestError):
    """A queue or quota is full, or the reader is too slow."""

    usual_reason = Reason.QUEUE_FULL


class Unattainable(RequestError):
    """Dropped by a service-level policy."""

    usual_reason = Reason.SLO_UNATTAINABLE


class RankOverLimit(RequestError):
    """An adapter over the deployment's rank limit."""

    usual_reason = Reason.RANK_OVER_LIMIT


class Conflict(RequestError):
    """The name is in use."""

    usual_reason = Reason.ADAPTER_EXISTS


class NotOffered(RequestError):
    """An unsupported call of another server's protocol."""

    usual_reason = Reason.NOT_OFFERED


class WrongWorker(RequestError):
    """A worker does not match the cluster."""

    usual_reason = Reason.WRONG_WORKER


class NoKvEvents(RequestError):
    """The deployment's prefix cache has no blocks."""

    usual_reason = Reason.NO_KV_EVENTS


class RunIsOver(RequestError):
    """A simulation in lock step has ended."""

    usual_reason = Reason.RUN_IS_OVER


class WorkerGivenUp(RequestError):
    """A worker's stream is ended because of its behaviour."""

    usual_reason = Reason.WORKER_GIVEN_UP


class Unauthenticated(RequestError):
    """No valid key, token or certificate."""

    usual_reason = Reason.UNAUTHENTICATED


class PermissionDenied(RequestError):
    """The caller may not do this."""

    usual_reason = Reason.PERMISSION_DENIED


class Unavailable(RequestError):
    """No worker or shard for longer than the settings allow, or draining."""

    usual_reason = Reason.NO_WORKER


class Internal(RequestError):
    """A broken invariant of ours."""

    usual_reason = Reason.INTERNAL


class InjectedFault(RequestError):
    """An injected fault.

    Args:
        rule: text of the rule.
        status: name of the gRPC status that the rule names.
    """

    usual_reason = Reason.FAULT_INJECTED

    def __init__(self, rule: str, status: str) -> None:
        super().__init__(f"injected fault: {rule}", rule=rule)
        self.status = status


_PACKAGE = __name__.partition(".")[0]


def exit_in_words(error: BaseException) -> str:
    """Return what raised it, where, and what to do: the method that this tree called last.

    Args:
        error: no `Exception`; as caught, with its traceback.
    """
    what = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
    called = place = error.__traceback__
    while place is not None:
        if _is_ours(place.tb_frame):
            called = place.tb_next
        place = place.tb_next
    if called is None:
        return f"{what} was raised"
    frame = called.tb_frame
    where = f"{Path(frame.f_code.co_filename).name}, line {called.tb_lineno}"
    return f"{_method(frame)} raised {what} ({where}); raise another exception, and only the requests concerned end"


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def _method(frame: FrameType) -> str:
    """Name a method by the class of its object, as settings do, which may inherit it; a function by its module."""
    if "self" in frame.f_locals:
        cls = type(frame.f_locals["self"])
        return f"{cls.__module__}:{cls.__qualname__}.{frame.f_code.co_name}"
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"
