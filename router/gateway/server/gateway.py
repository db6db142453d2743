"""Assembles, starts and stops a gateway: its client, connections, roster and HTTP server."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import CollectorRegistry

from events.plane.tasks import Tasks
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import EnginesSettings
from router.config.settings.request_settings import RequestSettings
from router.gateway.routers import Router
from router.gateway.server.asking import Asking
from router.gateway.server.counters import GatewayCounters, client_metrics
from router.gateway.server.forwarding import Forwarder
from router.gateway.server.roster import Roster
from router.gateway.server.server import GatewayServer
from router.gateway.server.silent_workers import SilentWorkers
from router.gateway.server.upstreams import Upstreams
from router.net.keys.certificates import Certificates
from router.net.keys.door import Door
from router.net.keys.engine_accesses import EngineAccesses
from router.net.keys.followed import Followed
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.families import export
from router.observe.metrics.of_keys import key_metrics
from router.observe.tracing.gateway_trace import GatewayTrace
from router.observe.tracing.spans import Tracing


class Gateway:
    """One gateway, in a process of its own or beside a router."""

    def __init__(
        self,
        settings: GatewaySettings,
        router: Router,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        broke: Callable[[BaseException], None],
        bounds: HttpBounds | None = None,
        certificates: Certificates | None = None,
        door: Door | None = None,
        tracing: Tracing | None = None,
        accesses: EngineAccesses | None = None,
        requests: RequestSettings | None = None,
    ) -> None:
        """router: entered by start(), and left by stop(). clock: Unix time. broke: called with an
        error of the gateway's own tasks. bounds: on connections; None: the defaults. certificates:
        for HTTPS; None: HTTP. door: checks clients' keys; None: they need none. tracing: makes
        requests' spans; None: no spans. accesses: credentials for workers; None: those of the
        settings. requests: their settings; None: the defaults. Raises ConfigError for an invalid
        address.
        """
        tls, self._followed, self._door = None, Followed(), door
        if certificates is not None:
            self._followed.add("certificates", certificates)
            tls = certificates.contexts(_verify(certificates, door))
        if door is not None:
            door.follow(self._followed)
        accesses = accesses or EngineAccesses.of(EnginesSettings(), settings)
        self._followed.add("engine_key", accesses)
        export(registry, key_metrics, self._followed, door)
        self._requests = requests = requests or RequestSettings()
        self.client = router
        self._upstreams = Upstreams(settings)
        self.roster = Roster(self.client, clock)
        self.counters = GatewayCounters(registry)
        export(registry, client_metrics, lambda: self.client.counts)
        self.silent = SilentWorkers(router, self._upstreams, self.roster, self.counters)
        self._tasks = Tasks(broke)
        forwarder = Forwarder(
            Asking(self.client, self.roster, self.counters, requests),
            self._upstreams,
            self.counters,
            settings,
            accesses,
            lambda report: self._tasks.spawn(report, "report of a first token"),
        )
        self.server = GatewayServer(
            settings,
            requests,
            forwarder,
            self.roster,
            self.counters,
            bounds=bounds or HttpBounds(),
            tls=tls,
            door=door,
            begin_trace=None if tracing is None else partial(GatewayTrace.begin, tracing, clock),
        )
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        return self.server.port

    async def start(self) -> None:
        """Starts to listen, without any router; raises ConfigError if the address can't be used."""
        await self._stack.enter_async_context(self.client)
        await self._stack.enter_async_context(self._upstreams)
        await self.server.start()
        self._tasks.spawn(self.roster.keep(), "list of workers")
        self._tasks.spawn(self.silent.keep(), "silent workers")
        self._tasks.spawn(self._followed.run(), "files of keys")
        if self._door is not None:
            self._tasks.spawn(self._door.run(), "keys of issuers")

    async def stop(self) -> None:
        """Stops after the open requests, or after requests.drain_timeout_s."""
        try:
            await self.server.stop(self._requests.drain_timeout_s)
            await self._tasks.close()
        finally:
            await asyncio.shield(self._stack.aclose())


def _verify(certificates: Certificates, door: Door | None) -> ssl.VerifyMode:
    """Whether clients need a certificate; where tokens are checked, a token may replace it."""
    if not certificates.asks_callers:
        return ssl.CERT_NONE
    return ssl.CERT_OPTIONAL if door is not None and door.takes_tokens else ssl.CERT_REQUIRED
