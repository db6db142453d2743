"""Workers by endpoint, the `ip:port` by which Envoy knows them.

Laws:
- an old list stays while no router answers, and an old address while its name can't be resolved;
- a pick and the list wait for a name's first lookup alone: later ones are made one after another,
  beside them, so that a name server that does not answer holds nothing up.
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
"""Most host names whose addresses are remembered; the one looked up longest ago is forgotten."""

log = logging.getLogger("kvroute.picker")
_Name = tuple[str, int]
"""A host name and a port."""


class Endpoints:
    """Endpoints of the workers in the last list."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._addresses: dict[_Name, tuple[str, float]] = {}
        """Name -> endpoint, empty while it can't be resolved, and when it was looked up."""
        self._turn = asyncio.Lock()
        self._unresolved: set[_Name] = set()
        """Names whose last lookup failed."""
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

    async def keep_names(self) -> None:
        """Looks up the names of the listed workers again and again, until cancelled."""
        while True:
            await self.look_up()
            await asyncio.sleep(REFRESH_S)

    async def look_up(self) -> None:
        """Looks up each known name whose address is over RESOLVED_S old, and each that can't be
        resolved, one at a time; uses the last list again if an address has changed."""
        changed = False
        for name, (before, looked_up_s) in list(self._addresses.items()):
            if name in self._unresolved or self._clock() >= looked_up_s + RESOLVED_S:
                changed |= await self._looked_up(name) != before
        if changed:
            await self.use(self._roster.workers)

    async def use(self, workers: Iterable[WorkerStatus]) -> None:
        """Replaces the list of workers; forgets the names that are not in it."""
        async with self._turn:  # so that the list of the later call stays
            await self._use(workers)

    async def _use(self, workers: Iterable[WorkerStatus]) -> None:
        ids: dict[str, list[str]] = {}
        listed: set[_Name | str] = set()
        loads: dict[str, float] = {}
        for each in workers:
            listed.add(_named(each.address))
            endpoint = await self.of(each.address)
            if not endpoint:
                continue
            ids.setdefault(endpoint, []).append(each.worker_id)
            if each.schedulable or each.last_resort:
                in_use = each.running + each.waiting + each.reserved + each.reserved_by_replicas
                loads[endpoint] = loads.get(endpoint, 0.0) + in_use
        self._workers, self._loads = ids, loads
        for name in self._addresses.keys() - listed:
            self._forget(name)

    async def of(self, address: str) -> str:
        """The endpoint, such as 10.0.0.3:8000, of a worker's address; empty: the address's host
        name can't be resolved, or it is no address."""
        name = _named(address)
        if isinstance(name, str):
            return name
        known = self._addresses.get(name)
        return known[0] if known is not None else await self._looked_up(name)

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

    async def _looked_up(self, name: _Name) -> str:
        """Looks a name up, and returns its endpoint; the old one if it can't be resolved."""
        host, port = name
        now_s = self._clock()
        try:
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            endpoint = _endpoint(str(infos[0][4][0]), port)
            self._unresolved.discard(name)
        except (OSError, UnicodeError) as error:  # Unicode: a label of a wrong length
            if name not in self._unresolved:
                self._unresolved.add(name)
                log.warning("the host name %r of a worker can't be resolved: %s", host, error)
            endpoint = self._addresses.get(name, ("", 0.0))[0]
        self._addresses.pop(name, None)
        self._addresses[name] = endpoint, now_s
        if len(self._addresses) > NAMES_MAX:
            self._forget(next(iter(self._addresses)))
        return endpoint

    def _forget(self, name: _Name) -> None:
        del self._addresses[name]
        self._unresolved.discard(name)


def _named(address: str) -> _Name | str:
    """The host name and port of a worker's address; its endpoint, if the host is an IP address;
    empty: it is no address."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    port = port or (443 if parts.scheme == "https" else 80)
    try:
        return _endpoint(str(ipaddress.ip_address(host)), port)
    except ValueError:
        return (host, port) if host else ""


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_named(endpoint: str, subset: frozenset[str]) -> bool:
    return endpoint in subset or endpoint.rpartition(":")[0].strip("[]") in subset
