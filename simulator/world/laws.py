"""The laws of conservation of a virtual run, checked while it runs (`RunOptions.check`). Pure.

- blocks: free + cached + in use = total, on every rank, between steps;
- events: the events of all steps, applied in order, give the content of the rank's cache;
- requests: arrived = served + failed + shed + in flight; and in every engine, added = finished +
  aborted + waiting + running;
- tokens: a finished request has computed its prompt and all its requested output tokens;
- load: a router's reserved load on a worker is the sum over its requests in flight;
- queue: in every router's queue, arrived = dispatched + waiting + refused + expired + cancelled +
  displaced + too long + unserved, and a request that waits is in no engine;
- work: while a router knows a worker with room for it, no request is the first to wait, or waits
  after its turn, but by a rule with a name (a quota, a band's share of the workers, its deadline);
- slots: no router picks a worker beyond the slots that it knows of;
- index: at the end, once all is quiet, a router's index equals the relays' blocks, to the digest.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import islice

import numpy as np
from typing_extensions import override

from events.feed.stream import StreamState
from indexer.identity import Tier, WorkerKey
from router.decide.waiter import Fate, Waiter
from router.fleet.pools import heartbeat_of
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.reservations import Ending
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.scheduler import Sequence
from simulator.world.clients import Asking, Clients
from simulator.world.run_record import RunRecord
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_fleet import VirtualFleet, Witness
from simulator.world.virtual_router import VirtualRouter

ENDED_BY_ROUTER = (Ending.EXPIRED, Ending.WORKER_LOST)
"""Endings by which a router gives a reservation up, though the worker may be healthy and go on."""
WAITERS_MAX = 64
"""Most waiting requests of a router that are checked, after each turn and in each second."""


class LawBroken(AssertionError):
    """A law is broken: a bug in scheduler, world or router."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


