"""The load of workers: what engines report, fused with what we and our peers have sent them.

    external = max(0, reported - ours and theirs at the time of the sample)
    load     = external + ours now + theirs now

so that nothing is counted twice, work that others send shows, and our own shows at once. *Theirs*
is what other router replicas say that they have reserved (events/inflight.py).

Laws:
- `ours` is the sum over the reservations that are open, a block that several use counted once;
- no load is ever negative, or not a number.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import itemgetter

from events.inflight import Totals
from indexer.hashing import HashArray
from indexer.kernel import BlockUsers

HISTORY_MAX = 8192
"""Changes of `ours` kept a worker, to look back to the time of its last sample."""
HISTORY_S = 10.0
"""How far back they are kept: a sample comes every second, and after 3 the worker is unhealthy."""

_NOTHING = Totals()
_when = itemgetter(0)


@dataclass(slots=True)
class WorkerLoad:
    """One worker's load."""

    requests: int = 0
    """Ours: open reservations."""
    prefill_tokens: int = 0
    """Ours: prompt tokens not computed yet."""
    running: int = 0
    waiting: int = 0
    external_requests: float = 0.0
    external_blocks: float = 0.0
    sampled_at_s: float | None = None
    last_picked: int = 0
    peers: Totals = _NOTHING
    """Theirs: what other replicas have reserved."""
    _reported: tuple[float, float] = (0.0, 0.0)
    """Requests and blocks of the last sample, less ours of that time; may be below zero."""
    _users: BlockUsers = field(default_factory=BlockUsers)
    """Of each prompt block: our open reservations."""
    _tails: int = 0
    """Blocks of ours that no other request can share: the prompts' last, partial ones."""
    _history: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(when, our requests, our blocks) after each change"""
    _before: tuple[int, int] = (0, 0)
    """Our requests and blocks before the oldest change that is kept."""

    @property
    def blocks(self) -> int:
        """Ours: distinct prompt blocks of open reservations."""
        return len(self._users) + self._tails

    @property
    def ours(self) -> Totals:
        return Totals(self.requests, self.blocks, self.prefill_tokens)

    @property
    def prefill_tokens_active(self) -> int:
        """Prompt tokens sent there, by us and by peers, and not computed yet."""
        return self.prefill_tokens + self.peers.prefill_tokens

    def ours_at(self, times_s: Sequence[float]) -> list[tuple[int, int]]:
        """Our requests and blocks as they were at times of the last seconds, which ascend.

        For a time before the last sample: as they were then.
        """
        history = self._history
        changes = [bisect_right(history, time_s, key=_when) for time_s in times_s]
        return [history[after - 1][1:] if after else self._before for after in changes]

    def open(self, prefixes: HashArray, has_tail: bool, new_tokens: int, now_s: float) -> None:
        """A reservation begins."""
        self._users.open(prefixes)
        self._tails += has_tail
        self.requests += 1
        self.prefill_tokens += new_tokens
        self._remember(now_s)

    def in_use(self, prefixes: HashArray) -> int:
        """How many blocks of a prompt our open reservations use already, from its first on."""
        return self._users.leading(prefixes)

    def prefill_done(self, new_tokens: int) -> None:
        """A reservation's prompt is computed."""
        self.prefill_tokens -= new_tokens

    def close(self, prefixes: HashArray, has_tail: bool, now_s: float) -> None:
        """A reservation ends; its prefill must be done, or told done, before."""
        self._users.close(prefixes)
        self._tails -= has_tail
        self.requests -= 1
        self._remember(now_s)

    def sample(
        self,
        running: int,
        waiting: int,
        used_blocks: float | None,
        sampled_at_s: float,
        peers: Totals = _NOTHING,
        peers_then: tuple[int, int] = (0, 0),
    ) -> None:
        """The engine reported: as of then, on our clock. used_blocks None: it does not tell.

        peers, peers_then: as for `hear`.
        """
        self.running = running
        self.waiting = waiting
        requests, blocks = self._ours_at(sampled_at_s)
        if used_blocks is None or not isfinite(used_blocks):
            used_blocks = 0.0
        self._reported = running + waiting - requests, used_blocks - blocks
        self.sampled_at_s = sampled_at_s
        self.hear(peers, peers_then)

    def hear(self, peers: Totals, peers_then: tuple[int, int]) -> None:
        """What peers have reserved, now and (requests, blocks) at the time of the last sample."""
        self.peers = peers
        self.external_requests = max(0.0, self._reported[0] - peers_then[0])
        self.external_blocks = max(0.0, self._reported[1] - peers_then[1])

    def active_requests(self) -> float:
        """Running, waiting, and under way."""
        return self.external_requests + self.requests + self.peers.requests

    def active_blocks(self) -> float:
        """Canonical blocks that requests hold, or will."""
        return self.external_blocks + self.blocks + self.peers.blocks

    def reserved(self) -> float:
        """Ours and theirs that the engine's sample did not count; less those that ended since."""
        return self.active_requests() - self.running - self.waiting

    def _remember(self, now_s: float) -> None:
        history = self._history
        while history and (len(history) >= HISTORY_MAX or history[0][0] < now_s - HISTORY_S):
            self._forget_oldest()
        history.append((now_s, self.requests, self.blocks))

    def _ours_at(self, time_s: float) -> tuple[int, int]:
        """Our requests and blocks at a time; forgets the changes up to it.

        For a time before all that is kept: as they were then, or as near to it as we remember.
        """
        while self._history and self._history[0][0] <= time_s:
            self._forget_oldest()
        return self._before

    def _forget_oldest(self) -> None:
        _, requests, blocks = self._history.popleft()
        self._before = requests, blocks
