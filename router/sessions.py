"""Sessions: where the KV cache of each one's last request lies, as far as we have sent it there.

What lies there still is the index's to say: a session remembers the prompt's hashes, and whoever
holds the longest run of them holds the session. Where the index can't say (a stream that is not
trusted, a prompt that fills no block) it is where it was sent. A replica knows its own picks; what
went through another one is known there.

Pure: no clock, no I/O.

Laws:
- a session is known from its last pick on, for ttl_s, or until newer ones need its room;
- entries and bytes of hashes never exceed their bounds, but for one session's own.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from typing_extensions import override

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.reservations import FORGOTTEN_SLICE, Reservation

HASH_BYTES_MAX = 1 << 28
"""A thousand blocks, 16,000 tokens or more, of each of 32,768 sessions."""


@dataclass(frozen=True, slots=True)
class Session:
    """One session's last request."""

    worker: WorkerKey
    """That brought out its answer."""
    model: str
    """By the name that the request gave it."""
    lora_name: str
    block_size: int
    """0: the worker had not told its own."""
    prefixes: HashArray
    """Of the prompt's full blocks."""
    prompt_tokens: int
    picked_at_s: float


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
        self._drop(session_id)
        _, model, _ = reservation.fingerprint
        self._known[session_id] = Session(
            reservation.worker,
            model,
            lora_name,
            block_size,
            reservation.prefixes,
            reservation.prompt_tokens,
            now_s,
        )
        self._hash_bytes += reservation.prefixes.nbytes
        while len(self._known) > 1 and (
            len(self._known) > self._entries_max or self._hash_bytes > self._hash_bytes_max
        ):
            self._forget_oldest("no_room")

    def get(self, session_id: str) -> Session | None:
        """What is known of a session."""
        return self._known.get(session_id)

    def due(self, now_s: float) -> bool:
        """Whether the time of any is over."""
        oldest = next(iter(self._known.values()), None)
        return oldest is not None and now_s - oldest.picked_at_s >= self._ttl_s

    def forget_old(self, now_s: float) -> None:
        """Drops those whose time is over: FORGOTTEN_SLICE of them at most."""
        for _ in range(FORGOTTEN_SLICE):
            if not self.due(now_s):
                return
            self._forget_oldest("expired")

    def _forget_oldest(self, reason: str) -> None:
        self._drop(next(iter(self._known)))
        self.forgotten[reason] += 1

    def _drop(self, session_id: str) -> None:
        session = self._known.pop(session_id, None)
        if session is not None:
            self._hash_bytes -= session.prefixes.nbytes
