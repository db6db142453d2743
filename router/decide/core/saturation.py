"""How full pools of workers are, the requests that wait for them included. Pure.

    saturation = (active requests + waiting requests) / slots, as autoscalers compute it

active requests   running, waiting in the engine, or on their way there, of this router and others
waiting requests  in this router's queue: counted for the workers of their role, or, if none is up,
                  for those of role both; requests for a pair count for prefill and for decode
slots             known or estimated; a worker without either has the mean of its pool

A pool is made of the workers of one model and role that may get requests. Requests for a name that
workers of several models serve count for no pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.decide.core.pool import Pool
from router.fleet.state import Fleet
from router.request.request import Role

_HALVES = {Role.PAIR: (Role.PREFILL, Role.DECODE)}
"""Roles of the workers that one request wants, where it wants several."""


@dataclass(slots=True)
class PoolLoad:
    """Requests and slots of one pool."""

    active: float = 0.0
    waiting: int = 0
    workers: int = 0
    workers_known: int = 0
    """Workers with known or estimated slots."""
    slots_known: float = 0.0
    """Slots of the `workers_known`."""

    @property
    def slots(self) -> float | None:
        """Slots of all workers; a worker with an unknown number counts the mean of the others.
        None: none is known.
        """
        if not self.workers_known:
            return None
        return self.slots_known * self.workers / self.workers_known


def pool_loads(fleet: Fleet, waiting: Mapping[Pool, int]) -> dict[tuple[str, str], PoolLoad]:
    """Requests and slots of each pool, by model and role. waiting: requests in the queue."""
    loads: dict[tuple[str, str], PoolLoad] = {}
    for key, source in fleet.view.sources.items():
        heartbeat = source.heartbeat
        if heartbeat is None or fleet.excluded(source):
            continue
        pool = (fleet.models.names(heartbeat.model)[0], heartbeat.role)
        load = loads.setdefault(pool, PoolLoad())
        load.workers += 1
        load.active += fleet.load_of(key).active_requests()
        slots = heartbeat.total_slots or fleet.capacities.slots(key, heartbeat)
        if slots:
            load.workers_known += 1
            load.slots_known += slots
    for pool_key, count in waiting.items():
        for load in _wanted(pool_key, loads):
            load.waiting += count
    return loads


def _wanted(pool: Pool, loads: Mapping[tuple[str, str], PoolLoad]) -> list[PoolLoad]:
    """The pools that a request waiting for `pool` counts for."""
    wanted: dict[str, PoolLoad] = {}
    for role in _HALVES.get(pool.role, (pool.role,)):
        for candidate in (role, Role.BOTH):
            if (load := loads.get((pool.model, candidate))) is not None:
                wanted[candidate] = load
                break
    return list(wanted.values())
