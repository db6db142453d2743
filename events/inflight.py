"""What router replicas tell one another: the load that each has reserved on each worker.

    ours, a worker ──told every few hundredths of a second──> theirs, at any time up to now

Totals are absolute and say how old they are, never deltas: a message that is lost is made good by
the next one, and by a full one every second. A replica's load counts on ours for as long as it is
heard; of one that is silent, nothing is known, and what it has sent shows in the engines' metrics.

Pure: bytes and `now_s` in, changed workers out.

Laws:
- of one replica, only messages of its newest epoch and in order count; each at most once;
- what a replica told is forgotten `TTL_S` after it was last heard;
- the sum over peers at a time is what they told of that time, or of the one nearest to it.
"""

from collections import Counter
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from typing_extensions import override

from events.facts import (
    MESSAGE_BYTES_MAX,
    VERSION,
    Count,
    Epoch,
    Name,
    SequenceNumber,
    Unreadable,
)
from indexer.identity import WorkerKey

TTL_S = 3.0
FULL_S = 1.0
"""How often everything is told, and that we are there."""
WORKERS_MAX = 8192
"""In one message."""
REPLICAS_MAX = 64
"""Others that are listened to at the same time."""
AGES_S = (2.5, 1.5, 1.0, 0.7, 0.4, 0.2, 0.1, 0.05)
"""How old the totals are that a message has of each worker, besides those of now: an engine's
sample is of some time ago, and what is subtracted from it must be of that time."""

_Age = Annotated[float, Meta(ge=0, le=3600)]


class Totals(NamedTuple):
    """What a replica has reserved on a worker."""

    requests: int = 0
    blocks: int = 0
    """Distinct ones of prompts."""
    prefill_tokens: int = 0
    """Prompt tokens not computed yet."""


class Reserved(Protocol):
    """One worker's load by our own reservations, now and a little while ago."""

    @property
    def ours(self) -> Totals: ...

    def ours_at(self, times_s: Sequence[float]) -> list[tuple[int, int]]:
        """Requests and blocks as they were; times ascend."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """One worker's totals."""

    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    prefill_tokens: Count
    steps: Annotated[list[tuple[_Age, Count, Count]], Meta(min_length=1, max_length=16)]
    """(age, requests, blocks), oldest first: what held from then on until the next one, or now."""


class Inflight(msgspec.Struct, frozen=True, tag="inflight", tag_field="kind"):
    """One replica's reserved load."""

    v: int
    replica: Name
    epoch: Epoch
    seq: SequenceNumber
    full: bool
    """Workers that are not in it have nothing reserved. False: they are as they were."""
    workers: Annotated[list[_Told], Meta(max_length=WORKERS_MAX)]


_NOTHING = Totals()
_decoder = msgspec.msgpack.Decoder(Inflight)
_encoder = msgspec.msgpack.Encoder()


def decode_inflight(payload: bytes) -> Inflight | Unreadable:
    """A message of the inflight subject. Never raises."""
    if len(payload) > MESSAGE_BYTES_MAX:
        return Unreadable("too_large", f"{len(payload)} bytes")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable("malformed", str(error))


class Teller:
    """Our side: writes the messages."""

    def __init__(self, replica: str, epoch: Epoch) -> None:
        self._replica = replica
        self._epoch = epoch
        self._seq = 0
        self._told: dict[WorkerKey, Totals] = {}
        """What was told last, but for those with nothing reserved."""
        self._full_at_s = -inf
        self.untold = 0
        """Workers that had no room in their message, over all messages."""

    def message(self, loads: Mapping[WorkerKey, Reserved], now_s: float) -> bytes | None:
        """What there is to tell; None when nothing changed since the last full one, a moment ago.

        Takes time in proportion to the workers.
        """
        busy = {key: ours for key, load in loads.items() if any(ours := load.ours)}
        full = now_s - self._full_at_s >= FULL_S
        wanted: Collection[WorkerKey] = busy
        if full:
            self._full_at_s = now_s
        else:
            both = busy.keys() | self._told.keys()
            wanted = [key for key in both if busy.get(key) != self._told.get(key)]
            if not wanted:
                return None
        self._told = busy
        self._seq += 1
        self.untold += max(0, len(wanted) - WORKERS_MAX)
        workers = [_told(key, loads.get(key), now_s) for key in islice(wanted, WORKERS_MAX)]
        return _encoder.encode(
            Inflight(VERSION, self._replica, self._epoch, self._seq, full, workers)
        )


