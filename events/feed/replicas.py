"""In-flight messages between router replicas: the load that each has reserved on each worker.

    our reservations ──a message every few hundredths of a second──> replicas, for any recent time

Totals are absolute and have an age; they are never deltas. So the next message makes good for a
lost message, and every second a full message does. Ages matter because an engine's load sample is
from an earlier time, and totals of that time are subtracted from it. A replica's load counts while
its messages come; the requests of a silent replica show in the engines' metrics.

A message has, too, what waits in the router for workers with room (events/feed/demand.py).

Pure: bytes and `now_s` in, changed workers out.

Laws:
- a session is sent when its requests go to another worker, once, and again in every minute of use;
- an ejection is sent with every message while it holds; replicas of releases without ejections
  ignore it;
- only messages of a replica's newest epoch count, in order, each at most once;
- a replica's totals, and what waits in it, are forgotten `TTL_S` after its last message;
- the sum over other replicas at a time has each replica's totals at that time, or at the nearest
  known time.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from typing_extensions import override

from events.feed.demand import DEMANDS_MAX, Demand, DemandEntry, entries
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
"""Seconds between full messages, which also announce this replica."""
WORKERS_MAX = 8192
"""Workers in a message."""
BYTES_MAX = 768 * 1024
"""Bytes of the workers in a message. A NATS server accepts 1 MiB by default; the rest is left for
the message's other fields."""
_WORKER_BYTES = 17
"""Most bytes of a worker without its id and steps: the heads of three arrays and a text, a rank and
prefill tokens."""
_STEP_BYTES = 20
"""Most bytes of a step: the head of an array, a float and two counts."""
REPLICAS_MAX = 64
"""Other replicas whose load is kept at the same time."""
STEPS_MAX = 16
"""Steps of a worker in a message; fewer where BYTES_MAX would be passed. Of more steps, a message
has the latest STEPS_MAX / 2 and a sample of the earlier ones."""
LOST_MAX = 1024
"""Most Demands kept of replicas that are gone, until `take_lost`."""
KEPT_STEPS_MAX = 1024
"""Steps kept of one replica for one worker."""
KEPT_S = 3.5
"""Least seconds for which steps are kept: after 3 s without a sample the worker is unhealthy."""

Step = tuple[float, int, int]
"""(beginning in Unix time, requests, blocks): totals until the next step, or now."""
_Age = Annotated[float, Meta(ge=0, le=3600)]
_Rank = Annotated[int, Meta(ge=0, le=99999)]


EJECTED_MAX = 512
"""Ejections in a message; further ones are left out, and end by time in the other replicas."""
SESSIONS_MAX = 2048
"""Sessions in a message: 25 KB, and the ids of their workers. The next message has the others."""
_HASH_MAX = (1 << 64) - 1


class Verdict(NamedTuple):
    """A worker that a replica has ejected, since requests failed there."""

    worker: WorkerKey
    left_s: float
    """Seconds until a request tries the worker again."""
    cause: str
    """Name of a cause in router/fleet/health/outliers.py."""


class Moved(NamedTuple):
    """The worker of a session's last request."""

    session: int
    """64 bits of its id's hash: ids stay in the replica that received them."""
    worker: WorkerKey


class Totals(NamedTuple):
    """Totals that a replica has reserved on a worker."""

    requests: int = 0
    blocks: int = 0
    """Distinct blocks of prompts."""
    prefill_tokens: int = 0
    """Prompt tokens not computed yet."""


class Reserved(Protocol):
    """Interface: the load that this router has reserved on one worker, now and a while ago."""

    changed: bool
    """Whether it changed since the last message to other replicas."""

    @property
    def ours(self) -> Totals: ...

    def steps(self, since_s: float) -> list[Step]:
        """The step that held at since_s (Unix time), and each later step; times ascend."""


class _WorkerTotals(msgspec.Struct, frozen=True, array_like=True):
    """The totals that a replica has reserved on one worker, as sent."""

    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    prefill_tokens: Count
    steps: Annotated[list[tuple[_Age, Count, Count]], Meta(min_length=1, max_length=STEPS_MAX)]
    """(age, requests, blocks), oldest first: totals until the next step, or now."""


