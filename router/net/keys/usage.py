"""Counts what one identity uses in this process, and holds it against its limits. Pure.

Law: a call or item past a limit is refused before any work for it, and uses nothing of the limit;
a prompt that comes as a text is held against `reservations` once more when it has its tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Protocol

from router.net.keys.identity import Identity
from router.request.refusal import Reason, Refusal

PRUNE_S = 0.05
"""Least seconds between two checks which of an identity's reservations have ended."""
MIB = 1 << 20


class Held(Protocol):
    """Interface: an open reservation of the identity."""

    @property
    def id(self) -> str: ...

    @property
    def ended(self) -> object | None: ...


class Bucket:
    """A token bucket: lets an amount of `rate` pass each second, at most that of 1 s at once."""

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._left = max(1.0, rate)
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> float:
        """Takes an amount. Returns 0, or the seconds after which to try again. An amount above one
        second's passes when the bucket is full, and later ones wait longer.
        """
        burst = max(1.0, self.rate)
        self._left = min(burst, self._left + (now_s - self._at_s) * self.rate)
        self._at_s = now_s
        needed = min(amount, burst)
        if self._left < needed:
            return (needed - self._left) / self.rate
        self._left -= amount
        return 0.0

    def owe(self, amount: float, now_s: float) -> None:
        """Takes an amount that was used already, even if later ones have to wait."""
        self.take(0, now_s)
        self._left -= amount


class Usage:
    """One identity's use of the process: requests, bytes, streams and open reservations."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self.streams = 0
        self.waiting = 0
        """Requests that wait for a worker; each counts as an open reservation."""
        self.refused: Counter[str] = Counter()
        """Calls and items past a limit, by limit."""
        self._open: dict[str, Held] = {}
        self._pruned_s = -inf
        self._requests: Bucket | None = None
        self._bytes: Bucket | None = None
        self.follow(identity)

    def follow(self, identity: Identity) -> None:
        """Takes on the identity as the key file has it, with its limits; what is used goes on to
        count."""
        self.identity, limits, now_s = identity, identity.limits, self._clock()
        self._requests = _bucket(limits.requests_per_s, now_s, self._requests)
        self._bytes = _bucket(limits.mib_per_s and limits.mib_per_s * MIB, now_s, self._bytes)

    def message(self, size: int) -> None:
        """Counts a message of `size` bytes; raises Refusal beyond a limit."""
        if self._bytes is not None and (wait_s := self._bytes.take(size, self._clock())):
            raise self._over("mib_per_s", wait_s)

    def exceeded(self, size: int) -> None:
        """Counts bytes that a message has beyond its announced size, which `message` counted. The
        message is not refused; later ones are until limits.mib_per_s allows these bytes."""
        if self._bytes is not None:
            self._bytes.owe(size, self._clock())

    def request(self, *, rate: bool = True, reserves: bool = True) -> None:
        """Counts a request; raises Refusal beyond a limit. rate: False for a request that was
        counted before. reserves: False for one that gets no reservation."""
        now_s, most = self._clock(), self.identity.limits.reservations
        if reserves and most is not None and len(self._open) + self.waiting >= most:
            self._prune(now_s)
            if len(self._open) + self.waiting >= most:
                raise self._over("reservations", PRUNE_S)
        if rate and self._requests is not None and (wait_s := self._requests.take(1, now_s)):
            raise self._over("requests_per_s", wait_s)

    def reserved(self, reservation: Held) -> None:
        """Adds the reservation of a request that got a worker."""
        if self.identity.limits.reservations is not None:
            self._open[reservation.id] = reservation

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream while it is open; raises Refusal beyond a limit."""
        most = self.identity.limits.streams
        if most is not None and self.streams >= most:
            raise self._over("streams", 1.0)
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def _prune(self, now_s: float) -> None:
        if now_s - self._pruned_s >= PRUNE_S:
            self._pruned_s = now_s
            self._open = {key: held for key, held in self._open.items() if held.ended is None}

    def _over(self, limit: str, wait_s: float) -> Refusal:
        self.refused[limit] += 1
        return Refusal(
            Reason.KEY_LIMIT,
            f"this key is at its limit `{limit}`",
            retry_after_s=wait_s,
            metadata={"limit": limit},
        )


def _bucket(rate: float | None, now_s: float, before: Bucket | None) -> Bucket | None:
    if rate is None or before is None:
        return None if rate is None else Bucket(rate, now_s)
    before.rate = rate
    return before
