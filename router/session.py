"""One Route stream between a router and a scheduler: what is written on it, and the handles of its requests.

Submits wait in a dict with at most one entry per open request; cancels that accumulate are sent in one message, and so
are changes to adapters. A handle belongs to one stream and is never reused on it.
"""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from lorrery.router import wire
from lorrery.router.open_request import OpenRequest
from lorrery.router.streams import Fanout
from lorrery.service.errors import Internal, NeverFits, RequestError
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause
from lorrery.vocabulary.units import PS_PER_SECOND

LONGEST_WAIT_SECONDS = 24 * 3600.0
"""Upper bound on a client's remaining time as sent to the scheduler."""
MAX_CHANGES = 1024
"""Adapter changes queued for a scheduler that reads slowly; beyond that it gets the whole log instead."""
_MAX_HANDLE = 2**32 - 1

RouteCall = grpc.aio.StreamStreamCall[scheduler_pb2.RouteRequest, scheduler_pb2.RouteResponse]
_log = get_logger("router.session")


class Session:
    """One Route stream, from SchedulerHello to its end.

    Args:
        address: of the scheduler.
        call: the stream, after both hellos.
        fanout: receives its tokens.
        submit_bytes: size of the largest submit that the scheduler accepts; a larger one would break the stream.
    """

    def __init__(self, address: str, call: RouteCall, fanout: Fanout, submit_bytes: int) -> None:
        self.fanout = fanout
        self._address = address
        self._submit_bytes = submit_bytes
        self._call = call
        self._next_handle = 1
        self._submits: dict[int, OpenRequest] = {}
        self._cancels: list[wire.Cancel] = []
        self._adapters: AdapterLog | None = None
        self._changes: list[AdapterChange] = []
        self._something_to_write = asyncio.Event()

    def submit(self, open_request: OpenRequest) -> None:
        """Submit a request, or the rest of it, under a new handle."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.fanout.add(handle, open_request)
        self._submits[handle] = open_request
        self._something_to_write.set()

    def cancel(self, handle: int, cause: CancelCause, kept_tokens: int) -> bool:
        """Cancel a request at the scheduler; a submit that is still queued is dropped instead.

        Args:
            handle: the request's.
            cause: why.
            kept_tokens: output that its client has.

        Returns:
            Whether a cancel is sent, which the scheduler will answer.
        """
        if self._submits.pop(handle, None) is not None:
            return False
        self._cancels.append(wire.Cancel(handle, cause, kept_tokens))
        self._something_to_write.set()
        return True

    def tell(self, adapters: AdapterLog, changes: Sequence[AdapterChange] | None = None) -> None:
        """Send adapter changes to the scheduler, before further requests.

        Args:
            adapters: the whole log, read when the message is written.
            changes: the new changes; None: send the whole log.
        """
        if changes is not None and self._adapters is None and len(self._changes) + len(changes) <= MAX_CHANGES:
            self._changes += changes
        else:
            self._adapters, self._changes = adapters, []
        self._something_to_write.set()

    async def write(self) -> None:
        """Write queued messages, until cancelled or the stream breaks."""
        while True:
            await self._something_to_write.wait()
            self._something_to_write.clear()
            while self._adapters is not None or self._changes or self._cancels or self._submits:
                if self._adapters is not None:
                    message, self._adapters = wire.whole_log(self._adapters), None
                    await self._call.write(message)
                if self._changes:
                    changes, self._changes = self._changes, []
                    await self._call.write(wire.adapter_changes(changes))
                if self._cancels:
                    listed, self._cancels = self._cancels, []
                    for cancel in wire.cancels(listed):
                        await self._call.write(cancel)
                if self._submits:
                    handle = next(iter(self._submits))
                    if handle > _MAX_HANDLE:
                        # The next stream starts with new handles, and resumes every open request.
                        raise wire.ProtocolError("this stream has no handles left")
                    open_request = self._submits.pop(handle)
                    if (submit := self._pack(handle, open_request)) is not None:
                        await self._call.write(submit)

    def _time_left_ps(self, open_request: OpenRequest) -> int:
        """Return the time until a client's deadline, in device time; 0: none."""
        if open_request.waits_until is None:
            return 0
        seconds = min(open_request.waits_until - time.monotonic(), LONGEST_WAIT_SECONDS)
        return max(1, round(seconds / self.fanout.time_scale * PS_PER_SECOND))

    def _pack(self, handle: int, open_request: OpenRequest) -> scheduler_pb2.RouteRequest | None:
        """Return the submit message of a request; None: it cannot be sent, and the request has failed."""
        error: RequestError
        try:
            message = wire.submit(
                handle,
                open_request.request,
                open_request.token_ids,
                resumed=open_request.resumed,
                adapter=open_request.adapter,
                time_left_ps=self._time_left_ps(open_request),
                trace=open_request.context,
            )
        except Exception as cause:
            # Without the traceback, whose locals include the prompt.
            _log.error("submit_failed", **open_request.log_fields, reason=repr(cause))
            error = Internal(str(cause))
        else:
            if (size := message.ByteSize()) <= self._submit_bytes:
                if open_request.trace is not None:
                    open_request.trace.submitted(self._address, resumed=open_request.resumed)
                return message
            error = NeverFits(
                f"the request takes {size} bytes on the way to its scheduler; at most {self._submit_bytes} are taken;"
                " give a shorter prompt or fewer stop strings",
                value=size,
                limit=self._submit_bytes,
            )
        self.fanout.remove(open_request)
        open_request.fail(error)
        return None
