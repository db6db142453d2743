"""An endpoint picker on loopback, before a real router and workers that the test plays."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from events.plane.clock import unix_now
from kvroute.client import KvRouteClient
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.config.settings.picker_settings import PickerSettings
from router.fleet.reservations.reservations import Ending
from router.gateway.picker.calls import PROCESS
from router.gateway.picker.server import CONNECTION_AGE_S, KEEPALIVE_S, PickerServer
from router.net.keys.certificates import Certificates
from router.net.listener.http_bounds import HttpBounds
from router.observe.tracing.spans import Tracing
from router.request.tokens import ModelPrompts, Source
from tests.stage.gateway import Worker
from tests.stage.request_settings import taken_from
from tests.stage.served import Served, served
from tests.stage.waiting import until

DUPLEX = pb.ProtocolConfiguration(
    request_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
    response_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
)


def process_of(channel: grpc.aio.Channel) -> Any:
    """The method of ext_proc on a channel of grpc's own client; each of its calls is a stream."""
    return channel.stream_stream(
        PROCESS,
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )


@dataclass
class Stage:
    """What a test plays on."""

    served: Served
    picker: PickerServer
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    workers: tuple[Worker, ...] = ()

    @property
    def endings(self) -> dict[Ending, int]:
        return {ending: n for ending, n in self.served.fleet.core.endings.items() if n}

    @property
    def open(self) -> int:
        """Reservations in the router."""
        return len(self.served.fleet.core.reservations)

    def sample(self, family: str, **labels: str) -> float:
        return self.registry.get_sample_value(family, labels) or 0.0

    async def counted(self, family: str, count: int = 1, **labels: str) -> None:
        """Until a counter is that: a stream may be over a little later than its reservation."""
        await until(lambda: self.sample(family, **labels) == count, f"{family} {labels}: {count}")

    async def until_open(self, count: int) -> None:
        """Until so many requests are under way in the picker."""
        await until(
            lambda: self.sample("kvroute_open_requests", program="picker") == count,
            f"{count} requests are open",
        )

    async def sent(self, *messages: pb.ProcessingRequest) -> Any:
        """A stream to which these messages were written."""
        call = self.call()
        for message in messages:
            await call.write(message)
        return call

    def call(self) -> Any:
        """A stream of ext_proc, by grpc's own client."""
        return process_of(self.channel)()

    async def idle(self) -> None:
        """Until nothing is reserved."""
        await until(lambda: self.open == 0, "no reservation is open")


@asynccontextmanager
async def a_picker(
    *workers: Worker,
    certificates: Certificates | None = None,
    in_process: bool = False,
    tracing: Tracing | None = None,
    http: HttpBounds | None = None,
    keepalive_s: float = KEEPALIVE_S,
    connection_age_s: float = CONNECTION_AGE_S,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A picker before a fleet of these workers, w0, w1 ...; the tests add others."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.run())
        # Workers here answer each request as the test says, so that no router may ask for tokens.
        without_tokens = {"m": ModelPrompts(source=Source.OFF)}
        router = await stack.enter_async_context(
            served(models_prompts=without_tokens, tracing=tracing)
        )
        for number, worker in enumerate(workers):
            router.fleet.add(f"w{number}", address=worker.address)
        broken: list[BaseException] = []
        registry = CollectorRegistry()
        more = {"listen": "127.0.0.1:0", "accept_after_stop_s": 0.05, **settings}
        requests = taken_from(more)
        picker = PickerServer(
            PickerSettings(**more),
            router.local() if in_process else KvRouteClient(f"127.0.0.1:{router.server.port}"),
            registry,
            clock=unix_now,
            broke=broken.append,
            bounds=http or HttpBounds(),
            keepalive_s=keepalive_s,
            connection_age_s=connection_age_s,
            certificates=certificates,
            tracing=tracing,
            requests=requests,
        )
        await picker.start()
        stack.push_async_callback(picker.stop)
        await until(lambda: picker.ready or not workers, "the picker knows a worker")
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}")
        await stack.enter_async_context(channel)
        yield Stage(router, picker, registry, channel, workers)
        await channel.close()
        assert not broken


def request_headers(path: str, *, last: bool = False, **more: str) -> pb.ProcessingRequest:
    """The first message of a stream in full duplex."""
    headers = {":method": "GET" if last else "POST", ":path": path, ":authority": "openai"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map(headers), end_of_stream=last),
        protocol_config=DUPLEX,
    )


def header_map(headers: dict[str, str]) -> pb.HeaderMap:
    """Headers as Envoy writes them."""
    return pb.HeaderMap(
        headers=[
            pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()
        ]
    )


def request_body(body: bytes, *, last: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=last))


def response_headers(
    status: int = 200,
    content_type: str = "text/event-stream",
    *,
    last: bool = False,
    served: str = "",
) -> pb.ProcessingRequest:
    headers = header_map({":status": str(status), "content-type": content_type})
    message = pb.ProcessingRequest(
        response_headers=pb.HttpHeaders(headers=headers, end_of_stream=last)
    )
    if served:
        named = message.metadata_context.filter_metadata["envoy.lb"]
        named.update({"x-gateway-destination-endpoint-served": served})
    return message


def response_body(body: bytes, *, last: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=last))


def picked(message: pb.ProcessingResponse, *, with_body: bool = False) -> str:
    """The endpoint in an answer; it must be in the header and in the metadata."""
    common = (message.request_body if with_body else message.request_headers).response
    named = [each.header for each in common.header_mutation.set_headers]
    endpoints = [
        each.raw_value.decode() for each in named if each.key == "x-gateway-destination-endpoint"
    ]
    assert len(endpoints) == 1
    metadata = message.dynamic_metadata["envoy.lb"]
    assert metadata["x-gateway-destination-endpoint"] == endpoints[0]
    return endpoints[0]
