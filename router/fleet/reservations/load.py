"""The load of a worker: what its engine reports, fused with what routers have reserved on it.

    external = max(0, reported - ours then - theirs then)    then: at the time of the sample
    load     = external + ours now + theirs now

*Reported* is the engine's last load sample, *ours* what this router has reserved, and *theirs* what
other replicas say that they have (events/feed/replicas.py). So nothing is counted twice, requests
that came without a router count, and our own count at once.

Laws:
- `ours` is the sum over the reservations that are open, a block that several use counted once;
- no load is ever negative or NaN.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite

from events.feed.replicas import Step, Totals
from indexer.hashing import HashArray
from indexer.kernel import BlockUsers
from router.fleet.reservations.outputs import ExpectedOutputs
from router.fleet.reservations.steps import HISTORY_MAX, HISTORY_S, close_load, open_load

FORGOTTEN_MAX = 256
"""Old changes that are dropped from a history when one is added, at most: about 10 us."""

_NOTHING = Totals()


@dataclass(slots=True)
class WorkerLoad:
    """The load of one worker."""

    requests: int = 0
    """Ours: open reservations."""
    prefill_tokens: int = 0
    """Ours: prompt tokens not computed yet."""
    prefills: int = 0
    """Ours: open reservations whose prompts the worker has still to compute."""
    running: int = 0
    waiting: int = 0
    external_requests: float = 0.0
    external_blocks: float = 0.0
    sampled_at_s: float | None = None
    missing: float = 0.0
    """Requests that the engine's last sample lacks: reserved at its time by other replicas, or by
    us since before the previous sample, so that they should have arrived."""
    last_picked: int = 0
    replicas: Totals = _NOTHING
    """Load that other replicas have reserved on the worker."""
    unheard: float = 0.0
    """Reserved by other replicas, but not in their messages yet: a guess, in requests, below 1."""
    changed: bool = True
    """Whether our load has changed since the last message to other replicas."""
    outputs: ExpectedOutputs = field(default_factory=ExpectedOutputs)
    """Ours: what is expected of the answers of open reservations."""
    _reported: tuple[float, float] = (0.0, 0.0)
    """Requests and blocks of the last sample, less ours of that time; may be below zero."""
    _users: BlockUsers = field(default_factory=BlockUsers)
    """Prompt block -> number of our open reservations that use it."""
    _tails: int = 0
    """Blocks of ours that no other request can share: see Prompt.own_blocks."""
    _history: list[Step] = field(default_factory=lambda: [(0.0, 0, 0)])
    """(time, our requests, our blocks) from that time on; the first entry holds before, too."""

    @property
    def blocks(self) -> int:
        """Number of distinct prompt blocks of this router's open reservations."""
        return len(self._users) + self._tails

    @property
    def ours(self) -> Totals:
        return Totals(self.requests, self.blocks, self.prefill_tokens)

    @property
    def prefill_tokens_active(self) -> int:
        """Prompt tokens that this router and other replicas sent to the worker, and that are not
        computed yet.
        """
        return self.prefill_tokens + self.replicas.prefill_tokens

    def steps(self, since_s: float) -> list[Step]:
        """Load at since_s and each later change, as (time, our requests, our blocks)."""
        return self._history[self._held_at(since_s) :]

    def open(self, prefixes: HashArray, own_blocks: int, new_tokens: int, now_s: float) -> None:
        """Adds the load of a reservation that begins. prefixes: of the prompt's full blocks;
        own_blocks: its blocks that no other request can share; new_tokens: tokens to compute.
        """
        open_load(self, prefixes, own_blocks, new_tokens, now_s)

    def in_use(self, prefixes: HashArray) -> int:
        """Number of a prompt's leading blocks that our open requests on the worker use already."""
        return self._users.leading(prefixes)

    def prefill_done(self, new_tokens: int) -> None:
        """Subtracts the prompt tokens of a reservation whose prompt is computed."""
        self.prefill_tokens -= new_tokens
        self.prefills -= new_tokens > 0
        self.changed = True

    def close(
        self, prefixes: HashArray, own_blocks: int, now_s: float, new_tokens: int = 0
    ) -> None:
        """Subtracts the load of a reservation that ends. new_tokens: its prompt tokens that are not
        computed yet.
        """
        close_load(self, prefixes, own_blocks, new_tokens, now_s)

    def sample(
        self,
        running: int,
        waiting: int,
        used_blocks: float | None,
        sampled_at_s: float,
        replicas: Totals = _NOTHING,
        replicas_then: tuple[int, int] = (0, 0),
    ) -> None:
        """Takes over the engine's load report, whose time sampled_at_s is on this router's clock.
        used_blocks None: unknown.

        replicas: other replicas' reservations now; replicas_then: their (requests, blocks) at
        sampled_at_s.
        """
        self.running = running
        self.waiting = waiting
        held = self._held_at(sampled_at_s)
        _, requests, blocks = self._history[held]
        began = sum(max(0, now[1] - then[1]) for then, now in pairwise(self._history[: held + 1]))
        del self._history[:held]
        if used_blocks is None or not isfinite(used_blocks):
            used_blocks = 0.0
        self._reported = running + waiting - requests, used_blocks - blocks
        self.sampled_at_s = sampled_at_s
        self.hear(replicas, replicas_then)
        self.missing = max(0.0, requests - began + replicas_then[0] - running - waiting)

    def hear(self, replicas: Totals, replicas_then: tuple[int, int]) -> None:
        """Takes over other replicas' reservations. replicas: now; replicas_then: their (requests,
        blocks) at the time of the engine's last load report.
        """
        self.replicas = replicas
        self.external_requests = max(0.0, self._reported[0] - replicas_then[0])
        self.external_blocks = max(0.0, self._reported[1] - replicas_then[1])

    def active_requests(self) -> float:
        """Requests at the worker: running, waiting, and sent but not counted yet."""
        return self.external_requests + self.requests + self.replicas.requests

    def active_blocks(self) -> float:
        """Canonical blocks that requests use, or will use once they run."""
        return self.external_blocks + self.blocks + self.replicas.blocks

    def of_all(self) -> float:
        """Requests that all replicas have reserved on the worker, divided by ours; 1 without any of
        ours."""
        return 1.0 + self.replicas.requests / self.requests if self.requests else 1.0

    def guessed(self) -> tuple[float, float]:
        """Estimated (requests, blocks) of `unheard`, as if these requests were like the others that
        are open on the worker.
        """
        requests = self.requests + self.replicas.requests
        blocks = self.blocks + self.replicas.blocks
        return self.unheard, self.unheard * blocks / requests if requests else 0.0

    def reserved(self) -> float:
        """Our and the other replicas' requests that the engine's load report did not count, less
        those that ended since.
        """
        return self.active_requests() - self.running - self.waiting

    def _forget_some(self, now_s: float) -> None:
        """Cuts the history to half of HISTORY_MAX entries and of HISTORY_S, by FORGOTTEN_MAX
        entries at most, so that many histories that are full at once cost no caller a long step."""
        history, since_s = self._history, now_s - HISTORY_S / 2
        old = max(self._held_at(since_s), len(history) - HISTORY_MAX // 2)
        del history[: min(old, FORGOTTEN_MAX)]
        when_s, requests, blocks = history[0]
        if old <= FORGOTTEN_MAX:
            history[0] = max(when_s, since_s), requests, blocks

    def _held_at(self, time_s: float) -> int:
        """Index of the history's entry that held at a time; 0 for a time before all entries."""
        return max(0, bisect_right(self._history, (time_s, inf)) - 1)
