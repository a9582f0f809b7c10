"""The gRPC server of a process: health, reflection, TLS, limits.

Server reflection comes in both versions that clients use: grpc.reflection.v1 and v1alpha. Both have the same messages
under two package names, hence the same bytes on the wire. grpcio-reflection offers v1alpha only. So its servicer serves
both, and the descriptor of v1, which clients may request, is v1alpha's under the other name. Its pool finds files by
messages, fields and services; here also by methods and enum values.
"""

import asyncio
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from grpc._cython import cygrpc
from grpc.aio import _server as library
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lorrery.service.entry_point import grpcio_version, is_known_grpcio
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import has_extra, missing_extra
from lorrery.service.network.calls import CallGuard
from lorrery.service.network.floods import Floods
from lorrery.service.network.tls import server_credentials
from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.metrics import address_error

# ruff: noqa: SLF001  the library has no public hook for calls of unknown methods

_core: Any = cygrpc

RECEIVE_BYTES = 4 * 1024 * 1024
"""gRPC's default limit on received messages. A longer message ends its call with RESOURCE_EXHAUSTED."""

OPTIONS: tuple[tuple[str, int], ...] = (
    # A second process on the port must fail, not receive half of the connections.
    ("grpc.so_reuseport", 0),
    # Tolerate clients that ping often. gRPC's default closes their connections; if they go on while something is being
    # written, each further ping takes as long as all before it. A flood is service/network/floods.py's.
    ("grpc.http2.max_ping_strikes", 0),
    # Detect clients whose host has died, so that their requests are cancelled and their connections closed.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # default: a minute, regardless of the keepalive options
    # A connection costs some 15 kB, and 80 kB with TLS.
    ("grpc.max_allowed_incoming_connections", 4096),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Calls open at once on one connection. gRPC counts reset ones too until Python has let go of them, so this bounds
    # what a rapid reset takes. Clients keep further calls back, but for those that they begin as soon as others end:
    # of 10,000 at once on one connection a third gets UNAVAILABLE.
    ("grpc.max_concurrent_streams", 2_000),
    # Calls waiting for the event loop: above 1,000 gRPC would cancel random ones silently. Refusals, with a reason, are
    # the service's task.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
)

_BACKLOG = 2048
"""Connections that wait to be accepted: a burst of clients with one connection each."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}  # noqa: S104  compared, not listened on


LIVENESS = "liveness"
"""Health of the process itself, under the name that Kubernetes' documentation uses.

