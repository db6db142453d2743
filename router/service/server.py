"""The gRPC server: services, health, reflection, and the bounds of its connections."""

import asyncio
import os
import random
import ssl
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import (
    add_ServerReflectionServicer_to_server as add_reflection,
)

from kvroute.v1 import (
    fleet_pb2,
    prompts_pb2,
    prompts_pb2_grpc,
    router_pb2,
)
from router.config.keys import ConfigError
from router.config.settings.serving_settings import GrpcSettings
from router.desk.methods import REPORT, ROUTE
from router.http2.fast_server import FastServer
from router.http2.gate import Gate
from router.http2.port import ServerBounds
from router.http2.sockets import Bounds
from router.keys.certificates import Certificates
from router.keys.exposure import UNIX, split_address
from router.listener.connections import PortBounds
from router.service.calls import Collected, Handler
from router.service.credentials import server_credentials
from router.service.fleet_service import FleetService, fleet_handlers
from router.service.health_service import HealthService
from router.service.prompts_service import PromptsService
from router.service.router_service import RouterService, byte_handlers

KEEPALIVE_TIMEOUT_S = 20.0
"""What a client has to answer a ping."""
ANSWER_BYTES_MAX = 64 << 20
PING_EVERY_S = 10.0
"""Between two pings of a client, where no answer of a call is between them."""
PING_STRIKES_MAX = 2
"""Pings that come too early, before their connection is closed."""
SERVICES = (
    router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
    prompts_pb2.DESCRIPTOR.services_by_name["Prompts"].full_name,
)


class GrpcServer:
    """The server with its services, health and reflection."""

    def __init__(
        self,
        settings: GrpcSettings,
        router: RouterService,
        fleet: FleetService,
        *,
        certificates: Certificates | None = None,
    ) -> None:
        """certificates: of the TCP port; None: plain text, as on unix sockets."""
        self._certificates = certificates
        options = server_options(settings, router.guard.limits.largest)
        self._server = grpc.aio.server(options=options)
        self._settings = settings
        self._health = HealthService()
        self._draining = False
        self.port = 0
        guard = self._guard = router.guard
        feed = fleet.feed
        guard.metrics.follow(
            lambda: guard.in_flight.bytes,
            guard.in_flight.bytes_max,
            lambda: feed.watches,
        )
        self.fast: FastServer | None = None
        """The second server, if it is configured."""
        servers: list[Any] = [self._server]
        if settings.fast_listen:
            largest = guard.limits.largest
            self.fast = _fast_server(settings, largest, certificates, guard)
            servers.append(self.fast)
        for server in servers:
            guard.add(server, SERVICES[0], byte_handlers(router))
            guard.add(server, SERVICES[1], fleet_handlers(fleet))
            guard.add(server, SERVICES[2], prompts_handlers(PromptsService(router.texts)))
            others = guard.registrar(server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
            if settings.reflection:
                names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
                add_reflection(ReflectionServicer(names), others)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        """Listens; raises ConfigError when an address can't be had."""
        self.port = self._listen(self._settings.listen)
        if self._settings.unix_socket:
            self._listen_on(
                Path(self._settings.unix_socket), int(self._settings.unix_socket_mode, 8)
            )
        self.set_serving(ready=False)
        await self._server.start()
        if self.fast is not None and self._settings.fast_listen:
            await self._start_fast(self.fast, self._settings.fast_listen)

    def set_serving(self, *, ready: bool) -> None:
        """Liveness is always SERVING while we run; all else follows readiness, never after a drain
        began."""
        ready = ready and not self._draining
        serving = health_pb2.HealthCheckResponse.SERVING
        state = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("liveness", serving)
        for name in ("", "readiness", *SERVICES):
            self._health.set(name, state)

    async def drain(self, grace_s: float) -> None:
        """Says NOT_SERVING, finishes what is in flight, then stops."""
        self._draining = True
        self.set_serving(ready=False)
        self._health.end_watches()
        await self._guard.stop()
        if self.fast is None:
            await self._server.stop(grace_s)
        else:
            await asyncio.gather(self._server.stop(grace_s), self.fast.stop(grace_s))

    async def _start_fast(self, server: FastServer, address: str) -> None:
        try:
            await server.start(*split_address(address))
        except OSError as error:
            raise ConfigError(
                f"can't listen on {address}: {error.strerror} - at `$.grpc.fast_listen`"
            ) from error

    def _listen_on(self, unix_socket: Path, mode: int) -> None:
        """Listens on a unix socket, whose file has the permissions from the first moment; raises
        ConfigError."""
        before = os.umask(0o777 & ~mode)
        try:
            self._listen(f"unix:{unix_socket}")
        finally:
            os.umask(before)

    def _listen(self, address: str) -> int:
        try:
            if self._certificates is None or address.startswith(UNIX):
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(self._certificates))
        except RuntimeError as error:
            raise ConfigError(f"can't listen on {address}: is something else there?") from error


def prompts_handlers(prompts: PromptsService) -> dict[str, Handler]:
    """Prompts' methods; a prompt that is rendered comes and goes as bytes."""
    collected = Collected()
    prompts_pb2_grpc.add_PromptsServicer_to_server(prompts, cast("grpc.aio.Server", collected))
    return collected.handlers | {"Render": grpc.unary_unary_rpc_method_handler(prompts.Render)}


def _fast_server(
    settings: GrpcSettings,
    bytes_max: int,
    certificates: Certificates | None,
    gate: Gate | None = None,
) -> FastServer:
    """With the bounds of the other server. bytes_max: of the largest message of any method. gate:
    lets calls in; None: all."""
    contexts = None
    if certificates is not None:
        verify = ssl.CERT_REQUIRED if certificates.asks_callers else ssl.CERT_NONE
        contexts = certificates.contexts(verify, ["h2"])
    bounds = ServerBounds(
        connection=Bounds(
            streams_max=settings.streams_max,
            message_max=bytes_max,
            headers_max=settings.metadata_kib_max * 1024,
            ping_every_s=PING_EVERY_S,
            read_s=settings.read_timeout_s,
        ),
        port=PortBounds(
            settings.connections_max,
            settings.address_connections_max,
            settings.handshake_timeout_s,
        ),
        keepalive_s=settings.keepalive_s,
        age_s=settings.max_connection_age_s,
        age_grace_s=settings.max_connection_age_grace_s,
    )
    return FastServer(
        bounds,
        rng=random.Random(),
        at_once=(ROUTE, REPORT),
        tls=lambda: None if contexts is None else contexts.now,
        allows_plain=contexts is None,
        gate=gate,
    )


def server_options(settings: GrpcSettings, bytes_max: int) -> list[tuple[str, int]]:
    """gRPC's channel arguments. bytes_max: of the largest message that any method takes."""
    options = [
        ("grpc.so_reuseport", 0),  # a second server on the port fails, and loudly
        ("grpc.max_receive_message_length", bytes_max),
        ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
        # A client that vanished without a word is noticed, though its stream says nothing.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(PING_EVERY_S)),
        ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
        ("grpc.max_concurrent_streams", settings.streams_max),
        ("grpc.max_allowed_incoming_connections", settings.connections_max),
        ("grpc.max_metadata_size", settings.metadata_kib_max * 1024),
        ("grpc.absolute_max_metadata_size", settings.metadata_kib_max * 1024),
        ("grpc.server_handshake_timeout_ms", _milliseconds(settings.handshake_timeout_s)),
    ]
    if settings.max_connection_age_s is not None:
        grace_s = settings.max_connection_age_grace_s
        options += [  # gRPC itself makes the age a tenth longer or shorter
            ("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(grace_s)),
        ]
    return options


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
