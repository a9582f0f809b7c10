"""Server reflection, in both versions that clients ask for: grpc.reflection.v1 and v1alpha.

The two have the same messages under two package names, hence the same bytes on the wire. grpcio-reflection offers
v1alpha only. So its servicer answers for both, and the descriptor of v1, which clients may ask for, is v1alpha's under
the other name.
"""

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICE = "ServerReflection"

SERVICE_NAMES = (f"{_V1}.{_SERVICE}", f"{_V1ALPHA}.{_SERVICE}")


def enable_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Let clients ask for the descriptors of the services `names`, of health, and of reflection itself."""
    _add_v1_descriptor()
    servicer = reflection.aio.ReflectionServicer([*names, health.SERVICE_NAME, *SERVICE_NAMES])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods) for name in SERVICE_NAMES])


def _add_v1_descriptor() -> None:
    """Make v1 known to the descriptor pool from which the servicer answers; a second time changes nothing."""
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
