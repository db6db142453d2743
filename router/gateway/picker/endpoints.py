"""Workers by endpoint, the `ip:port` by which Envoy knows them.

Law: an old list stays while no router answers, and an old address while its name can't be resolved.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from kvroute.v1 import WorkerStatus
from router.gateway.server.roster import WORKER_S, Roster

REFRESH_S = 1.0
"""Least seconds from one list of workers to the next."""
RESOLVED_S = 30.0
"""Seconds for which a host name's address is used before the name is resolved again."""
NAMES_MAX = 4096
"""Most host names whose addresses are remembered; the one resolved longest ago is forgotten."""

log = logging.getLogger("kvroute.picker")


class Endpoints:
    """Endpoints of the workers in the last list."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._addresses: dict[tuple[str, int], tuple[str, float]] = {}
        """Host and port -> endpoint, and when it was resolved."""
        self._workers: dict[str, list[str]] = {}
        """Endpoint -> ids of its workers: several for an engine with ranks behind one port."""
        self._loads: dict[str, float] = {}
        """Endpoint that may be picked -> its requests: those in the last list, and those that
        least_loaded has sent there since."""

    async def keep(self) -> None:
        """Lists the workers repeatedly, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(max(REFRESH_S, WORKER_S * len(self._roster.workers)))

    async def refresh(self) -> None:
        """Gets a list of workers from a router; if no router answers, the last list stays."""
        await self._roster.refresh()
        if self._roster.listed:
            await self.use(self._roster.workers)

    async def use(self, workers: Iterable[WorkerStatus]) -> None:
        """Replaces the list of workers."""
        ids: dict[str, list[str]] = {}
        loads: dict[str, float] = {}
        for each in workers:
            endpoint = await self.of(each.address)
            if not endpoint:
                continue
            ids.setdefault(endpoint, []).append(each.worker_id)
            if each.schedulable or each.last_resort:
                in_use = each.running + each.waiting + each.reserved + each.reserved_by_replicas
                loads[endpoint] = loads.get(endpoint, 0.0) + in_use
        self._workers, self._loads = ids, loads

    async def of(self, address: str) -> str:
        """The endpoint, such as 10.0.0.3:8000, of a worker's address; empty: the address's host
        name can't be resolved, or it is no address."""
        try:
            parts = urlsplit(address if "//" in address else f"//{address}")
            host, port = parts.hostname, parts.port
        except ValueError:
            return ""
        if not host:
            return ""
        port = port or (443 if parts.scheme == "https" else 80)
        try:
            return _endpoint(str(ipaddress.ip_address(host)), port)
        except ValueError:
            return await self._resolved(host, port)

    def worker_at(self, endpoint: str) -> str | None:
        """Id of a worker at an endpoint, any of several; None: there is none."""
        ids = self._workers.get(endpoint)
        return ids[0] if ids else None

    def among(self, subset: frozenset[str]) -> tuple[str, ...]:
        """Ids of the workers whose endpoint, or whose IP address alone, is in the subset."""
        return tuple(
            worker_id
            for endpoint, ids in self._workers.items()
            if _is_named(endpoint, subset)
            for worker_id in ids
        )

    def least_loaded(self, subset: frozenset[str] | None) -> str:
        """The endpoint with the fewest requests, to which one is added; empty: none may be picked.
        subset: endpoints or IP addresses that Envoy allows; None: all.
        """
        loads = self._loads
        able = [each for each in loads if subset is None or _is_named(each, subset)]
        if not able:
            return ""
        best = min(able, key=loads.__getitem__)
        loads[best] += 1.0
        return best

    async def _resolved(self, host: str, port: int) -> str:
        known = self._addresses.get((host, port))
        now_s = self._clock()
        if known is not None and now_s < known[1] + RESOLVED_S:
            return known[0]
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # Unicode: a label of a wrong length
            log.warning("the host name %r of a worker can't be resolved: %s", host, error)
            return known[0] if known is not None else ""
        endpoint = _endpoint(str(infos[0][4][0]), port)
        self._addresses.pop((host, port), None)
        self._addresses[host, port] = endpoint, now_s
        if len(self._addresses) > NAMES_MAX:
            del self._addresses[next(iter(self._addresses))]
        return endpoint


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_named(endpoint: str, subset: frozenset[str]) -> bool:
    return endpoint in subset or endpoint.rpartition(":")[0].strip("[]") in subset
