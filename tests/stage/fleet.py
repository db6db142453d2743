"""A fleet for the router's tests: real bytes into a real FleetView, a clock that the test turns.

Each worker's relay is played here: it numbers its messages, keeps what it told, and beats with the
digest of that, so that streams are live for the reason they are in production.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from events.feed.fleet_view import FleetView, Pull
from events.plane.facts import (
    TIER_NAMES,
    Beat,
    Cleared,
    Epoch,
    Fact,
    FactsMessage,
    Heartbeat,
    Removed,
    Stored,
    encode,
    pack_hashes,
)
from indexer.hashing import HashArray, pack_tokens
from indexer.identity import Tier, WorkerKey
from indexer.index import BlockIndex, mix_digest
from indexer.reference import ReferenceIndex
from kvroute.v1 import router_pb2
from router.api.desk.answer_codec import answer_writer
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import HotPrefixSettings, RoutingSettings
from router.decide.copies.hot_prefixes import HotPrefixes, Means, recomputed
from router.decide.core.core import RouterCore
from router.decide.core.progress import Pick, Progress, ProgressResult, ProgressState
from router.decide.core.watched import Watched
from router.decide.decision.decision import Decision
from router.fleet.rates import PRIOR_RATE
from router.fleet.reservations.reservations import Reservation
from router.fleet.state import Troubles
from router.request.narrowing import Narrowing
from router.request.prompt import Prompt
from router.request.request import Request

START_S = 1_790_000_000.0
"""A time of Unix; a number that float64 takes in quarter microseconds."""


def prompt(count: int, first: int = 0, **about: Any) -> Prompt:
    """`count` tokens that follow one another, so that equal starts share their prefixes."""
    return Prompt.from_tokens(pack_tokens(range(first, first + count)), **about)


@dataclass
class Relay:
    """What speaks for one worker."""

    key: WorkerKey
    epoch: Epoch
    heartbeat: Heartbeat
    seq: int = 0
    held: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in Tier})

    def digest(self) -> int:
        xors = [0, 0, 0]
        for tier, hashes in self.held.items():
            for one in hashes:
                xors[tier] ^= one
        return mix_digest(*xors)


class Fleet:
    """Workers, the view of them, the core that routes to them, and their time."""

    def __init__(
        self,
        *workers: str,
        models: tuple[ModelSettings, ...] = (),
        seed: int = 7,
        replica: str = "here",
        predicted_ttl_s: float = 5.0,
        index: BlockIndex | None = None,
        copy_means: Means | None = None,
        prefill_rate: float = PRIOR_RATE,
        watched: Watched | None = None,
        troubles: Troubles | None = None,
        **routing: Any,
    ) -> None:
        """workers: ids of those that are there already. index: the reference by default."""
        self.now_s = START_S
        self.view = FleetView(
            ReferenceIndex() if index is None else index,
            beat_timeout_s=3.0,
            forget_s=30.0,
            workers_max=4096,
            predicted_ttl_s=predicted_ttl_s,
        )
        self.core = RouterCore(
            self.view,
            RoutingSettings(**routing),
            models=models,
            replica=replica,
            rng=random.Random(seed),
            random_bytes=random.Random(replica).randbytes,
            watched=watched,
            troubles=troubles,
            prefill_rate=prefill_rate,
        )
        of_routing = self.core.routing
        means = copy_means or recomputed(prefill_rate)
        self.hot = HotPrefixes(self.core.fleet, of_routing.hot_prefixes, means)
        self.core.observe_picks(self.hot, self.hot.enabled)
        self.relays: dict[WorkerKey, Relay] = {}
        self._requests = 0
        for worker_id in workers:
            self.add(worker_id)

    def copy_prefixes(self, enabled: bool) -> None:
        """Switches the copying of hot prefixes on or off."""
        self.hot.reconfigure(HotPrefixSettings(enabled=enabled))
        self.core.observe_picks(self.hot, enabled)

    def clock(self) -> float:
        return self.now_s

    def add(self, worker_id: str, rank: int = 0, **about: Any) -> WorkerKey:
        """A worker that beats and has said what it is: live, complete, and empty."""
        key = WorkerKey(worker_id, rank)
        said: dict[str, Any] = {
            "address": f"http://{worker_id}:8000",
            "engine": "vllm",
            "model": "m",
            "block_size": 16,
            "max_model_len": 0,
            "total_blocks": 1000,
            "total_slots": 100,
            "sampled_at_s": self.now_s,
        } | about
        epoch = Epoch(int(self.now_s * 1e9), len(self.relays))
        heartbeat = Heartbeat(epoch=epoch, sent_at_s=self.now_s, **said)
        self.relays[key] = Relay(key, epoch, heartbeat)
        self.beat(key)
        self.say(key)
        return key

    def add_pair(self, **about: Any) -> None:
        """A worker p that computes prompts, and d, which decodes."""
        self.add("p", role="prefill", **about)
        self.add("d", role="decode", **about)

    def say(self, key: WorkerKey, **changes: Any) -> None:
        """A heartbeat, with changes that stay. Without a sampled_at_s the sample is of now."""
        relay = self.relays[key]
        sampled = {} if relay.heartbeat.sampled_at_s is None else {"sampled_at_s": self.now_s}
        changes = {"sent_at_s": self.now_s} | sampled | changes
        relay.heartbeat = msgspec.structs.replace(relay.heartbeat, **changes)
        if self.view.on_heartbeat(key, encode(relay.heartbeat), self.now_s) is not None:
            self.core.on_heartbeat(key, self.now_s)

    def beat(self, key: WorkerKey, **wrong: Any) -> list[Pull]:
        """A beat of what was told so far."""
        relay = self.relays[key]
        said: dict[str, Any] = {
            "seq": relay.seq,
            "blocks": sum(map(len, relay.held.values())),
            "digest": relay.digest(),
            "complete": True,
        } | wrong
        message = Beat(v=1, epoch=relay.epoch, time_s=self.now_s, **said)
        return self.view.on_stream(key, encode(message), self.now_s)

    def tell(self, key: WorkerKey, *facts: Fact, lost: bool = False) -> list[Pull]:
        """One message of facts; a lost one is numbered and never arrives."""
        relay = self.relays[key]
        relay.seq += 1
        message = FactsMessage(1, relay.epoch, relay.seq, list(facts), self.now_s)
        return [] if lost else self.view.on_stream(key, encode(message), self.now_s)

    def store(self, key: WorkerKey, hashes: HashArray, tier: Tier = Tier.DEVICE) -> None:
        """Blocks arrive on a tier."""
        self.relays[key].held[tier].update(hashes.tolist())
        self.tell(key, Stored(pack_hashes(hashes), TIER_NAMES[tier]))

    def remove(self, key: WorkerKey, hashes: HashArray, tier: Tier = Tier.DEVICE) -> None:
        """Blocks leave a tier."""
        self.relays[key].held[tier].difference_update(hashes.tolist())
        self.tell(key, Removed(pack_hashes(hashes), TIER_NAMES[tier]))

    def clear(self, key: WorkerKey) -> None:
        """A worker's cache is reset."""
        for held in self.relays[key].held.values():
            held.clear()
        self.tell(key, Cleared())

    def cache(
        self, key: WorkerKey, of: Prompt, tokens: int | None = None, tier: Tier = Tier.DEVICE
    ) -> None:
        """The full blocks of a prompt's first tokens arrive on a tier."""
        size = self.relays[key].heartbeat.block_size
        hashes = of.prefixes(size)
        self.store(key, hashes if tokens is None else hashes[: tokens // size], tier)

    def turn(self, seconds: float, silent: Sequence[WorkerKey] = ()) -> None:
        """Time goes by, a second a step; all but the silent ones beat and send heartbeats."""
        while seconds > 0:
            step = min(1.0, seconds)
            seconds -= step
            self.now_s += step
            for key in list(self.relays):
                if key not in silent and key in self.view.sources:
                    self.beat(key)
                    self.say(key)
            self.tick()

    def tick(self) -> None:
        """What the shells do with every tick."""
        forgotten = self.view.tick(self.now_s)
        if forgotten:
            self.core.on_forgotten(forgotten, self.now_s)
        self.core.tick(self.now_s)

    def request(self, of: Prompt, **about: Any) -> Request:
        """A request with an id of its own, unless it is given one; what narrows it, by the names of
        Narrowing's fields."""
        self._requests += 1
        named = {name: about.pop(name) for name in Narrowing._fields if name in about}
        for name in {"required_labels", "excluded_labels"} & named.keys():
            named[name] = frozenset(named[name].items())
        narrowing = Narrowing(of.lora_name, **named).or_none
        request_id = f"request-{self._requests}"
        return Request(**{"request_id": request_id, "prompt": of, "narrowing": narrowing} | about)

    def decide(self, of: Prompt, **about: Any) -> Decision:
        """What is decided of a new request, of which nothing is reserved."""
        return self.core.decide(self.request(of, **about), self.now_s)

    def route(self, of: Prompt, **about: Any) -> Pick:
        """A new request, picked and reserved."""
        request = self.request(of, **about)
        # Watched, so that the decision shows workers as they were.
        outcome = self.core.route(request, self.now_s, watch=lambda decision: None)
        assert isinstance(outcome, Pick)
        return outcome

    def answer(self, of: Prompt, priority: int = 0, **about: Any) -> router_pb2.RouteResponse:
        """The answer to a new request."""
        writer = answer_writer(self.core)
        outcome = self.core.route(
            self.request(of, **about),
            self.now_s,
            write=lambda pick: writer.answer(pick, priority, omit_receipt=False),
        )
        return router_pb2.RouteResponse.FromString(outcome.reservation.answer)

    def picked(self, of: Prompt, **about: Any) -> str:
        """The id of the worker that a new request goes to."""
        return self.route(of, **about).reservation.worker.worker_id

    def report(self, of: Reservation | str, state: str, **told: Any) -> ProgressResult:
        """A step of a reservation, or of the one that has this id."""
        reservation_id = of if isinstance(of, str) else of.id
        return self.core.report(Progress(reservation_id, ProgressState(state), **told), self.now_s)

    def loads(self) -> dict[WorkerKey, tuple[int, int, int]]:
        """What core counts as ours on each worker that has any: requests, blocks, tokens."""
        return {
            key: told
            for key, load in self.core.fleet.loads.items()
            if any(told := (load.requests, load.blocks, load.prefill_tokens))
        }


def hashes(numbers: Iterable[int]) -> HashArray:
    """Numbers as hashes."""
    return np.fromiter(numbers, np.uint64)