class Laws(Witness):
    """Checks the laws of one run; a check that fails raises LawBroken."""

    def __init__(self, fleet: VirtualFleet, clients: Clients, record: RunRecord) -> None:
        self.checks: Counter[str] = Counter()
        """Law -> number of checks made"""
        self._fleet = fleet
        self._clients = clients
        self._record = record
        self._copies: dict[WorkerKey, Counter[tuple[Tier, int]]] = {
            worker.key: Counter() for worker in fleet.workers
        }
        """Rank -> (tier, hash) -> number of copies by the rank's events"""
        self._added: Counter[str] = Counter()
        """Engine -> requests added since its last start"""

    @override
    def on_added(self, engine: VirtualEngine) -> None:
        """Counts a request that was added to an engine."""
        self._added[engine.engine_id] += 1

    @override
    def on_restart(self, engine: VirtualEngine) -> None:
        """Forgets the requests and blocks of an engine that has restarted, empty."""
        self._added[engine.engine_id] = 0
        for key, copies in self._copies.items():
            if key.worker_id == engine.engine_id:
                copies.clear()

    @override
    def on_events(self, key: WorkerKey, events: Iterable[PoolEvent]) -> None:
        """Applies the events of a rank to its blocks; checks that only stored blocks are
        removed."""
        copies = self._copies[key]
        for event in events:
            match event:
                case Stored():
                    copies.update((event.tier, block) for block in event.hashes)
                case Removed():
                    for block in event.hashes:
                        copies[event.tier, block] -= 1
                        if copies[event.tier, block] < 0:
                            raise LawBroken("events", f"{key}: {block} removed, but not there")
                        if not copies[event.tier, block]:
                            del copies[event.tier, block]
                case Cleared():
                    copies.clear()

    @override
    def on_finished(self, sequence: Sequence) -> None:
        """Checks the tokens of a request that has finished."""
        self.checks["tokens"] += 1
        requested = sequence.submission.output_tokens
        cached = sequence.cached_tokens
        if sequence.output_tokens != requested:
            detail = f"{sequence.request_id} has {sequence.output_tokens} of {requested} tokens"
            raise LawBroken("tokens", detail)
        if cached is None or not 0 <= cached < sequence.prompt_tokens:
            raise LawBroken("tokens", f"{sequence.request_id} had {cached} tokens cached")

    @override
    def on_settled(self, engine: VirtualEngine) -> None:
        """Checks blocks, events and requests of an engine between two of its steps."""
        self.checks["blocks"] += 1
        finished = 0
        for rank in range(engine.ranks):
            key = WorkerKey(engine.engine_id, rank)
            blocks = engine.scheduler.blocks(rank)
            if blocks.free + blocks.cached + blocks.in_use != blocks.total:
                raise LawBroken("blocks", f"{key}: {blocks}")
            self.checks["events"] += 1
            held = Counter(set(engine.scheduler.contents(rank)))
            copies = self._copies[key]
            if held.keys() != copies.keys():
                more, less = len(held.keys() - copies.keys()), len(copies.keys() - held.keys())
                detail = f"{key} holds {more} blocks without events, and lacks {less} with events"
                raise LawBroken("events", detail)
            load = engine.load(rank)
            finished += load.finished + load.aborted + load.running + load.waiting
        if finished != self._added[engine.engine_id]:
            added = self._added[engine.engine_id]
            raise LawBroken("requests", f"{engine!r} got {added}, and has {finished}")

    @override
    def on_picked(self, router: VirtualRouter, key: WorkerKey) -> None:
        """Checks the slots of a worker that a router has just reserved."""
        self.checks["slots"] += 1
        slots = heartbeat_of(router.view.sources[key]).total_slots
        taken = (router.core.fleet.loads.get(key) or WorkerLoad()).active_requests()
        if slots and taken > slots:
            raise LawBroken("slots", f"{key} at {router!r}: {taken} requests, {slots} slots")

    @override
    def on_turns(self, router: VirtualRouter, now_s: float) -> None:
        """Checks, after the turns of a router's waiting requests, that none of them waits while a
        worker has room for it."""
        queue, room = router.admission.queue, router.core.fleet.room
        seen: set[Hashable] = set()
        for pool, waiter in islice(queue.waiters(), WAITERS_MAX):
            is_first = pool not in seen
            seen.add(pool)
            if not (is_first or waiter.passed_at == room) or _is_held(router, waiter, now_s):
                continue
            self.checks["work"] += 1
            asking = waiter.payload
            if not isinstance(asking, Asking):
                raise LawBroken("work", f"{waiter} is of no client")
            if router.core.decide(asking.request, now_s, may_exceed=False).order:
                raise LawBroken("work", f"{waiter} waits at {router!r}, which has room for it")

    def on_tick(self, now_s: float) -> None:
        """Checks, every second, the requests of the run, and the load and the queue of each
        router."""
        self.checks["requests"] += 1
        record, lives = self._record, self._clients.lives
        if record.arrived != record.ended + len(lives):
            detail = f"{record.arrived} arrived, {record.ended} ended, {len(lives)} in flight"
            raise LawBroken("requests", detail)
        for router in self._fleet.routers:
            self._check_reserved(router)
            self._check_queue(router)
            self.on_turns(router, now_s)

    def at_the_end(self) -> None:
        """Checks load and index of every router once all requests have ended and all streams have
        had time to recover."""
        for router in self._fleet.routers:
            self._check_reserved(router)
            for worker in self._fleet.workers:
                relay, source = worker.relay, router.view.sources.get(worker.key)
                if source is None:
                    raise LawBroken("index", f"{relay.key} is unknown to {router!r}")
                stream, index = source.stream, router.view.index
                if stream.state is not StreamState.LIVE:
                    raise LawBroken("index", f"{relay.key} is {stream!r}: {stream.reason}")
                ours = index.told(source.slot), index.digest(source.slot)
                theirs = relay.held.count(), relay.held.digest()
                if ours != theirs:
                    counts = f"the index has {ours}, its relay {theirs} (count and digest)"
                    raise LawBroken("index", f"blocks of {relay.key} differ: {counts}")
                held, blocks = relay.held.count(), len(self._copies[relay.key])
                if relay.complete and relay.tells_events and held != blocks:
                    raise LawBroken("index", f"{relay.key} has {blocks} blocks, its relay {held}")
                self.checks["index"] += 1

    def _check_queue(self, router: VirtualRouter) -> None:
        """Checks that every request that came into a router's queue has left it with a counted
        fate, or waits there and is in no engine."""
        self.checks["queue"] += 1
        queue = router.admission.queue
        left = sum(count for fate, count in queue.counts.items() if fate is not Fate.ARRIVED)
        if queue.counts[Fate.ARRIVED] != left + len(queue):
            raise LawBroken("queue", f"{queue!r}: {queue.counts[Fate.ARRIVED]} arrived")
        for _, waiter in queue.waiters():
            asking = waiter.payload
            if not isinstance(asking, Asking) or asking.life.sequence is not None:
                raise LawBroken("queue", f"{waiter} waits at {router!r}, and is in an engine")

    def _check_reserved(self, router: VirtualRouter) -> None:
        """Checks that a router's load is the sum over its open reservations, whose requests are in
        flight."""
        self.checks["load"] += 1
        core = router.core
        keys = [worker.key for worker in self._fleet.workers]
        reservations = core.reservations.on_workers(keys)
        in_flight = {
            life.reservation_id
            for life in self._clients.lives.values()
            if life.router is router and life.sequence is not None
        }
        known = {reservation.id for reservation in reservations}
        for reservation_id in known ^ in_flight:
            lone = core.reservations.get(reservation_id)
            if lone is not None and lone.ended not in ENDED_BY_ROUTER:
                detail = f"{router!r}: {reservation_id} is open or in flight, but not both"
                raise LawBroken("load", detail)
        for worker in self._fleet.workers:
            key = worker.key
            here = [reservation for reservation in reservations if reservation.holds([key])]
            chains = [reservation.prefixes for reservation in here]
            blocks = len(np.unique(np.concatenate(chains))) if chains else 0
            computing = [
                reservation.where_computed() for reservation in here if not reservation.prefill_done
            ]
            sums = (
                len(here),
                blocks + sum(reservation.own_blocks for reservation in here),
                sum(part.new_tokens for part in computing if part.worker == key),
            )
            load = core.fleet.loads.get(key) or WorkerLoad()
            ours = (load.requests, load.blocks, load.prefill_tokens)
            if ours != sums:
                detail = f"{key} at {router!r}: {ours}, but requests add up to {sums}"
                raise LawBroken("load", detail)


def _is_held(router: VirtualRouter, waiter: Waiter, now_s: float) -> bool:
    """Whether a rule with a name makes a request wait though workers may have room."""
    queue = router.admission.queue
    if not router.admission.in_vain.may_be(now_s):
        return True
    if router.admission.fleet_turns.holds(waiter.pool, waiter.level, now_s):
        return True
    if waiter.expires_s <= now_s or queue.tenants.held_by(waiter.tenant, now_s) is not None:
        return True
    share = queue.share_of(waiter, now_s) if queue.has_shares else 1.0
    return share < 1 and router.core.fleet.fill(waiter.model) >= share
