"""What can go wrong, and how a client sees it.

    LorreryError
    |-- SettingsError        a settings file, variable or flag is wrong
    |-- FormatError          a file has a format version that is not known, or is malformed
    `-- RequestError         one request ends without (further) output
        |-- InvalidRequest   a bad value
        |-- NeverFits        prompt or total over a limit
        |-- UnknownName      no such adapter or model
        |-- Overloaded       a queue or quota is full, or the reader is too slow
        |-- Unattainable     dropped by a service-level policy
        |-- RankOverLimit    an adapter over the deployment's rank limit
        |-- Unavailable      no worker or shard, or draining
        `-- Internal         an invariant of ours is broken

`GRPC_STATUS` is the one place where an error meets a status code.
"""

# ruff: noqa: N818  the names say what is wrong with the request; "Error" would say it twice

import grpc


class LorreryError(Exception):
    """Root of the tree."""


class SettingsError(LorreryError):
    """A settings file, variable or flag is wrong; the message names the key."""


class FormatError(LorreryError):
    """A file has a format version that is not known, or is malformed."""


class RequestError(LorreryError):
    """One request ends without (further) output; the message says what, the limit, what to do."""


class InvalidRequest(RequestError):
    """A bad value."""


class NeverFits(RequestError):
    """Prompt or total over a limit."""


class UnknownName(RequestError):
    """No such adapter or model."""


class Overloaded(RequestError):
    """A queue or quota is full, or the reader is too slow."""


class Unattainable(RequestError):
    """Dropped by a service-level policy."""


class RankOverLimit(RequestError):
    """An adapter over the deployment's rank limit."""


class Unavailable(RequestError):
    """No worker or shard for longer than the settings allow, or draining."""


class Internal(RequestError):
    """An invariant of ours is broken."""


GRPC_STATUS: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NeverFits: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unattainable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RankOverLimit: grpc.StatusCode.FAILED_PRECONDITION,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Internal: grpc.StatusCode.INTERNAL,
}
