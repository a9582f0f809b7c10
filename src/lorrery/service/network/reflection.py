"""Server reflection, in both versions that clients use: grpc.reflection.v1 and v1alpha.

Both have the same messages under two package names, hence the same bytes on the wire. grpcio-reflection offers v1alpha
only. So its servicer serves both, and the descriptor of v1, which clients may request, is v1alpha's under the other
name. Its pool finds files by messages, fields and services; here also by methods and enum values.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from grpc_health.v1 import health

from lorrery.service.installed import has_extra, missing_extra

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
