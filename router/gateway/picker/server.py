"""Assembles, starts and stops a picker: its client, endpoints and connections.

At SIGTERM health says NOT_SERVING at once, new requests are taken a while longer, then Envoys get a
GOAWAY, streams without a request end, and open answers run to their end: a picker that closes its
port with answers under way would cut them, whatever Envoy's failure mode is.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import CollectorRegistry

from events.plane.tasks import Tasks
from router.config.keys import ConfigError
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.picker.asking import PickerAsking
from router.gateway.picker.calls import Calls, Health
from router.gateway.picker.counters import PickerCounters
from router.gateway.picker.endpoints import Endpoints
from router.gateway.picker.picks import Picker
from router.gateway.routers import Router
from router.gateway.server.roster import Roster
from router.net.http2.port import Http2Port, ServerBounds
from router.net.http2.sockets import Bounds, Http2Protocol
from router.net.keys.certificates import Certificates, Contexts
from router.net.keys.exposure import split_address
from router.net.keys.followed import Followed
from router.net.listener.connections import Connections
from router.net.listener.http_bounds import HttpBounds
from router.observe.tracing.gateway_trace import GatewayTrace
from router.observe.tracing.spans import Tracing

STREAMS_MAX = 40_000
"""Most open requests of a connection: Envoy may send all of a fleet's over one connection."""
KEEPALIVE_S = 60.0
"""Seconds of silence after which Envoy gets a keepalive ping."""
CONNECTION_AGE_S = 300.0
"""Seconds after which a connection is closed, after its last request, so that Envoys spread over
pickers again; as those of gRPC (router/api/service/grpc_bounds.py)."""

log = logging.getLogger("kvroute.picker")


class PickerServer:
    """One picker, in a process of its own or beside a router."""

    def __init__(
        self,
        settings: PickerSettings,
        router: Router,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        broke: Callable[[BaseException], None],
        bounds: HttpBounds,
        keepalive_s: float = KEEPALIVE_S,
        connection_age_s: float = CONNECTION_AGE_S,
        certificates: Certificates | None = None,
        tracing: Tracing | None = None,
        requests: RequestSettings | None = None,
    ) -> None:
        """router: entered by start(), and left by stop(). clock: Unix time. broke: called with an
        error of the picker's own tasks. bounds: on connections. keepalive_s, connection_age_s: see
        KEEPALIVE_S, CONNECTION_AGE_S. certificates: for connections with TLS. tracing: makes
        requests' spans; None: no spans. requests: their settings; None: the defaults. Raises
        ConfigError for an invalid address, or for picker.tls without its certificates.
        """
        self._followed = Followed()
        if certificates is not None:
            self._followed.add("certificates", certificates)
        self._settings = settings
        self._requests = requests or RequestSettings()
        self._head_timeout_s = bounds.head_timeout_s
        self._address = split_address(settings.listen)
        self._tls = _context(settings, certificates)
        self.client = router
        self.roster = Roster(self.client, clock)
        self.counters = PickerCounters(registry)
        self._tasks = Tasks(broke)
        self._health = Health()
        self._leaving = False
        self._port = Http2Port(
            "picker",
            self._calls,
            ServerBounds(
                connection=Bounds(STREAMS_MAX),
                port=bounds.port,
                keepalive_s=keepalive_s,
                age_s=connection_age_s,
            ),
            rng=random.Random(),
            tls=lambda: None if self._tls is None else self._tls.now,
            allows_plain=settings.tls == "optional",
            came=lambda kind: self.counters.connections.labels(kind).inc(),
        )
        self._picker: Picker | None = None
        self._begin_trace = None if tracing is None else partial(GatewayTrace.begin, tracing, clock)
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        return self._port.port

    @property
    def connections(self) -> Connections:
        """The picker's connections: the open ones, and counts of closed ones."""
        return self._port.connections

    @property
    def ready(self) -> bool:
        """Whether some worker can be picked, which the health service answers."""
        return self._health.serving

    async def start(self) -> None:
        """Starts to listen, without any router; raises ConfigError if the address can't be used."""
        await self._stack.enter_async_context(self.client)
        endpoints = Endpoints(self.roster)
        self._picker = Picker(
            PickerAsking(
                self.client,
                self.roster,
                endpoints,
                self.counters,
                self._settings,
                self._requests,
            ),
            endpoints,
            self.counters,
            self._settings,
            self._requests,
            lambda work: self._tasks.spawn_task(work, "pick"),
            self._begin_trace,
            head_timeout_s=self._head_timeout_s,
        )
        try:
            await self._port.start(*self._address)
        except OSError as error:
            await self._stack.aclose()
            raise ConfigError(
                f"can't serve Envoy on {self._settings.listen}: {error.strerror}"
                " - at `$.picker.listen`"
            ) from error
        self._tasks.spawn(endpoints.keep(), "list of endpoints")
        self._tasks.spawn(endpoints.keep_names(), "names of workers")
        self._tasks.spawn(self._followed.run(), "files of keys")
        self._tasks.spawn(self._keep_health(), "health of the picker")

    async def stop(self) -> None:
        """Stops after the open requests, or after requests.drain_timeout_s."""
        self._leaving = True
        self._health.set(serving=False)
        picker = self._picker
        try:
            if picker is not None:
                await self._drain(picker)
        finally:
            await self._port.stop_accepting()
            self._port.close()
            await self._tasks.close()
            await asyncio.shield(self._stack.aclose())

    async def _drain(self, picker: Picker) -> None:
        if self._port.open:
            await asyncio.sleep(self._requests.accept_after_stop_s)
        self._port.go_away(last=False)
        try:
            async with asyncio.timeout(self._requests.drain_timeout_s):
                await picker.end_idle()
                await picker.idle.wait()
                await picker.end_idle()
                await self._port.until_read()
        except TimeoutError:
            words = "%d requests are still open, or their answers are not read, and are cut"
            log.warning(words, picker.open)
        self._port.go_away(last=True)

    async def _keep_health(self) -> None:
        """Keeps health at SERVING while some worker can be picked, until the picker stops."""
        while not self._leaving:
            self._health.set(serving=self.roster.ready)
            await asyncio.sleep(0.1 if not self.roster.ready else 1.0)

    def _calls(self, protocol: Http2Protocol) -> Calls:
        picker = self._picker
        assert picker is not None  # it is set before the first connection comes
        return Calls(protocol, picker, self._health)


def _context(settings: PickerSettings, certificates: Certificates | None) -> Contexts | None:
    """TLS contexts of the picker's port; None: no TLS. Raises ConfigError."""
    mutual = settings.tls == "mutual"
    if mutual and (certificates is None or not certificates.asks_callers):
        raise ConfigError("mutual TLS needs tls.client_ca_file - at `$.picker.tls`")
    if certificates is None:
        if settings.tls != "optional":
            raise ConfigError("server TLS needs tls.certificate_file - at `$.picker.tls`")
        return None
    verify = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
    return certificates.contexts(verify, ["h2"])
