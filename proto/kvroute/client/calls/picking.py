"""Route: over the stream or as a call, and by the fallback when no router answers."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from kvroute.client.connections.line import Line
from kvroute.client.connections.transport import Transport
from kvroute.client.errors import KvRouteError, NoWorker, RouterUnreachable, Unavailable
from kvroute.client.fallback.fallback import Fallback
from kvroute.client.fallback.takeover import Takeover
from kvroute.client.messages.options import OnQueued, RouteBytes
from kvroute.client.messages.pick import Pick
from kvroute.v1 import ListWorkersRequest, RouteResponse

MOVED_S_MIN = 0.1
"""Least time, in seconds, that a request waited at routers which ended, for it to be sent to the
next router: a shorter wait earns no place in the queue there."""

log = logging.getLogger("kvroute.client")


class Picker:
    """The picks of one client. Lists the workers now and then, for the fallback."""

    def __init__(self, transport: Transport, takeover: Takeover) -> None:
        self._transport = transport
        self._takeover = takeover
        self.listing: asyncio.Task[None] | None = None
        """The open ListWorkers call; None: no call is open."""

    async def close(self) -> None:
        """Ends an open ListWorkers call."""
        if self.listing is not None:
            self.listing.cancel()
            await asyncio.wait({self.listing})

    async def pick(
        self,
        request: RouteBytes,
        timeout_s: float | None,
        is_final: Callable[[KvRouteError], bool] | None = None,
        on_queued: OnQueued | None = None,
    ) -> Pick:
        """Picks a worker, by a router or the fallback; raises KvRouteError. is_final: errors that
        get no further attempt. on_queued: see KvRouteClient.route."""
        picked: list[Pick] = []
        waited_s, clock = 0.0, self._transport.clock

        async def attempt(line: Line, left_s: float) -> RouteResponse:
            nonlocal waited_s
            asked_s = clock()
            try:
                is_moved = waited_s >= MOVED_S_MIN
                sent = request.waited(waited_s) if is_moved else request
                return await self._route(line, sent, left_s, on_queued)
            except (Unavailable, grpc.aio.AioRpcError, asyncio.CancelledError):
                waited_s += clock() - asked_s  # perhaps in the queue of a router that is gone
                raise

        def ends(error: KvRouteError) -> bool:
            if is_final is not None and is_final(error):
                return True
            takeover = self._takeover
            if takeover.ends_retries(error) and (pick := takeover.pick(request, error)) is not None:
                picked.append(pick)
            return bool(picked)

        transport = self._transport
        try:
            response = await transport.call(
                attempt,
                timeout_s,
                transport.retry,
                is_final=ends,
                line_wait_s=self._takeover.line_wait_s(),
            )
        except (RouterUnreachable, NoWorker) as error:
            pick = picked[0] if picked else self._takeover.pick(request, error)
            if pick is None:
                raise
            return pick
        fallback = self._takeover.fallback
        if self._takeover.routed() and fallback is not None and self.listing is None:
            self.listing = asyncio.create_task(self._list(fallback))
        return Pick(request.request_id, response)

    async def _route(
        self, line: Line, request: RouteBytes, left_s: float, on_queued: OnQueued | None
    ) -> RouteResponse:
        """One attempt to route a request over one line; raises KvRouteError or AioRpcError."""
        if line.watch.silent and self._takeover.replaces_silent():
            await asyncio.sleep(0)  # a caller in a loop leaves the health checks their turn
            raise line.silence()
        response = await line.route(request, left_s, on_queued)
        self._transport.open().reserved(line, response.reservation_id)
        return response

    async def _list(self, fallback: Fallback) -> None:
        """Lists the workers, and gives the list to the fallback."""
        transport = self._transport
        try:
            message = ListWorkersRequest()
            response = await transport.command(lambda line: line.fleet.ListWorkers, message, None)
            fallback.listed(response.workers, transport.clock())
        except Exception as error:  # whatever its cause, requests go on with the list at hand
            fallback.not_listed(transport.clock())
            log.info("the workers could not be listed, which a fallback needs: %s", error)
        finally:
            self.listing = None