class _Ejected(msgspec.Struct, frozen=True, array_like=True):
    """A Verdict, as sent."""

    worker_id: Name
    dp_rank: Annotated[int, Meta(ge=0, le=99999)]
    left_s: _Age
    cause: Name


class Inflight(msgspec.Struct, frozen=True, tag="inflight", tag_field="kind", omit_defaults=True):
    """A message of one replica: the load that it has reserved, its ejections, sessions, queue."""

    v: int
    replica: Name
    epoch: Epoch
    seq: SequenceNumber
    full: bool
    """True: workers that are absent have nothing reserved. False: they are unchanged."""
    workers: Annotated[list[_WorkerTotals], Meta(max_length=WORKERS_MAX)]
    ejected: Annotated[list[_Ejected], Meta(max_length=WORKERS_MAX)] = []
    """All its ejections; optional, since older replicas neither write nor read it."""
    session_workers: Annotated[list[tuple[Name, _Rank]], Meta(max_length=SESSIONS_MAX)] = []
    """Ids and ranks that `sessions` refers to."""
    sessions: Annotated[list[tuple[int, _Rank]], Meta(max_length=SESSIONS_MAX)] = []
    """(hash of a session's id, place in session_workers) of sessions whose worker is another than
    in earlier messages; optional, as `ejected`."""
    demand: Annotated[list[DemandEntry], Meta(max_length=DEMANDS_MAX)] = []
    """Requests that wait in the replica for workers with room; optional, as `ejected`."""
    stopped: Annotated[list[DemandEntry], Meta(max_length=DEMANDS_MAX)] = []
    """Requests that waited when the replica stopped, and were refused; optional, as `ejected`."""


_NOTHING = Totals()
_decoder = msgspec.msgpack.Decoder(Inflight)
_encoder = msgspec.msgpack.Encoder()


def decode_inflight(payload: bytes) -> Inflight | Unreadable:
    """Reads a message of the inflight subject. Never raises."""
    if len(payload) > MESSAGE_BYTES_MAX:
        return Unreadable("too_large", f"{len(payload)} bytes")
    try:
        message = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable("malformed", str(error))
    workers = len(message.session_workers)
    if any(place >= workers or not 0 <= value <= _HASH_MAX for value, place in message.sessions):
        return Unreadable("malformed", "a session has no worker, or a hash outside [0, 2^64)")
    if not all(entry.is_sound for entry in (*message.demand, *message.stopped)):
        return Unreadable("malformed", "a tenant has a hash outside [0, 2^64)")
    return message


