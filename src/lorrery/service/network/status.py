"""Errors in gRPC: a status, its text, and machine-readable details (google.rpc.Status, whose bytes status.proto makes).

`ErrorInfo` has the reason, the domain `lorrery` and the facts of the message; `RetryInfo` is present if the same
request may succeed a little later. Clients find both in the trailing metadata `grpc-status-details-bin`, which every
gRPC library reads (in Python `grpc_status.rpc_status.from_call`).
"""

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import Message

from lorrery.service.errors import (
    Conflict,
    InjectedFault,
    Internal,
    InvalidRequest,
    NeverFits,
    NoKvEvents,
    NotOffered,
    Overloaded,
    PermissionDenied,
    RankOverLimit,
    Reason,
    RequestError,
    RunIsOver,
    Unattainable,
    Unauthenticated,
    Unavailable,
    UnknownName,
    WorkerGivenUp,
    WrongWorker,
)
from lorrery.v1.status_pb2 import ErrorInfo, RetryInfo, Status

DOMAIN = "lorrery"
MAX_TEXT_BYTES, MAX_FACT_BYTES = 1000, 200
"""A status travels in headers, limited to 8 KiB by clients; its text takes up to three times its bytes, twice."""

GRPC_STATUS: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NeverFits: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unattainable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RankOverLimit: grpc.StatusCode.FAILED_PRECONDITION,
    Conflict: grpc.StatusCode.ALREADY_EXISTS,
    NotOffered: grpc.StatusCode.UNIMPLEMENTED,
    WrongWorker: grpc.StatusCode.FAILED_PRECONDITION,
    NoKvEvents: grpc.StatusCode.FAILED_PRECONDITION,
    RunIsOver: grpc.StatusCode.FAILED_PRECONDITION,
    WorkerGivenUp: grpc.StatusCode.ABORTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Internal: grpc.StatusCode.INTERNAL,
}
"""The only mapping from errors to status codes."""

RETRY_SECONDS: dict[Reason, int] = {
    Reason.QUEUE_FULL: 1,
    Reason.TOO_MANY_OPEN_REQUESTS: 1,
    Reason.QUOTA_EXCEEDED: 1,
    Reason.SLO_UNATTAINABLE: 1,
    Reason.NO_SCHEDULER: 2,
    Reason.NO_WORKER: 2,
    Reason.ADAPTER_LOAD: 1,
    Reason.DRAINING: 2,
}
"""Wall seconds after which to retry, unless the error has its own value.

An estimate of the time until something changes: a step or two of a full batch, or a restart of a process. A slow reader
has no entry: a retry would end the same way.
"""

_DETAILS_KEY = "grpc-status-details-bin"
_TYPES = "type.googleapis.com/google.rpc."

Context = grpc.aio.ServicerContext[Any, Any]


def grpc_status(error: RequestError) -> grpc.StatusCode:
    """Return the status code of an error."""
    return grpc.StatusCode[error.status] if isinstance(error, InjectedFault) else GRPC_STATUS[type(error)]


def retry_seconds(error: RequestError) -> float | None:
    """Return the wall seconds after which to retry; None: a retry would fail again."""
    return RETRY_SECONDS.get(error.reason) if error.retry_seconds is None else error.retry_seconds


def public_text(error: RequestError) -> str:
    """Return an error's text for clients: without details for internal errors."""
    return "internal error; the router's log has more" if error.reason is Reason.INTERNAL else str(error)


def status_of(error: RequestError, message: str | None = None) -> Status:
    """Return the status of an error with its details; `message` replaces the error's own text."""
    facts = {name: _cut(value, MAX_FACT_BYTES) for name, value in error.facts.items()}
    details = [_detail("ErrorInfo", ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))]
    seconds = retry_seconds(error)
    if seconds is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(seconds * 1e9))
        details.append(_detail("RetryInfo", retry))
    text = _cut(str(error) if message is None else message, MAX_TEXT_BYTES)
    return Status(code=grpc_status(error).value[0], message=text, details=details)


def _detail(name: str, message: Message) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"{_TYPES}{name}", value=message.SerializeToString())


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode()
    return text if len(encoded) <= max_bytes else encoded[:max_bytes].decode(errors="ignore") + "..."


async def abort(context: Context, error: RequestError, message: str | None = None) -> NoReturn:
    """End a call with an error's status; `message` replaces the error's own text."""
    status = status_of(error, message)
    await context.abort(grpc_status(error), status.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return the reason in the details of a failed outgoing call; empty: it has none."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                if detail.type_url == f"{_TYPES}ErrorInfo":
                    return ErrorInfo.FromString(detail.value).reason
    return ""


async def pass_on(context: Context, error: grpc.aio.AioRpcError) -> NoReturn:
    """End a call with the status, details included, of a failed outgoing call."""
    details = tuple((key, value) for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY)
    await context.abort(error.code(), error.details() or "", details)
    raise AssertionError("abort returned")