def _told(key: WorkerKey, load: Reserved | None, now_s: float) -> _Told:
    if load is None:  # forgotten since
        return _Told(key.worker_id, key.dp_rank, 0, [(0.0, 0, 0)])
    ours = load.ours
    steps: list[tuple[float, int, int]] = []
    earlier = load.ours_at([now_s - age_s for age_s in AGES_S])
    for age_s, totals in [*zip(AGES_S, earlier, strict=True), (0.0, ours[:2])]:
        if not steps or steps[-1][1:] != totals:
            steps.append((age_s, *totals))
    return _Told(key.worker_id, key.dp_rank, ours.prefill_tokens, steps)


@dataclass(slots=True)
class _Worker:
    """What one replica told of one worker."""

    now: Totals
    steps: list[tuple[float, int, int]]
    """(when, requests, blocks), oldest first"""

    def at(self, time_s: float) -> tuple[int, int]:
        held = self.steps[0]
        for step in self.steps:
            if step[0] > time_s:
                break
            held = step
        return held[1], held[2]


@dataclass(slots=True)
class _Peer:
    """One replica that is heard."""

    epoch: Epoch
    seq: int
    heard_at_s: float
    workers: dict[WorkerKey, _Worker] = field(default_factory=dict)


class Peers:
    """Their side: the load that other replicas have reserved."""

    def __init__(self, replica: str) -> None:
        """replica: who we are, whose own messages come back to us."""
        self._replica = replica
        self._peers: dict[str, _Peer] = {}
        self.results: Counter[str] = Counter()
        """Messages by what became of them."""

    @override
    def __repr__(self) -> str:
        return f"<Peers {', '.join(sorted(self._peers)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._peers)

    def on_message(self, payload: bytes, now_s: float) -> set[WorkerKey]:
        """Takes a message in; returns the workers whose load by peers may have changed."""
        message = decode_inflight(payload)
        if isinstance(message, Unreadable):
            self.results[message.reason] += 1
            return set()
        if message.replica == self._replica:
            return set()
        peer = self._peers.get(message.replica)
        changed: set[WorkerKey] = set()
        if peer is not None and message.epoch < peer.epoch:
            self.results["old_epoch"] += 1
            return changed
        if peer is not None and message.epoch > peer.epoch:  # it started again, with nothing
            changed.update(self._forget(message.replica))
            peer = None
        if peer is None:
            if len(self._peers) >= REPLICAS_MAX:
                self.results["too_many_replicas"] += 1
                return changed
            peer = self._peers[message.replica] = _Peer(message.epoch, 0, now_s)
        if message.seq <= peer.seq:
            self.results["out_of_order"] += 1
            return changed
        self.results["applied"] += 1
        peer.seq = message.seq
        peer.heard_at_s = now_s
        told = {WorkerKey(one.worker_id, one.dp_rank): one for one in message.workers}
        if message.full:
            changed.update(peer.workers.keys() - told.keys())
            peer.workers = {key: peer.workers[key] for key in told if key in peer.workers}
        for key, one in told.items():
            steps = [(now_s - age_s, requests, blocks) for age_s, requests, blocks in one.steps]
            now = Totals(*steps[-1][1:], one.prefill_tokens)
            known = peer.workers.get(key)
            if known is None or known.now != now:
                changed.add(key)
            peer.workers[key] = _Worker(now, steps)
        if len(peer.workers) > WORKERS_MAX:
            self.results["too_many_workers"] += 1
            changed.update(self._forget(message.replica))
        return changed

    def tick(self, now_s: float) -> set[WorkerKey]:
        """Forgets who is silent; returns the workers whose load by peers changed."""
        silent = [name for name, peer in self._peers.items() if now_s - peer.heard_at_s > TTL_S]
        return {key for name in silent for key in self._forget(name)}

    def now(self, worker: WorkerKey) -> Totals:
        """What all peers have reserved on a worker."""
        found = [
            peer.workers[worker].now for peer in self._peers.values() if worker in peer.workers
        ]
        if not found:
            return _NOTHING
        return Totals(*(sum(column) for column in zip(*found, strict=True)))

    def at(self, worker: WorkerKey, time_s: float) -> tuple[int, int]:
        """Requests and blocks that they had reserved at a time of the last seconds, our clock."""
        requests = blocks = 0
        for peer in self._peers.values():
            if (known := peer.workers.get(worker)) is not None:
                then = known.at(time_s)
                requests += then[0]
                blocks += then[1]
        return requests, blocks

    def ages_s(self, now_s: float) -> dict[str, float]:
        """Since each replica was heard."""
        return {name: now_s - peer.heard_at_s for name, peer in self._peers.items()}

    def _forget(self, replica: str) -> KeysView[WorkerKey]:
        return self._peers.pop(replica).workers.keys()
