"""What a decision costs, hash, match, cost, pick, reserve and receipt; and a reservation's end.

From a request's bytes to its answer's; and `api`, a Request to the core and a Pick back, as
simulators ask.

Prompts of 8,192 tokens as bytes; workers with load, each with a part of every prompt in its cache.
Requests rotate over 50 prompts; each is 7,680 of those tokens and 512 of its own. Every
reservation ends a while later. Nothing but the core: no gRPC, no event loop. Times are of the CPU,
so that other work on the machine counts little.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from events.feed.fleet_view import FleetView
from events.plane.facts import Beat, Epoch, FactsMessage, Heartbeat, Stored, encode, pack_hashes
from indexer.hashing import block_hashes, prefix_hashes
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk import request_codec
from router.api.desk.answer_codec import answer_writer
from router.config.settings.routing_settings import RoutingSettings
from router.decide.core.core import RouterCore
from router.decide.core.progress import Progress, ProgressState
from router.fleet.reservations.reservations import Reservation
from router.request.prompt import Prompt
from router.request.request import Request
from tests.bench.timing import row

PROMPTS = 50
PROMPT_TOKENS = 8192
OWN_TOKENS = 512
BLOCK_SIZE = 16
DECISIONS = 2000
REPEATS = 5
DEFAULT = RoutingSettings().policy
CASES = [(DEFAULT, 8)]
CASES += [
    (policy, workers) for policy in (DEFAULT, "dynamo-blocks", "ttft") for workers in (64, 1000)
]
"""Policies, and workers."""

Way: TypeAlias = Callable[[str, bytes], Callable[[], Reservation]]
"""From a request's id and its tokens to what decides about it."""


def rows() -> list[dict[str, Any]]:
    found = []
    for policy, workers in CASES:
        stage = Stage(workers, policy)
        ways = {"us": stage.whole}
        name = f"decision_{PROMPT_TOKENS}_w{workers}"
        if policy == DEFAULT:
            ways["api_us"] = stage.api
        else:
            name += f"_{policy}"
        times = {what: [stage.measure(way) for _ in range(REPEATS)] for what, way in ways.items()}
        for what, pairs in times.items():
            us = median(decided for decided, _ in pairs)
            found.append(row(f"{name}_{what}", round(us, 1), "us", "less"))
        us = median(ended for pairs in times.values() for _, ended in pairs)
        found.append(row(f"{name}_end_us", round(us, 1), "us", "less"))
    return found


class Stage:
    """A fleet as the core sees it, and requests to it."""

    def __init__(self, workers: int, policy: str = DEFAULT) -> None:
        rng = np.random.default_rng(1)
        view = FleetView(NativeIndex(), beat_timeout_s=1e9, forget_s=1e9, workers_max=workers)
        self._core = RouterCore(
            view, RoutingSettings(policy=policy), rng=random.Random(1), random_bytes=os.urandom
        )
        self._writer = answer_writer(self._core)
        self._rng = rng
        self._now_s = 1000.0
        self._prompts = [_tokens(rng, PROMPT_TOKENS) for _ in range(PROMPTS)]
        self._asked = 0
        self._in_flight: deque[str] = deque()
        self._in_flight_max = 4 * workers
        self._beats: list[tuple[WorkerKey, bytes, bytes]] = []
        chains = [prefix_hashes(block_hashes(one, BLOCK_SIZE)) for one in self._prompts]
        for i in range(workers):
            key, epoch = WorkerKey(f"worker-{i}", 0), Epoch(1, i)
            facts = FactsMessage(
                v=1,
                epoch=epoch,
                seq=1,
                facts=[
                    Stored(pack_hashes(chain[: 8 * (1 + (37 * i + 11 * n) % 64)]), "device")
                    for n, chain in enumerate(chains)
                ],
                time_s=1.0,
            )
            view.on_stream(key, encode(facts), self._now_s)
            slot = view.sources[key].slot
            beat = Beat(1, epoch, 1, view.index.count(slot), view.index.digest(slot), True, 1.0)
            self._beats.append((key, encode(beat), encode(_heartbeat(epoch, i))))
        self.beat_all()
        self.measure(self.whole)

    def beat_all(self) -> None:
        """Every worker's beat and heartbeat."""
        for key, beat, heartbeat in self._beats:
            self._core.fleet.view.on_stream(key, beat, self._now_s)
            self._core.fleet.view.on_heartbeat(key, heartbeat, self._now_s)
            self._core.on_heartbeat(key, self._now_s)

    def answer(self, asked: bytes) -> Reservation:
        """Bytes to bytes."""
        received = request_codec.receive(asked, self._core.routing.prompt_tokens_max)
        outcome = self._core.route(
            request_codec.read_request(received, self._core, self._now_s),
            self._now_s,
            write=lambda pick: self._writer.answer(pick, 0, omit_receipt=False),
        )
        return outcome.reservation

    def whole(self, request_id: str, tokens: bytes) -> Callable[[], Reservation]:
        """A request's bytes."""
        return partial(self.answer, _message(request_id, tokens))

    def api(self, request_id: str, tokens: bytes) -> Callable[[], Reservation]:
        """A Request to the core."""

        def decide() -> Reservation:
            request = Request(request_id, Prompt.from_tokens(tokens))
            return self._core.route(request, self._now_s).reservation

        return decide

    def measure(self, way: Way) -> tuple[float, float]:
        """Microseconds of a decision, and of a reservation's end."""
        own = [_tokens(self._rng, OWN_TOKENS) for _ in range(DECISIONS)]
        spent = [0.0, 0.0]
        for mine in own:
            self._asked += 1
            self._now_s += 0.001
            shared = self._prompts[self._asked % PROMPTS]
            content = shared[: 4 * (PROMPT_TOKENS - OWN_TOKENS)] + mine
            decide = way(f"request-{self._asked}", content)
            began = time.process_time()
            reservation = decide()
            decided = time.process_time()
            self._in_flight.append(reservation.id)
            if len(self._in_flight) > self._in_flight_max:
                ended = Progress(self._in_flight.popleft(), ProgressState.FINISHED)
                self._core.report(ended, self._now_s)
            over = time.process_time()
            spent[0] += decided - began
            spent[1] += over - decided
            if self._asked % 250 == 0:
                self._core.fleet.view.predictions.tick(self._now_s)
                self._core.tick(self._now_s)
        return spent[0] / DECISIONS * 1e6, spent[1] / DECISIONS * 1e6


def _message(request_id: str, tokens: bytes) -> bytes:
    return router_pb2.RouteRequest(request_id=request_id, token_bytes=tokens).SerializeToString()


def _tokens(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(0, 150_000, count, np.uint32).tobytes()


def _heartbeat(epoch: Epoch, i: int) -> Heartbeat:
    return Heartbeat(
        epoch=epoch,
        address=f"http://10.0.{i // 256}.{i % 256}:8000",
        engine="vllm",
        model="m",
        block_size=BLOCK_SIZE,
        total_blocks=100_000,
        total_slots=1024,
        running=i % 7,
        waiting=i % 3,
        used_blocks=float(i % 50 * 100),
        sampled_at_s=1.0,
        sent_at_s=1.0,
    )