class Teller:
    """Writes this replica's messages to other replicas."""

    def __init__(self, replica: str, epoch: Epoch) -> None:
        self._replica = replica
        self._epoch = epoch
        self._seq = 0
        self._sent_at_s = -inf
        self.full_due_s = -inf
        """When the next full message is due."""
        self.untold = 0
        """Workers that did not fit in their message, over all messages."""
        self._ejected: list[tuple[WorkerKey, str]] = []
        """Ejections of the last message, with their causes."""
        self._demand: list[object] = []
        """`Demand.news` of each entry in the last message."""
        self.is_cut = False
        """Whether some workers did not fit in the last message: the next message, due at once, has
        them."""

    def begin_anew(self) -> None:
        """Makes the next message a full message with all kept steps, for a new replica."""
        self.full_due_s = self._sent_at_s = -inf

    def message(
        self,
        loads: Mapping[WorkerKey, Reserved],
        now_s: float,
        verdicts: Sequence[Verdict] = (),
        moved: Sequence[Moved] = (),
        demand: Sequence[Demand] = (),
        stopped: Sequence[Demand] = (),
    ) -> bytes | None:
        """The next message; None when nothing changed since the last message and no full message is
        due.

        moved: SESSIONS_MAX at most. demand: the requests that wait here. stopped: those that waited
        when this replica stopped. Marks the loads in the message as unchanged. A full message takes
        time in proportion to the workers, others in proportion to the changed workers.
        """
        self.is_cut = False
        before, self._demand = self._demand, [each.news for each in demand]
        full = now_s >= self.full_due_s
        since_s = self._sent_at_s
        if full:
            self.full_due_s = now_s + FULL_S
            wanted = [(key, load, load.steps(since_s)) for key, load in loads.items()]
            busy = [row for row in wanted if len(row[2]) > 1 or any(row[1].ours)]
            full = _fits(busy)
            # In a cut message, an absent worker doesn't mean that nothing is reserved there.
            sent, rest = (busy, []) if full else _cut(wanted)
            if full:
                for _, load, _ in wanted:
                    load.changed = False
        else:
            sent, rest = _cut(
                [(key, load, load.steps(since_s)) for key, load in loads.items() if load.changed]
            )
            same_ejections = self._ejected == [(each.worker, each.cause) for each in verdicts]
            if not sent and not moved and same_ejections and before == self._demand:
                return None
        self._ejected = [(each.worker, each.cause) for each in verdicts]
        self._sent_at_s = now_s
        self.untold += len(rest)
        self.is_cut = bool(rest)
        for _, load, _ in rest:
            load.changed = True
        steps_max = _steps_max(sent)
        ejected = [_Ejected(*key, min(left_s, 3600.0), cause) for key, left_s, cause in verdicts]
        return self._encoded(
            [_totals(*row, steps_max, now_s) for row in sent],
            full,
            ejected[:EJECTED_MAX],
            moved,
            demand,
            stopped,
        )

    def presence(self) -> bytes:
        """A message that only announces this replica; sent while no replica is known."""
        return self._encoded([], full=False)

    def _encoded(
        self,
        workers: list[_WorkerTotals],
        full: bool,
        ejected: list[_Ejected] | None = None,
        moved: Sequence[Moved] = (),
        demand: Sequence[Demand] = (),
        stopped: Sequence[Demand] = (),
    ) -> bytes:
        self._seq += 1
        places: dict[WorkerKey, int] = {}
        sessions = [(each.session, places.setdefault(each.worker, len(places))) for each in moved]
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
                demand=entries(demand),
                stopped=entries(stopped),
            )
        )


_Wanted = tuple[WorkerKey, Reserved, list[Step]]


def _bytes(wanted: list[_Wanted], steps_max: int) -> int:
    """Most bytes of these workers in a message, with at most steps_max steps of each."""
    return sum(
        len(key.worker_id.encode()) + _WORKER_BYTES + _STEP_BYTES * min(len(steps), steps_max)
        for key, _, steps in wanted
    )


def _fits(wanted: list[_Wanted]) -> bool:
    """Whether a message holds these workers, if need be with their last step only."""
    return len(wanted) <= WORKERS_MAX and _bytes(wanted, 1) <= BYTES_MAX


def _cut(wanted: list[_Wanted]) -> tuple[list[_Wanted], list[_Wanted]]:
    """The workers that a message holds, those with most requests first, and the rest."""
    if _fits(wanted):
        return wanted, []
    ordered = sorted(wanted, key=lambda row: -row[1].ours.requests)
    size = 0
    for i, row in enumerate(ordered):
        size += _bytes([row], 1)
        if i == WORKERS_MAX or size > BYTES_MAX:
            return ordered[:i], ordered[i:]
    return ordered, []


def _steps_max(wanted: list[_Wanted]) -> int:
    """Most steps of each worker, up to STEPS_MAX, with which these workers fit in a message."""
    steps_max = STEPS_MAX
    while steps_max > 1 and _bytes(wanted, steps_max) > BYTES_MAX:
        steps_max //= 2
    return steps_max


def _totals(
    key: WorkerKey, load: Reserved, steps: list[Step], steps_max: int, now_s: float
) -> _WorkerTotals:
    load.changed = False
    aged = [
        (min(max(0.0, now_s - when_s), KEPT_S), requests, blocks)
        for when_s, requests, blocks in _thinned(steps, steps_max)
    ]
    return _WorkerTotals(key.worker_id, key.dp_rank, load.ours.prefill_tokens, aged)


