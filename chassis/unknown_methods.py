"""A gRPC server that outlives calls of methods that it does not have.

grpcio (1.85) decodes the path of such a call in its serving loop. A path that is no UTF-8 ends the loop, and the whole
server with it: one call of anybody's. So these calls are answered here, with UNIMPLEMENTED and without their path. They
are those that match no registered method; a generic handler of the library's has no methods that it could be asked for.
With another version than those of `grpc_core.KNOWING` the library's own server serves.
"""

# ruff: noqa: SLF001  the library has no public hook there

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server as library

_core: Any = cygrpc


class OutlivingServer(library.Server):
    """The library's server, without its options for compression and thread pools.

    Args:
        interceptors: of its calls.
        options: of the channel.
    """

    def __init__(
        self, interceptors: Sequence["grpc.aio.ServerInterceptor"], options: Sequence[tuple[str, int]]
    ) -> None:
        self._loop = _core.get_working_loop()
        self._server = _Outliving(self._loop, None, (), interceptors, options, None)


class _Outliving(_core.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        """Return a future of the next call of `method`; None: of any other, which the serving loop is not to see."""
        if method is not None:
            return cast("asyncio.Future[Any]", super()._make_request_call_future(method))
        return asyncio.create_task(self._answer_others(), name="calls of unknown methods")

    async def _answer_others(self) -> None:
        loop, answering = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        no_methods = _core._MethodResolver([], {})
        while True:
            call = await self._request_call()
            answer = _core._handle_rpc("", no_methods, (), call, loop, False)
            task = loop.create_task(_core._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)
