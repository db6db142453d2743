"""A gateway put together: client, workers' connections, roster, HTTP server."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from events.plane.tasks import Tasks
from kvroute.client import KvRouteClient
from router.config.gateway_settings import GatewaySettings
from router.front.gateway.counters import ClientCollector, GatewayCounters
from router.front.gateway.forwarding import Forwarder
from router.front.gateway.roster import Roster
from router.front.gateway.server import GatewayServer
from router.front.gateway.upstreams import Upstreams
from router.keys.certificates import Certificates
from router.keys.followed import Followed


class Gateway:
    """One gateway, in a process of its own or beside a router."""

    def __init__(
        self,
        settings: GatewaySettings,
        routers: Sequence[str],
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        broke: Callable[[BaseException], None],
        certificates: Certificates | None = None,
    ) -> None:
        """routers: gRPC targets. clock: Unix time. broke: takes a fault of the gateway's own tasks.
        certificates: for HTTPS. Raises ConfigError or ValueError for an address that is none."""
        tls, keyed, self._followed = None, False, Followed()
        if certificates is not None:
            keyed = certificates.asks_callers
            self._followed.add("certificates", certificates)
            tls = certificates.context(ssl.CERT_REQUIRED if keyed else ssl.CERT_NONE)
        self._settings = settings
        self.client = KvRouteClient(routers)
        self._upstreams = Upstreams(settings)
        self.roster = Roster(self.client, clock)
        self.counters = GatewayCounters(registry)
        registry.register(ClientCollector(lambda: self.client.counts))
        self._tasks = Tasks(broke)
        forwarder = Forwarder(
            self.client,
            self._upstreams,
            self.roster,
            self.counters,
            settings,
            lambda report: self._tasks.spawn(report, "report of a first token"),
        )
        self.server = GatewayServer(
            settings, forwarder, self.roster, self.counters, tls=tls, keyed=keyed
        )
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        return self.server.port

    async def start(self) -> None:
        """Listens; raises ConfigError when the address can't be had. Doesn't wait for routers."""
        await self._stack.enter_async_context(self.client)
        await self._stack.enter_async_context(self._upstreams)
        await self.server.start()
        self._tasks.spawn(self.roster.keep(), "list of workers")
        self._tasks.spawn(self._followed.run(), "files of keys")

    async def stop(self) -> None:
        """Ends after the open requests, or after gateway.drain_timeout_s."""
        try:
            await self.server.stop(self._settings.drain_timeout_s)
            await self._tasks.close()
        finally:
            await asyncio.shield(self._stack.aclose())
