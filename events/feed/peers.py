"""What router replicas tell one another: the load that each has reserved on each worker.

    ours, a worker ──told every few hundredths of a second──> theirs, at any time up to now

Totals are absolute and say how old they are, never deltas: a message that is lost is made good by
the next one, and by a full one every second. Times matter because an engine's sample is of some
time ago, and what is subtracted from it must be of that time. A replica's load counts on ours for
as long as it is heard; of one that is silent, nothing is known, and what it has sent shows in the
engines' metrics.

Pure: bytes and `now_s` in, changed workers out.

Laws:
- a session is told when its requests go to another worker, once, and again in every minute of use;
- an ejection is told with every message for as long as it holds, and replicas that know nothing of
  ejections leave it out of what they read;
- of one replica, only messages of its newest epoch and in order count; each at most once;
- what a replica told is forgotten `TTL_S` after it was last heard;
- the sum over peers at a time is what they told of that time, or of the one nearest to it.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from typing_extensions import override

from events.plane.facts import (
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
BYTES_MAX = 768 * 1024
"""Of the workers in one message. A NATS server takes 1 MiB by default; the rest is room for the
message's other fields."""
_WORKER_BYTES = 17
"""At most, of one worker without its id and steps: the heads of three arrays and a text, a rank and
prefill tokens."""
_STEP_BYTES = 20
"""At most, of one step: the head of an array, a float and two counts."""
REPLICAS_MAX = 64
"""Others that are listened to at the same time."""
STEPS_MAX = 16
"""Of a worker, in one message; fewer where workers are so many that BYTES_MAX would be passed. Of
more changes, the last half of these and some of the others."""
KEPT_STEPS_MAX = 1024
"""Of a worker, of what one replica told."""
KEPT_S = 3.5
"""How long they are kept, at least: after 3 s without a sample the worker is unhealthy."""

Step = tuple[float, int, int]
"""(when, requests, blocks): what held from then on until the next one, or now."""
_Age = Annotated[float, Meta(ge=0, le=3600)]
_Rank = Annotated[int, Meta(ge=0, le=99999)]


EJECTED_MAX = 512
"""Ejections in one message; those that don't fit are left out, and end at the others' by time."""
SESSIONS_MAX = 2048
"""Sessions in one message: 25 KB, and the ids of their workers. The next message has the others."""
_HASH_MAX = (1 << 64) - 1


class Verdict(NamedTuple):
    """A worker that a replica keeps requests away from, since they failed there."""

    worker: WorkerKey
    left_s: float
    """Until it is probed."""
    cause: str
    """See router/health/outliers.py."""


class Moved(NamedTuple):
    """Where a session's last request went."""

    session: int
    """64 bits of its id's hash: ids stay in the replica that was given them."""
    worker: WorkerKey


class Totals(NamedTuple):
    """What a replica has reserved on a worker."""

    requests: int = 0
    blocks: int = 0
    """Distinct ones of prompts."""
    prefill_tokens: int = 0
    """Prompt tokens not computed yet."""


class Reserved(Protocol):
    """One worker's load by our own reservations, now and a little while ago."""

    changed: bool
    """Since peers were told of it."""

    @property
    def ours(self) -> Totals: ...

    def steps(self, since_s: float) -> list[Step]:
        """What held at that time, and each change after it; times ascend."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """One worker's totals."""

    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    prefill_tokens: Count
    steps: Annotated[list[tuple[_Age, Count, Count]], Meta(min_length=1, max_length=STEPS_MAX)]
    """(age, requests, blocks), oldest first: what held from then on until the next one, or now."""


class _Ejected(msgspec.Struct, frozen=True, array_like=True):
    """A Verdict."""

    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    left_s: _Age
    cause: Name


class Inflight(msgspec.Struct, frozen=True, tag="inflight", tag_field="kind", omit_defaults=True):
    """One replica's reserved load, and what it has ejected."""

    v: int
    replica: Name
    epoch: Epoch
    seq: SequenceNumber
    full: bool
    """Workers that are not in it have nothing reserved. False: they are as they were."""
    workers: Annotated[list[_Told], Meta(max_length=WORKERS_MAX)]
    ejected: Annotated[list[_Ejected], Meta(max_length=WORKERS_MAX)] = []
    """All that it has; optional, since older replicas neither write nor read it."""
    session_workers: Annotated[list[tuple[Name, _Rank]], Meta(max_length=SESSIONS_MAX)] = []
    """Ids and ranks that `sessions` refers to."""
    sessions: Annotated[list[tuple[int, _Rank]], Meta(max_length=SESSIONS_MAX)] = []
    """(hash of a session's id, place in session_workers) of sessions whose requests went to another
    worker than was told before; optional, as `ejected`."""


