"""The service grpc.reflection as v1 and as v1alpha, which have equal messages; grpcio's package has
v1alpha alone."""

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from router.api.service.calls import handlers_of
from router.net.http2.calls import Handler

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


class Described:
    """The default pool of descriptors, in which the name of a method also leads to its file."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """The descriptor of the file that declares a symbol, also of a method; raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def reflection_handlers(services: Iterable[str]) -> dict[str, dict[str, Handler]]:
    """Handlers of the reflection services, by service and method. services: names of all other
    services.
    """
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, V1, V1ALPHA), Described())
    handlers = handlers_of(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, servicer)
    return {V1: handlers, V1ALPHA: handlers}


def _describe_v1() -> None:
    """Adds the description of v1 to the pool in which reflection looks up names."""
    proto = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    text = text_format.MessageToString(proto).replace("v1alpha", "v1")
    proto = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(proto.SerializeToString())