SERVING while the event loop answers, so that a worker without a scheduler, or a service that drains, is unready but not
restarted.
"""


class Health:
    """Status of `grpc.health.v1.Health` for the server (""), for each of its services, and for `LIVENESS`."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names: list[str] = [""]
        self._ended = False

    async def attach(self, server: grpc.aio.Server, names: Sequence[str]) -> None:
        """Serve health on `server`: NOT_SERVING for "" and all `names` until `set` is called."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._names = ["", *names]
        await self.set(False)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    async def set(self, serving: bool) -> None:
        """Set the status; no effect after `end`."""
        if self._ended:
            return
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, response.SERVING if serving else response.NOT_SERVING)

    async def end(self) -> None:
        """Report NOT_SERVING from now on, whatever `set` is called with later; liveness stays SERVING."""
        await self.set(False)
        self._ended = True


def new_server(receive_bytes: int = RECEIVE_BYTES, guard: CallGuard | None = None) -> grpc.aio.Server:
    """Return a server with the options of every service; call this inside the loop.

    Args:
        receive_bytes: upper bound on a received message.
        guard: interceptor of its calls; None: a new one.
    """
    options = (*OPTIONS, ("grpc.max_receive_message_length", receive_bytes))
    guard = guard or CallGuard()
    if not is_known_grpcio(grpcio_version()):
        return grpc.aio.server(interceptors=[guard], options=options)
    return cast("grpc.aio.Server", _OutlivingServer(guard, options))


def bind(server: grpc.aio.Server, listen: str, tls: TlsSettings, setting: str = "listen") -> str:
    """Bind the address `listen` and return it with the actual port; `dialable` makes of it the one to dial.

    Args:
        server: not started yet.
        listen: HOST:PORT.
        tls: of the server.
        setting: origin of `listen`, for messages.

    Raises:
        SettingsError: a certificate is missing, unreadable or wrong.
        LorreryError: the address cannot be bound.
    """
    credentials = server_credentials(tls)
    _check_free(setting, listen)
    try:
        bound = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        if credentials is not None:  # the address was free a moment ago
            raise SettingsError("server_tls: gRPC does not accept this cert, key and ca") from None
        raise LorreryError(f"{setting}: address {listen} cannot be taken: {error}") from None
    return at_port(listen, bound)


def at_port(listen: str, port: int) -> str:
    """Return the address `listen` with the port that it got in place of 0."""
    return f"{listen.rpartition(':')[0]}:{port}"


def dialable(bound: str) -> str:
    """Return the address to dial from this machine for a bound one: loopback in place of a wildcard."""
    host, _, port = bound.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


def _check_free(setting: str, listen: str) -> None:
    # gRPC's core would log its own lines about an occupied port; testing it first gives one clear message.
    listening_socket(setting, listen).close()


def listening_socket(setting: str, listen: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; `setting`: origin of that address, for messages.

    Raises:
        LorreryError: the address cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise address_error(setting, listen, error) from None
    return listener


class _OutlivingServer(library.Server):
    """The library's server, which outlives calls of methods that it does not have.

    grpcio (1.85) decodes the path of such a call in its serving loop. A path that is no UTF-8 ends the loop, and the
    whole server with it: one call of anybody's. So these calls are answered here, with UNIMPLEMENTED and without their
    path. They are those that match no registered method; a generic handler of the library's has no methods that it
    could be asked for. Options for compression and thread pools are left out.

    Args:
        guard: interceptor of its calls, which counts these.
        options: of the channel.
    """

    def __init__(self, guard: CallGuard, options: Sequence[tuple[str, int]]) -> None:
        self._loop = _core.get_working_loop()
        self._server = _Outliving(self._loop, None, (), [guard], options, None)
        self._server.floods = guard.floods


class _Outliving(_core.AioServer):  # type: ignore[misc]
    floods: Floods

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
            self.floods.call_of_no_method(_core._ServicerContext(call, None, None, loop).peer())
            answer = _core._handle_rpc("", no_methods, (), call, loop, False)
            task = loop.create_task(_core._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICE = "ServerReflection"

SERVICE_NAMES = (f"{_V1}.{_SERVICE}", f"{_V1ALPHA}.{_SERVICE}")


def enable_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Serve the descriptors of the services `names`, of health, and of reflection itself.

    Without the extra `reflection`, its calls end with UNIMPLEMENTED, whose text names the extra.
    """
    handler = _handler([*names, health.SERVICE_NAME, *SERVICE_NAMES]) if has_extra("reflection") else _missing()
    for name in SERVICE_NAMES:
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def _handler(names: Sequence[str]) -> "grpc.RpcMethodHandler[Any, Any]":
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    _add_v1_descriptor()
    servicer = reflection.aio.ReflectionServicer(names, _Pool(names))
    return grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )


def _missing() -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, missing_extra("reflection", "server reflection"))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _add_v1_descriptor() -> None:
    """Add v1 to the descriptor pool that the servicer uses; idempotent."""
    from grpc_reflection.v1alpha import reflection_pb2

    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = file.name.replace("v1alpha", "v1"), _V1
    for message in file.message_type:
        for field in filter(lambda field: field.HasField("type_name"), message.field):
            field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_V1ALPHA, _V1)
        method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


class _Pool:
    """The default descriptor pool, which also finds the files of methods and enum values.

    Args:
        services: their methods, and the enums of their files and of all imports, can be found.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._inner = descriptor_pool.Default()
        self._files: dict[str, FileDescriptor] = {}
        seen: set[str] = set()
        for name in services:
            try:
                service = self._inner.FindServiceByName(name)
            except KeyError:  # one that is served without a descriptor
                continue
            self._files |= {method.full_name: service.file for method in service.methods}
            self._add_enums(service.file, seen)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  what the pool has
        return getattr(self._inner, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802  its name in protobuf
        """Return the file of a symbol.

        Raises:
            KeyError: no such symbol.
        """
        found = self._files.get(symbol)
        return self._inner.FindFileContainingSymbol(symbol) if found is None else found

    def _add_enums(self, file: FileDescriptor, seen: set[str]) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        enums = [*file.enum_types_by_name.values(), *_enums_within(file.message_types_by_name.values())]
        for enum in enums:
            scope = enum.full_name.rpartition(".")[0]  # values are their enum's siblings
            for value in enum.values:
                self._files |= {f"{scope}.{value.name}": file, f"{enum.full_name}.{value.name}": file}
        for imported in file.dependencies:
            self._add_enums(imported, seen)


def _enums_within(messages: Iterable[Descriptor]) -> Iterator[EnumDescriptor]:
    for message in messages:
        yield from message.enum_types
        yield from _enums_within(message.nested_types)