_NOTHING = Totals()
_decoder = msgspec.msgpack.Decoder(Inflight)
_encoder = msgspec.msgpack.Encoder()


def decode_inflight(payload: bytes) -> Inflight | Unreadable:
    """A message of the inflight subject. Never raises."""
    if len(payload) > MESSAGE_BYTES_MAX:
        return Unreadable("too_large", f"{len(payload)} bytes")
    try:
        message = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable("malformed", str(error))
    workers = len(message.session_workers)
    if any(place >= workers or not 0 <= one <= _HASH_MAX for one, place in message.sessions):
        return Unreadable("malformed", "a session of no worker, or that is no hash")
    return message


class Teller:
    """Our side: writes the messages."""

    def __init__(self, replica: str, epoch: Epoch) -> None:
        self._replica = replica
        self._epoch = epoch
        self._seq = 0
        self._told_at_s = -inf
        self.full_due_s = -inf
        """When everything is to be told again."""
        self.untold = 0
        """Workers that had no room in their message, over all messages."""
        self._ejected: list[tuple[WorkerKey, str]] = []
        """As last told, with the causes."""
        self.is_cut = False
        """The last message had no room for some workers: the next one, due at once, has theirs."""

    def begin_anew(self) -> None:
        """Somebody listens who has not heard us yet: the next message will be a full one, with all
        that is remembered."""
        self.full_due_s = self._told_at_s = -inf

    def message(
        self,
        loads: Mapping[WorkerKey, Reserved],
        now_s: float,
        verdicts: Sequence[Verdict] = (),
        moved: Sequence[Moved] = (),
    ) -> bytes | None:
        """What there is to tell; None when nothing changed since the last one, a moment ago.

        moved: SESSIONS_MAX at most. Marks what it tells as told. Full ones take time in proportion
        to the workers, others to those that changed.
        """
        self.is_cut = False
        full = now_s >= self.full_due_s
        since_s = self._told_at_s
        if full:
            self.full_due_s = now_s + FULL_S
            wanted = [(key, load, load.steps(since_s)) for key, load in loads.items()]
            busy = [one for one in wanted if len(one[2]) > 1 or any(one[1].ours)]
            full = _fits(busy)
            # One that is cut can't say of any worker that it has nothing by leaving it out.
            told, rest = (busy, []) if full else _cut(wanted)
            if full:
                for _, load, _ in wanted:
                    load.changed = False
        else:
            told, rest = _cut(
                [(key, load, load.steps(since_s)) for key, load in loads.items() if load.changed]
            )
            ejected_as_told = self._ejected == [(one.worker, one.cause) for one in verdicts]
            if not told and not moved and ejected_as_told:
                return None
        self._ejected = [(one.worker, one.cause) for one in verdicts]
        self._told_at_s = now_s
        self.untold += len(rest)
        self.is_cut = bool(rest)
        for _, load, _ in rest:
            load.changed = True
        steps_max = _steps_max(told)
        ejected = [_Ejected(*key, min(left_s, 3600.0), cause) for key, left_s, cause in verdicts]
        return self._encoded(
            [_told(*one, steps_max, now_s) for one in told], full, ejected[:EJECTED_MAX], moved
        )

    def presence(self) -> bytes:
        """That we are there, and no more: all that is worth saying while no other is heard."""
        return self._encoded([], full=False)

    def _encoded(
        self,
        workers: list[_Told],
        full: bool,
        ejected: list[_Ejected] | None = None,
        moved: Sequence[Moved] = (),
    ) -> bytes:
        self._seq += 1
        places: dict[WorkerKey, int] = {}
        sessions = [(one.session, places.setdefault(one.worker, len(places))) for one in moved]
        return _encoder.encode(
            Inflight(
                v=VERSION,
                replica=self._replica,
                epoch=self._epoch,
                seq=self._seq,
                full=full,
                workers=workers,
                ejected=ejected or [],
                session_workers=[(key.worker_id, key.dp_rank) for key in places],
                sessions=sessions,
            )
        )


_Wanted = tuple[WorkerKey, Reserved, list[Step]]


def _bytes(wanted: list[_Wanted], steps_max: int) -> int:
    """What these workers take up in a message at most, with so many steps of each."""
    return sum(
        len(key.worker_id.encode()) + _WORKER_BYTES + _STEP_BYTES * min(len(steps), steps_max)
        for key, _, steps in wanted
    )


