"""The gRPC server: services, health, reflection, and the bounds of its connections."""

import random
import ssl
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvroute.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from router.api.desk.methods import REPORT, ROUTE
from router.api.service.calls import handlers_of
from router.api.service.fleet_service import FleetService
from router.api.service.grpc_bounds import GRPC_BOUNDS, GrpcBounds
from router.api.service.health_service import HealthService
from router.api.service.prompts_service import PromptsService
from router.api.service.reflection import reflection_handlers
from router.api.service.router_service import RouterService
from router.config.keys import ConfigError
from router.config.settings.serving_settings import GrpcSettings
from router.net.http2.gate import Gate
from router.net.http2.port import ServerBounds
from router.net.http2.server import Http2Server
from router.net.http2.sockets import Bounds
from router.net.keys.certificates import Certificates
from router.net.keys.exposure import split_address
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds

PING_EVERY_S = 10.0
"""Least seconds between two HTTP/2 pings of a client that no answer of a call lies between."""
SERVICES = (
    router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
    prompts_pb2.DESCRIPTOR.services_by_name["Prompts"].full_name,
)


class GrpcServer:
    """The gRPC server with its services, health and reflection."""

    def __init__(
        self,
        settings: GrpcSettings,
        router: RouterService,
        fleet: FleetService,
        *,
        certificates: Certificates | None = None,
        http: HttpBounds | None = None,
        bounds: GrpcBounds = GRPC_BOUNDS,
    ) -> None:
        """certificates: for the TCP port; None: without TLS, as on unix sockets. http: bounds on
        connections; None: the defaults.
        """
        guard = router.guard
        self._settings = settings
        self._server = http2_server(
            settings, guard.limits.largest, certificates, guard, http=http, bounds=bounds
        )
        self._health = HealthService()
        self._draining = False
        feed = fleet.feed
        guard.metrics.follow(
            lambda: guard.in_flight.bytes,
            guard.in_flight.bytes_max,
            lambda: feed.watches,
        )
        services = {
            SERVICES[0]: handlers_of(
                router_pb2_grpc.add_RouterServicer_to_server,
                router,
                raw=("Route", "RouteStream", "Report", "Explain"),
            ),
            SERVICES[1]: handlers_of(fleet_pb2_grpc.add_FleetServicer_to_server, fleet),
            SERVICES[2]: handlers_of(
                prompts_pb2_grpc.add_PromptsServicer_to_server,
                PromptsService(router.texts),
                raw=("Render",),
            ),
            health.SERVICE_NAME: handlers_of(
                health_pb2_grpc.add_HealthServicer_to_server, self._health
            ),
        }
        services |= reflection_handlers(services)
        for service, handlers in services.items():
            guard.add(self._server, service, handlers)

    @property
    def port(self) -> int:
        """The TCP port; 0 until the server listens."""
        return self._server.port

    @property
    def connections(self) -> Connections:
        """The server's connections: the open ones, and counts of closed ones."""
        return self._server.connections

    @property
    def calls(self) -> int:
        """Number of open RPCs."""
        return self._server.calls

    async def start(self) -> None:
        """Listens; raises ConfigError when an address can't be used."""
        settings = self._settings
        address = settings.listen
        self.set_serving(ready=False)
        try:
            await self._server.start(*split_address(address, "grpc.listen"))
            if settings.unix_socket:
                address = settings.unix_socket
                self._server.start_unix(Path(address), int(settings.unix_socket_mode, 8))
        except OSError as error:
            raise ConfigError(f"can't listen on {address}: {error.strerror or error}") from error

    def set_serving(self, *, ready: bool) -> None:
        """Sets the states of the health service: liveness is SERVING while the process runs; all
        others follow `ready`, and stay NOT_SERVING once a drain began.
        """
        ready = ready and not self._draining
        serving = health_pb2.HealthCheckResponse.SERVING
        state = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("liveness", serving)
        for name in ("", "readiness", *SERVICES):
            self._health.set(name, state)

    async def drain(self, grace_s: float) -> None:
        """Sets health to NOT_SERVING, finishes open RPCs within grace_s, then stops."""
        self._draining = True
        self.set_serving(ready=False)
        self._health.end_watches()
        await self._server.stop(grace_s)


def http2_server(
    settings: GrpcSettings,
    bytes_max: int,
    certificates: Certificates | None,
    gate: Gate | None = None,
    *,
    http: HttpBounds | None = None,
    bounds: GrpcBounds = GRPC_BOUNDS,
) -> Http2Server:
    """Makes the configured server, without methods. bytes_max: bytes of the largest message of any
    method. gate: checks calls; None: all are let in. http: bounds on connections; None: the
    defaults.
    """
    contexts = None
    if certificates is not None:
        verify = ssl.CERT_REQUIRED if certificates.asks_callers else ssl.CERT_NONE
        contexts = certificates.contexts(verify, ["h2"])
    most = ServerBounds(
        connection=Bounds(
            streams_max=bounds.streams_max,
            message_max=bytes_max,
            headers_max=bounds.metadata_kib_max * 1024,
            ping_every_s=PING_EVERY_S,
            read_s=bounds.read_timeout_s,
        ),
        port=(http or HttpBounds()).port,
        keepalive_s=bounds.keepalive_s,
        age_s=bounds.age_s,
        age_grace_s=bounds.age_grace_s,
    )
    return Http2Server(
        most,
        rng=random.Random(),
        at_once=(ROUTE, REPORT),
        tls=lambda: None if contexts is None else contexts.now,
        allows_plain=contexts is None,
        gate=gate,
    )
