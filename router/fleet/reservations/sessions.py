"""Sessions: the worker with the KV cache of each session's last request.

The index knows which blocks are still there: a session keeps the prompt's hashes, and the worker
with the longest run of them holds the session. Where the index can't say (a stream that is not
trusted, a prompt that fills no block) the session is where its last request went. Hashes stay in
the replica that picked. Other replicas get the worker's name (events/feed/replicas.py), for
affinity: 12 bytes when a session comes to a worker, and in every minute of its use, since messages
can be lost.

Pure: no clock, no I/O.

Laws:
- a session is known from its last pick on, for ttl_s, or until newer ones need its room;
- entries and bytes of hashes never exceed their bounds, but for one session's own;
- a place learned from another replica is newer than the place known here, or is forgotten.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from math import inf

from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.feed.replicas import SESSIONS_MAX, Moved
from indexer.identity import WorkerKey
from router.fleet.reservations.reservations import FORGOTTEN_SLICE, Reservation
from router.request.request import Session

ANNOUNCED_AGAIN_S = 60.0
"""Seconds after which a used session that stays at its worker is announced to other replicas
again."""
ANNOUNCED_NAME_BYTES_MAX = 64 * 1024
"""Most bytes of worker ids in a message about sessions to other replicas; a longer id is sent
alone."""
ENTRIES_MAX = 65_536
"""Remembered sessions, and as many of other replicas: 72 new ones a second for 15 minutes."""
HASH_BYTES_MAX = 1 << 28
"""Bytes of all sessions' hashes: 1,000 blocks (16,000 tokens or more) for each of 32,768."""


class Sessions:
    """The remembered sessions."""

    def __init__(
        self, ttl_s: float, entries_max: int = ENTRIES_MAX, hash_bytes_max: int = HASH_BYTES_MAX
    ) -> None:
        self.forgotten: Counter[str] = Counter()
        """Forgotten sessions by reason: expired, no_room."""
        self._ttl_s = ttl_s
        self._entries_max = entries_max
        self._hash_bytes_max = hash_bytes_max
        self._hash_bytes = 0
        self._known: OrderedDict[str, Session] = OrderedDict()
        """Sessions by id, the one with the oldest pick in front."""
        self.announces = False
        """Whether there are other replicas, to which sessions are announced."""
        self._unannounced: dict[str, None] = {}
        """Ids of known sessions that are still to be announced to other replicas."""
        self._learned: OrderedDict[int, tuple[WorkerKey, float]] = OrderedDict()
        """Hash of a session's id -> the worker to which another replica sent its last request, and
        when this replica learned that."""

    @property
    def elsewhere(self) -> int:
        """Number of sessions whose last request went through another replica."""
        return len(self._learned)

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
        """Records a session's pick; nothing is recorded for an empty id."""
        if not session_id:
            return
        announced_at_s = self._announced_at_s(session_id, reservation.worker)
        self._drop(session_id)
        if self.announces and now_s - announced_at_s >= ANNOUNCED_AGAIN_S:
            self._unannounced[session_id] = None
            announced_at_s = now_s
        _, _, model, _ = reservation.fingerprint
        self._known[session_id] = Session(
            reservation.worker,
            model,
            lora_name,
            block_size,
            reservation.prefixes,
            reservation.prompt_tokens,
            now_s,
            announced_at_s,
        )
        self._hash_bytes += reservation.prefixes.nbytes
        while len(self._known) > 1 and (
            len(self._known) > self._entries_max or self._hash_bytes > self._hash_bytes_max
        ):
            self._forget_oldest("no_room")

    def _announced_at_s(self, session_id: str, worker: WorkerKey) -> float:
        """Time when this worker of a session was announced to other replicas; -inf: they know
        another worker, or none. Drops the worker learned from another replica, outdated by now."""
        other = self._learned.pop(_hash(session_id), None) if self._learned else None
        known = self._known.get(session_id)
        if other is not None or known is None or session_id in self._unannounced:
            return -inf
        return known.announced_at_s if known.worker == worker else -inf

    def get(self, session_id: str) -> Session | None:
        """What is remembered of a session's last request; None: nothing."""
        return self._known.get(session_id)

    def worker_of(self, session_id: str) -> WorkerKey | None:
        """Worker of a session's last request, through whichever replica; None: unknown."""
        if self._learned and (other := self._learned.get(_hash(session_id))) is not None:
            return other[0]
        known = self._known.get(session_id)
        return None if known is None else known.worker

    def announce_all(self) -> None:
        """Has all sessions announced again, for a new replica."""
        self._unannounced = dict.fromkeys(self._known)

    @property
    def unannounced(self) -> int:
        """Number of sessions that are still to be announced to other replicas."""
        return len(self._unannounced)

    def take_moved(self) -> list[Moved]:
        """Sessions for the next message to other replicas, as many as fit in it."""
        moved: list[Moved] = []
        names: dict[WorkerKey, None] = {}
        size = 0
        for session_id in self._unannounced:
            worker = self._known[session_id].worker
            if worker not in names:
                size += len(worker.worker_id.encode())
                names[worker] = None
            if moved and (len(moved) == SESSIONS_MAX or size > ANNOUNCED_NAME_BYTES_MAX):
                break
            moved.append(Moved(_hash(session_id), worker))
        for session_id in list(islice(self._unannounced, len(moved))):
            del self._unannounced[session_id]
        return moved

    def hear(self, moved: Iterable[Moved], now_s: float) -> None:
        """Records the workers of sessions' last requests, as another replica announced them."""
        for session, worker in moved:
            self._learned.pop(session, None)
            self._learned[session] = worker, now_s
            if len(self._learned) > self._entries_max:
                self._learned.popitem(last=False)
                self.forgotten["no_room"] += 1

    def due(self, now_s: float) -> bool:
        """Whether any session was not used for ttl_s."""
        oldest = next(iter(self._known.values()), None)
        if oldest is not None and now_s - oldest.picked_at_s >= self._ttl_s:
            return True
        return self._learned_due(now_s)

    def _learned_due(self, now_s: float) -> bool:
        _, at_s = next(iter(self._learned.values()), (None, now_s))
        return now_s - at_s >= self._ttl_s

    def forget_old(self, now_s: float) -> None:
        """Forgets sessions that were not used for ttl_s, FORGOTTEN_SLICE of them at most."""
        for _ in range(FORGOTTEN_SLICE):
            if self._learned_due(now_s):
                self._learned.popitem(last=False)
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
            self._unannounced.pop(session_id, None)


def _hash(session_id: str) -> int:
    return xxh3_64_intdigest(session_id.encode())