def _fits(wanted: list[_Wanted]) -> bool:
    """Whether one message has room for these workers, be it with their last step only."""
    return len(wanted) <= WORKERS_MAX and _bytes(wanted, 1) <= BYTES_MAX


def _cut(wanted: list[_Wanted]) -> tuple[list[_Wanted], list[_Wanted]]:
    """Those for which a message has room, and the rest; with most requests first."""
    if _fits(wanted):
        return wanted, []
    ordered = sorted(wanted, key=lambda one: -one[1].ours.requests)
    size = 0
    for i, one in enumerate(ordered):
        size += _bytes([one], 1)
        if i == WORKERS_MAX or size > BYTES_MAX:
            return ordered[:i], ordered[i:]
    return ordered, []


def _steps_max(wanted: list[_Wanted]) -> int:
    """Steps of each worker, so that the message has room for all: the more workers, the fewer."""
    steps_max = STEPS_MAX
    while steps_max > 1 and _bytes(wanted, steps_max) > BYTES_MAX:
        steps_max //= 2
    return steps_max


def _told(key: WorkerKey, load: Reserved, steps: list[Step], steps_max: int, now_s: float) -> _Told:
    load.changed = False
    aged = [
        (min(max(0.0, now_s - when_s), KEPT_S), requests, blocks)
        for when_s, requests, blocks in _thinned(steps, steps_max)
    ]
    return _Told(key.worker_id, key.dp_rank, load.ours.prefill_tokens, aged)


