"""The laws of conservation of a virtual run, checked while it goes on (`RunOptions.check`). Pure.

- blocks: free + cached + in use = total, on every rank, whenever no step is going on;
- events: those of all steps, applied in order, are what the rank's cache holds then;
- requests: arrived = served + failed + shed + in flight; and in every engine, added = finished +
  aborted + waiting + running;
- tokens: a request that finishes has computed its prompt and brought out all it was asked for;
- load: what a router has reserved on a worker is the sum over its requests in flight;
- index: once all is quiet, a router's index holds what the relays hold, to the digest.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from events.feed.stream import StreamState
from indexer.identity import Tier, WorkerKey
from router.reservations.load import WorkerLoad
from router.reservations.reservations import Ending
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.scheduler import Sequence
from simulator.world.clients import Clients
from simulator.world.run_record import RunRecord
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_fleet import VirtualFleet
from simulator.world.virtual_router import VirtualRouter

ENDED_BY_ROUTER = (Ending.EXPIRED, Ending.WORKER_LOST)
"""The router gave up on the worker, which may be well."""


class LawBroken(AssertionError):
    """A law is broken: a bug in scheduler, world or router."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


class Laws:
    """Watches one run."""

    def __init__(self, fleet: VirtualFleet, clients: Clients, record: RunRecord) -> None:
        self.checks: Counter[str] = Counter()
        """Law -> how often it was looked at."""
        self._fleet = fleet
        self._clients = clients
        self._record = record
        self._copies: dict[WorkerKey, Counter[tuple[Tier, int]]] = {
            worker.key: Counter() for worker in fleet.workers
        }
        """What the events of a rank add up to."""
        self._added: Counter[str] = Counter()
        """Engine -> requests it took in this life."""

    def on_added(self, engine: VirtualEngine) -> None:
        """An engine took a request in."""
        self._added[engine.engine_id] += 1

    def on_restart(self, engine: VirtualEngine) -> None:
        """An engine came back, with nothing."""
        self._added[engine.engine_id] = 0
        for key, copies in self._copies.items():
            if key.worker_id == engine.engine_id:
                copies.clear()

    def on_events(self, key: WorkerKey, events: Iterable[PoolEvent]) -> None:
        """A rank told something."""
        copies = self._copies[key]
        for event in events:
            match event:
                case Stored():
                    copies.update((event.tier, one) for one in event.hashes)
                case Removed():
                    for one in event.hashes:
                        copies[event.tier, one] -= 1
                        if copies[event.tier, one] < 0:
                            raise LawBroken("events", f"{key}: {one} removed, but not there")
                        if not copies[event.tier, one]:
                            del copies[event.tier, one]
                case Cleared():
                    copies.clear()

    def on_finished(self, sequence: Sequence) -> None:
        """A request came to its end."""
        self.checks["tokens"] += 1
        asked = sequence.submission.output_tokens
        cached = sequence.cached_tokens
        if sequence.output_tokens != asked:
            told = f"{sequence.request_id} brought out {sequence.output_tokens} of {asked}"
            raise LawBroken("tokens", told)
        if cached is None or not 0 <= cached < sequence.prompt_tokens:
            raise LawBroken("tokens", f"{sequence.request_id} had {cached} tokens cached")

    def on_settled(self, engine: VirtualEngine) -> None:
        """An engine's step has ended, and the next one has not begun."""
        self.checks["blocks"] += 1
        finished = 0
        for rank in range(engine.ranks):
            key = WorkerKey(engine.engine_id, rank)
            blocks = engine.scheduler.blocks(rank)
            if blocks.free + blocks.cached + blocks.in_use != blocks.total:
                raise LawBroken("blocks", f"{key}: {blocks}")
            self.checks["events"] += 1
            held = Counter(set(engine.scheduler.contents(rank)))
            told = self._copies[key]
            if held.keys() != told.keys():
                more, less = len(held.keys() - told.keys()), len(told.keys() - held.keys())
                raise LawBroken("events", f"{key} holds {more} untold, and lacks {less} told")
            load = engine.load(rank)
            finished += load.finished + load.aborted + load.running + load.waiting
        if finished != self._added[engine.engine_id]:
            added = self._added[engine.engine_id]
            raise LawBroken("requests", f"{engine!r} took {added}, accounts for {finished}")

    def on_tick(self) -> None:
        """A second went by."""
        self.checks["requests"] += 1
        record, lives = self._record, self._clients.lives
        if record.arrived != record.ended + len(lives):
            told = f"{record.arrived} arrived, {record.ended} ended, {len(lives)} in flight"
            raise LawBroken("requests", told)
        for router in self._fleet.routers:
            self._check_reserved(router)

    def at_the_end(self) -> None:
        """All requests have ended, and every stream had time to recover."""
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
                theirs = relay.count(), relay.digest()
                if ours != theirs:
                    raise LawBroken("index", f"{relay.key}: index {ours}, relay {theirs}")
                told = len(self._copies[relay.key])
                if relay.complete and relay.tells_events and relay.count() != told:
                    raise LawBroken("index", f"{relay.key}: relay {relay.count()}, told {told}")
                self.checks["index"] += 1

    def _check_reserved(self, router: VirtualRouter) -> None:
        """A router's load is the sum over its open reservations, and those are in flight."""
        self.checks["load"] += 1
        core = router.core
        keys = [worker.key for worker in self._fleet.workers]
        open_ones = core.reservations.on_workers(keys)
        in_flight = {
            life.reservation_id
            for life in self._clients.lives.values()
            if life.router is router and life.sequence is not None
        }
        known = {one.id for one in open_ones}
        for one in known ^ in_flight:
            reservation = core.reservations.get(one)
            if reservation is not None and reservation.ended not in ENDED_BY_ROUTER:
                raise LawBroken("load", f"{router!r}: {one} is open or in flight, but not both")
        for worker in self._fleet.workers:
            key = worker.key
            here = [one for one in open_ones if one.holds([key])]
            chains = [one.prefixes for one in here]
            blocks = len(np.unique(np.concatenate(chains))) if chains else 0
            computing = [one.where_computed() for one in here if not one.prefill_done]
            sums = (
                len(here),
                blocks + sum(one.has_tail for one in here),
                sum(one.new_tokens for one in computing if one.worker == key),
            )
            load = core.fleet.loads.get(key) or WorkerLoad()
            ours = (load.requests, load.blocks, load.prefill_tokens)
            if ours != sums:
                told = f"{key} at {router!r}: {ours}, but requests add up to {sums}"
                raise LawBroken("load", told)