def _thinned(steps: list[Step], steps_max: int) -> list[Step]:
    """Steps, steps_max at most: the latest, and a regular sample of the others."""
    if len(steps) <= steps_max:
        return steps
    half = steps_max // 2
    if not half:
        return steps[-1:]
    every = -(-(len(steps) - half) // half)
    return steps[:-half:every] + steps[-half:]


@dataclass(slots=True)
class _Worker:
    """One replica's totals on one worker."""

    now: Totals
    steps: list[Step]
    """Times ascend."""

    def learn(self, now: Totals, received: list[Step], since_s: float) -> bool:
        """Replaces the totals, and the steps after since_s; returns whether anything changed."""
        steps, changed = self.steps, now != self.now
        self.now = now
        del steps[bisect_right(steps, (max(since_s, received[0][0]), inf)) :]
        last_s, requests, blocks = steps[-1] if steps else (-inf, -1, -1)
        for step in received:
            if step[0] <= since_s and step is not received[-1]:
                continue
            if step[1] != requests or step[2] != blocks:
                when_s, requests, blocks = step
                steps.append(step if when_s >= last_s else (last_s, requests, blocks))
                changed = True
        return changed

    def forget_old(self, now_s: float) -> None:
        """Drops the older half of the steps once that half is old, or over KEPT_STEPS_MAX."""
        half = len(self.steps) // 2
        if len(self.steps) > KEPT_STEPS_MAX or (half and self.steps[half][0] < now_s - KEPT_S):
            del self.steps[:half]


@dataclass(slots=True)
class _Replica:
    """Another replica, whose messages come."""

    epoch: Epoch
    seq: int
    heard_at_s: float
    workers: dict[WorkerKey, _Worker] = field(default_factory=dict)
    demand: tuple[Demand, ...] = ()
    has_stopped: bool = False
    whole: bool = False
    """No message was lost: the kept steps are finer than the steps in a full message."""

    def reserved(self) -> Totals:
        """The totals that the replica has reserved on all workers together."""
        of_workers = [worker.now for worker in self.workers.values()]
        return Totals(*map(sum, zip(*of_workers, strict=True))) if of_workers else _NOTHING

    def end_others(self, received: list[_WorkerTotals], now_s: float) -> list[WorkerKey]:
        """Ends the totals of workers that are not in a full message; returns those changed."""
        here = {WorkerKey(each.worker_id, each.dp_rank) for each in received}
        ended = []
        for key in [key for key in self.workers if key not in here]:
            worker = self.workers[key]
            if worker.learn(_NOTHING, [(now_s, 0, 0)], now_s):
                ended.append(key)
            elif worker.steps[-1][0] < now_s - KEPT_S:
                del self.workers[key]
        return ended


class Replicas:
    """The load that other replicas have reserved.

    Changed workers come in the order of the messages, never in a set's: the order in which loads
    change decides between equal workers, and a simulation must have the same outcome for a seed.
    """

    def __init__(self, replica: str) -> None:
        """replica: our own name; messages with it come back to us, and are ignored."""
        self._replica = replica
        self._replicas: dict[str, _Replica] = {}
        self.results: Counter[str] = Counter()
        """Result -> messages"""
        self._verdicts: tuple[str, list[Verdict]] | None = None
        self._moved: list[Moved] = []
        self.met = 0
        """Replicas that were new when their message came."""
        self.demands = 0
        """Changes of `demand`."""
        self._lost: list[tuple[float, Demand]] = []
        """(when a replica was gone, what had waited in it); LOST_MAX at most."""

    @override
    def __repr__(self) -> str:
        return f"<Replicas {', '.join(sorted(self._replicas)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._replicas)

    def on_message(self, payload: bytes, now_s: float) -> KeysView[WorkerKey]:
        """Applies a message; returns the workers whose load by other replicas may have changed."""
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
        replica = self._replicas.get(message.replica)
        if replica is not None and message.epoch < replica.epoch:
            self.results["old_epoch"] += 1
            return
        if (
            replica is not None and message.epoch > replica.epoch
        ):  # it restarted, with nothing reserved
            self._lose(replica.demand, now_s)
            changed.update(dict.fromkeys(self._forget(message.replica)))
            replica = None
        if replica is None:
            if len(self._replicas) >= REPLICAS_MAX:
                self.results["too_many_replicas"] += 1
                return
            self.met += 1
            replica = self._replicas[message.replica] = _Replica(message.epoch, 0, now_s)
        if message.seq <= replica.seq:
            self.results["out_of_order"] += 1
            return
        self.results["applied"] += 1
        whole = replica.whole and message.seq == replica.seq + 1
        since_s = replica.heard_at_s if whole else -inf
        replica.whole = whole or message.full
        replica.seq = message.seq
        replica.heard_at_s = now_s
        self._verdicts = (
            message.replica,
            [
                Verdict(WorkerKey(each.worker_id, each.dp_rank), each.left_s, each.cause)
                for each in message.ejected
            ],
        )
        if message.demand or replica.demand:
            replica.demand = tuple(entry.demand for entry in message.demand)
            self.demands += 1
        if message.stopped and not replica.has_stopped:
            replica.has_stopped = True
            self._lose([entry.demand for entry in message.stopped], now_s)
        workers = [WorkerKey(*names) for names in message.session_workers]
        self._moved = [Moved(session, workers[place]) for session, place in message.sessions]
        for row in message.workers:
            key = WorkerKey(row.worker_id, row.dp_rank)
            steps = [(now_s - age_s, requests, blocks) for age_s, requests, blocks in row.steps]
            if (known := replica.workers.get(key)) is None:
                known = replica.workers[key] = _Worker(_NOTHING, [])
            if known.learn(Totals(*steps[-1][1:], row.prefill_tokens), steps, since_s):
                changed[key] = None
            known.forget_old(now_s)
        if message.full:
            changed.update(dict.fromkeys(replica.end_others(message.workers, now_s)))
        if len(replica.workers) > WORKERS_MAX:
            self.results["too_many_workers"] += 1
            changed.update(dict.fromkeys(self._forget(message.replica)))

    def take_verdicts(self) -> tuple[str, list[Verdict]] | None:
        """The replica that sent the last message, and all its ejections; None: that message was
        ignored, or its ejections were taken before."""
        verdicts, self._verdicts = self._verdicts, None
        return verdicts

    def take_moved(self) -> list[Moved]:
        """The sessions of the last message; empty: it was ignored, or they were taken before."""
        moved, self._moved = self._moved, []
        return moved

    def tick(self, now_s: float) -> KeysView[WorkerKey]:
        """Forgets silent replicas; returns the workers whose load by other replicas changed."""
        silent = [
            name for name, replica in self._replicas.items() if now_s - replica.heard_at_s > TTL_S
        ]
        for name in silent:
            self._lose(self._replicas[name].demand, now_s)
        return {key: None for name in silent for key in self._forget(name)}.keys()

    def heard(self, worker: WorkerKey, time_s: float) -> tuple[Totals, tuple[int, int]]:
        """The other replicas' totals on a worker now, and their (requests, blocks) at time_s."""
        requests = blocks = prefill_tokens = requests_then = blocks_then = 0
        for replica in self._replicas.values():
            known = replica.workers.get(worker)
            if known is None:
                continue
            now, steps = known.now, known.steps
            requests += now.requests
            blocks += now.blocks
            prefill_tokens += now.prefill_tokens
            # Before the first step: the first step's totals.
            held = steps[max(0, bisect_right(steps, (time_s, inf)) - 1)]
            requests_then += held[1]
            blocks_then += held[2]
        return Totals(requests, blocks, prefill_tokens), (requests_then, blocks_then)

    def take_lost(self) -> list[tuple[float, Demand]]:
        """Demands of replicas that stopped, restarted or fell silent since the last call, with the
        times.
        """
        lost, self._lost = self._lost, []
        return lost

    def demand(self) -> dict[str, tuple[Demand, ...]]:
        """Waiting requests of each replica, by its name; replicas without any are left out."""
        return {name: replica.demand for name, replica in self._replicas.items() if replica.demand}

    def ages_s(self, now_s: float) -> dict[str, float]:
        """Replica -> seconds since its last message."""
        return {name: now_s - replica.heard_at_s for name, replica in self._replicas.items()}

    def reserved(self) -> dict[str, Totals]:
        """Load that each replica has reserved, over all workers."""
        return {name: replica.reserved() for name, replica in self._replicas.items()}

    def _lose(self, demand: Iterable[Demand], now_s: float) -> None:
        self._lost += [(now_s, each) for each in demand]
        del self._lost[:-LOST_MAX]

    def _forget(self, replica: str) -> KeysView[WorkerKey]:
        forgotten = self._replicas.pop(replica)
        self.demands += bool(forgotten.demand)
        return forgotten.workers.keys()