def _thinned(steps: list[Step], steps_max: int) -> list[Step]:
    """The last half of what there is room for, and some of the others."""
    if len(steps) <= steps_max:
        return steps
    half = steps_max // 2
    if not half:
        return steps[-1:]
    every = -(-(len(steps) - half) // half)
    return steps[:-half:every] + steps[-half:]


@dataclass(slots=True)
class _Worker:
    """What one replica told of one worker."""

    now: Totals
    steps: list[Step]
    """Times ascend."""

    def learn(self, now: Totals, told: list[Step], since_s: float) -> bool:
        """Takes over what was told of the time after since_s; whether that changes anything."""
        steps, changed = self.steps, now != self.now
        self.now = now
        del steps[bisect_right(steps, (max(since_s, told[0][0]), inf)) :]
        last_s, requests, blocks = steps[-1] if steps else (-inf, -1, -1)
        for step in told:
            if step[0] <= since_s and step is not told[-1]:
                continue
            if step[1] != requests or step[2] != blocks:
                when_s, requests, blocks = step
                steps.append(step if when_s >= last_s else (last_s, requests, blocks))
                changed = True
        return changed

    def forget_old(self, now_s: float) -> None:
        """Half of what is kept, as soon as that half is old or too much is kept."""
        half = len(self.steps) // 2
        if len(self.steps) > KEPT_STEPS_MAX or (half and self.steps[half][0] < now_s - KEPT_S):
            del self.steps[:half]


@dataclass(slots=True)
class _Peer:
    """One replica that is heard."""

    epoch: Epoch
    seq: int
    heard_at_s: float
    workers: dict[WorkerKey, _Worker] = field(default_factory=dict)
    whole: bool = False
    """Nothing that it told was lost, so that what we keep is finer than what it tells again."""

    def end_others(self, told: list[_Told], now_s: float) -> list[WorkerKey]:
        """Workers that were not told have nothing reserved; returns those that had."""
        here = {WorkerKey(one.worker_id, one.dp_rank) for one in told}
        ended = []
        for key in [key for key in self.workers if key not in here]:
            worker = self.workers[key]
            if worker.learn(_NOTHING, [(now_s, 0, 0)], now_s):
                ended.append(key)
            elif worker.steps[-1][0] < now_s - KEPT_S:
                del self.workers[key]
        return ended


class Peers:
    """Their side: the load that other replicas have reserved.

    Changed workers come in the order of the messages, never in a set's: the order in which loads
    change decides between equal workers, and a simulation with one seed has one outcome.
    """

    def __init__(self, replica: str) -> None:
        """replica: who we are, whose own messages come back to us."""
        self._replica = replica
        self._peers: dict[str, _Peer] = {}
        self.results: Counter[str] = Counter()
        """Messages by what became of them."""
        self._verdicts: tuple[str, list[Verdict]] | None = None
        self._moved: list[Moved] = []
        self.met = 0
        """Replicas that were heard and not known until then."""

    @override
    def __repr__(self) -> str:
        return f"<Peers {', '.join(sorted(self._peers)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._peers)

    def on_message(self, payload: bytes, now_s: float) -> KeysView[WorkerKey]:
        """Takes a message in; returns the workers whose load by peers may have changed."""
        changed: dict[WorkerKey, None] = {}
        self._take(payload, changed, now_s)
        return changed.keys()

    def _take(self, payload: bytes, changed: dict[WorkerKey, None], now_s: float) -> None:
        message = decode_inflight(payload)
        if isinstance(message, Unreadable):
            self.results[message.reason] += 1
            return
        if message.replica == self._replica:
            return
        peer = self._peers.get(message.replica)
        if peer is not None and message.epoch < peer.epoch:
            self.results["old_epoch"] += 1
            return
        if peer is not None and message.epoch > peer.epoch:  # it started again, with nothing
            changed.update(dict.fromkeys(self._forget(message.replica)))
            peer = None
        if peer is None:
            if len(self._peers) >= REPLICAS_MAX:
                self.results["too_many_replicas"] += 1
                return
            self.met += 1
            peer = self._peers[message.replica] = _Peer(message.epoch, 0, now_s)
        if message.seq <= peer.seq:
            self.results["out_of_order"] += 1
            return
        self.results["applied"] += 1
        whole = peer.whole and message.seq == peer.seq + 1
        since_s = peer.heard_at_s if whole else -inf
        peer.whole = whole or message.full
        peer.seq = message.seq
        peer.heard_at_s = now_s
        self._verdicts = (
            message.replica,
            [
                Verdict(WorkerKey(one.worker_id, one.dp_rank), one.left_s, one.cause)
                for one in message.ejected
            ],
        )
        workers = [WorkerKey(*one) for one in message.session_workers]
        self._moved = [Moved(session, workers[place]) for session, place in message.sessions]
        for one in message.workers:
            key = WorkerKey(one.worker_id, one.dp_rank)
            told = [(now_s - age_s, requests, blocks) for age_s, requests, blocks in one.steps]
            if (known := peer.workers.get(key)) is None:
                known = peer.workers[key] = _Worker(_NOTHING, [])
            if known.learn(Totals(*told[-1][1:], one.prefill_tokens), told, since_s):
                changed[key] = None
            known.forget_old(now_s)
        if message.full:
            changed.update(dict.fromkeys(peer.end_others(message.workers, now_s)))
        if len(peer.workers) > WORKERS_MAX:
            self.results["too_many_workers"] += 1
            changed.update(dict.fromkeys(self._forget(message.replica)))

    def take_verdicts(self) -> tuple[str, list[Verdict]] | None:
        """The replica that sent the last message, and all that it has ejected; None: the message
        did not count, or they were taken."""
        verdicts, self._verdicts = self._verdicts, None
        return verdicts

    def take_moved(self) -> list[Moved]:
        """The sessions of the last message; none if it did not count, or they were taken."""
        moved, self._moved = self._moved, []
        return moved

    def tick(self, now_s: float) -> KeysView[WorkerKey]:
        """Forgets who is silent; returns the workers whose load by peers changed."""
        silent = [name for name, peer in self._peers.items() if now_s - peer.heard_at_s > TTL_S]
        return {key: None for name in silent for key in self._forget(name)}.keys()

    def heard(self, worker: WorkerKey, time_s: float) -> tuple[Totals, tuple[int, int]]:
        """What all peers have reserved on a worker, and (requests, blocks) at a time before."""
        requests = blocks = prefill_tokens = requests_then = blocks_then = 0
        for peer in self._peers.values():
            known = peer.workers.get(worker)
            if known is None:
                continue
            now, steps = known.now, known.steps
            requests += now.requests
            blocks += now.blocks
            prefill_tokens += now.prefill_tokens
            # Of a time before all that was told: what was told first.
            held = steps[max(0, bisect_right(steps, (time_s, inf)) - 1)]
            requests_then += held[1]
            blocks_then += held[2]
        return Totals(requests, blocks, prefill_tokens), (requests_then, blocks_then)

    def ages_s(self, now_s: float) -> dict[str, float]:
        """Since each replica was heard."""
        return {name: now_s - peer.heard_at_s for name, peer in self._peers.items()}

    def _forget(self, replica: str) -> KeysView[WorkerKey]:
        return self._peers.pop(replica).workers.keys()
