"""Sessions: where the KV cache of each one's last request lies, as far as we have sent it there.

What lies there still is the index's to say: a session remembers the prompt's hashes, and whoever
holds the longest run of them holds the session. Where the index can't say (a stream that is not
trusted, a prompt that fills no block) it is where it was sent. Hashes stay in the replica that
picked. The others hear which worker it was (events/feed/peers.py), for affinity: 12 bytes when a
session comes to a worker, and in every minute of its use, since messages can be lost.

Pure: no clock, no I/O.

Laws:
- a session is known from its last pick on, for ttl_s, or until newer ones need its room;
- entries and bytes of hashes never exceed their bounds, but for one session's own;
- what was heard of a session is newer than what is known of it here, or is forgotten.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from math import inf

from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.feed.peers import SESSIONS_MAX, Moved
from indexer.identity import WorkerKey
from router.request.request import Session
from router.reservations.reservations import FORGOTTEN_SLICE, Reservation

TOLD_AGAIN_S = 60.0
"""After which a session that stays where it is is told to other replicas again, if it is used."""
TOLD_NAME_BYTES_MAX = 64 * 1024
"""Of the ids of sessions' workers in one message to other replicas, but for one of them."""
HASH_BYTES_MAX = 1 << 28
"""A thousand blocks, 16,000 tokens or more, of each of 32,768 sessions."""


class Sessions:
    """All that are remembered."""

    def __init__(
        self, ttl_s: float, entries_max: int, hash_bytes_max: int = HASH_BYTES_MAX
    ) -> None:
        self.forgotten: Counter[str] = Counter()
        """By reason: expired, no_room."""
        self._ttl_s = ttl_s
        self._entries_max = entries_max
        self._hash_bytes_max = hash_bytes_max
        self._hash_bytes = 0
        self._known: OrderedDict[str, Session] = OrderedDict()
        """By id, the one that was picked for longest ago in front."""
        self.tells = False
        """Whether other replicas are there to be told."""
        self._untold: dict[str, None] = {}
        """Some of those that are known."""
        self._heard: OrderedDict[int, tuple[WorkerKey, float]] = OrderedDict()
        """Hash of an id -> where another replica sent its last request, and when that was heard."""

    @property
    def heard(self) -> int:
        """Sessions whose last request went through another replica."""
        return len(self._heard)

    def __len__(self) -> int:
        return len(self._known)

    @override
    def __repr__(self) -> str:
        return f"<Sessions {len(self._known)} known, {self._hash_bytes} bytes of hashes>"

    def put(
        self,
        session_id: str,
        reservation: Reservation,
        block_size: int,
        lora_name: str,
        now_s: float,
    ) -> None:
        """A request of a session was picked for; an empty id is none."""
        if not session_id or not self._entries_max:
            return
        told_at_s = self._told_at_s(session_id, reservation.worker)
        self._drop(session_id)
        if self.tells and now_s - told_at_s >= TOLD_AGAIN_S:
            self._untold[session_id] = None
            told_at_s = now_s
        _, model, _ = reservation.fingerprint
        self._known[session_id] = Session(
            reservation.worker,
            model,
            lora_name,
            block_size,
            reservation.prefixes,
            reservation.prompt_tokens,
            now_s,
            told_at_s,
        )
        self._hash_bytes += reservation.prefixes.nbytes
        while len(self._known) > 1 and (
            len(self._known) > self._entries_max or self._hash_bytes > self._hash_bytes_max
        ):
            self._forget_oldest("no_room")

    def _told_at_s(self, session_id: str, worker: WorkerKey) -> float:
        """When others were told that a session is at this worker; -inf: they know another one, or
        are to be told. What was heard of it is older than what comes now."""
        heard = self._heard.pop(_hash(session_id), None) if self._heard else None
        known = self._known.get(session_id)
        if heard is not None or known is None or session_id in self._untold:
            return -inf
        return known.told_at_s if known.worker == worker else -inf

    def get(self, session_id: str) -> Session | None:
        """What is known of a session."""
        return self._known.get(session_id)

    def worker_of(self, session_id: str) -> WorkerKey | None:
        """Where a session's last request went, through whichever replica."""
        if self._heard and (heard := self._heard.get(_hash(session_id))) is not None:
            return heard[0]
        known = self._known.get(session_id)
        return None if known is None else known.worker

    def tell_all(self) -> None:
        """Another replica is met that was told of no session."""
        self._untold = dict.fromkeys(self._known)

    @property
    def untold(self) -> int:
        """Sessions that other replicas are to be told of."""
        return len(self._untold)

    def take_moved(self) -> list[Moved]:
        """Sessions to tell other replicas of: as many as one message has room for."""
        moved: list[Moved] = []
        names: dict[WorkerKey, None] = {}
        size = 0
        for session_id in self._untold:
            worker = self._known[session_id].worker
            if worker not in names:
                size += len(worker.worker_id.encode())
                names[worker] = None
            if moved and (len(moved) == SESSIONS_MAX or size > TOLD_NAME_BYTES_MAX):
                break
            moved.append(Moved(_hash(session_id), worker))
        for session_id in list(islice(self._untold, len(moved))):
            del self._untold[session_id]
        return moved

    def hear(self, moved: Iterable[Moved], now_s: float) -> None:
        """Another replica told where sessions' last requests went, a moment ago."""
        if not self._entries_max:
            return
        for session, worker in moved:
            self._heard.pop(session, None)
            self._heard[session] = worker, now_s
            if len(self._heard) > self._entries_max:
                self._heard.popitem(last=False)
                self.forgotten["no_room"] += 1

    def due(self, now_s: float) -> bool:
        """Whether the time of any is over."""
        oldest = next(iter(self._known.values()), None)
        if oldest is not None and now_s - oldest.picked_at_s >= self._ttl_s:
            return True
        return self._heard_due(now_s)

    def _heard_due(self, now_s: float) -> bool:
        _, at_s = next(iter(self._heard.values()), (None, now_s))
        return now_s - at_s >= self._ttl_s

    def forget_old(self, now_s: float) -> None:
        """Drops those whose time is over: FORGOTTEN_SLICE of them at most."""
        for _ in range(FORGOTTEN_SLICE):
            if self._heard_due(now_s):
                self._heard.popitem(last=False)
                self.forgotten["expired"] += 1
            elif self.due(now_s):
                self._forget_oldest("expired")
            else:
                return

    def _forget_oldest(self, reason: str) -> None:
        self._drop(next(iter(self._known)))
        self.forgotten[reason] += 1

    def _drop(self, session_id: str) -> None:
        session = self._known.pop(session_id, None)
        if session is not None:
            self._hash_bytes -= session.prefixes.nbytes
            self._untold.pop(session_id, None)


def _hash(session_id: str) -> int:
    return xxh3_64_intdigest(session_id.encode())
