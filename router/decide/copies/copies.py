"""Copies of hot prefixes: each copy's states from its start to its first use, with counts.

    begun -> done -> used
          |       +-> useless (evicted, or not used for USE_S)
          +-> failed, cancelled

Pure. Laws:
- begun = done + failed + cancelled + under way; done = used + useless + waiting for a use;
- one copy a worker at a time, UNDER_WAY_MAX in all; the same prefix goes to the same worker once in
  AGAIN_S; in no minute do more begin than COPIES_PER_MINUTE + BURST.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import override

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.decide.copies.prefix_rates import PrefixKey
from router.request.request import Role

COPIES_PER_MINUTE = 60.0
"""Copies that a router begins a minute, at most, beside BURST."""
UNDER_WAY_MAX = 8
BURST = 4.0
AGAIN_S = 60.0
USE_S = 300.0
"""Seconds after which a finished copy that no request used counts as useless."""
WAITING_MAX = 1024
"""Copies done and not used yet, at most; over it the oldest counts as useless. With
COPIES_PER_MINUTE and USE_S, there are about 300."""


class CopyFate(StrEnum):
    """How a copy ended; its values are values of a metric's label."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    USED = "used"
    USELESS = "useless"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of prompts: full blocks, and the input to compute them."""

    key: PrefixKey
    model: str
    role: Role
    """Work that requests with the prefix want a worker for."""
    block_size: int
    chain: HashArray
    """PrefixHashes of the blocks, from the first on."""
    token_bytes: bytes | None
    """Tokens as little-endian u32; None: unknown, not the whole input (images), or not needed."""
    lora_name: str
    cache_salt: str

    @property
    def token_count(self) -> int:
        return len(self.chain) * self.block_size

    @property
    def byte_count(self) -> int:
        """Bytes of memory that the prefix takes in this process."""
        return int(self.chain.nbytes) + len(self.token_bytes or b"")

    def begins(self, prefixes: HashArray) -> bool:
        """Whether a prompt with these PrefixHashes begins with this prefix."""
        last = len(self.chain) - 1
        return len(prefixes) > last and bool(prefixes[last] == self.chain[last])


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Effect: have a worker compute or fetch a prefix, then call HotPrefixes.ended."""

    id: int
    prefix: Prefix
    target: WorkerKey
    source: WorkerKey
    """The holder nearest to the target."""
    benefit_s: float
    cost_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Cancel:
    """Effect: stop a copy that has begun; it counts as cancelled already."""

    copy: Copy


class Copies:
    """All copies of one router."""

    def __init__(self, copies_per_minute: float = COPIES_PER_MINUTE) -> None:
        self.fates: Counter[CopyFate] = Counter()
        self.under_way: dict[int, Copy] = {}
        """Copies under way, by id."""
        self._per_s = copies_per_minute / 60.0
        self._allowance = BURST
        self._allowed_at_s: float | None = None
        self._begun: OrderedDict[tuple[PrefixKey, WorkerKey], float] = OrderedDict()
        """Time from which a copy of a prefix to a worker may begin again."""
        self._waiting: dict[int, tuple[Copy, float]] = {}
        """Copies done and not used, by id, each with when it was done; the oldest first."""
        self._at: dict[WorkerKey, set[Copy]] = {}
        """Copies of `_waiting`, by target."""
        self._ids = 0

    @override
    def __repr__(self) -> str:
        return f"<Copies {len(self.under_way)} under way, {len(self._waiting)} not used yet>"

    def may_begin(self, now_s: float) -> bool:
        """Whether the bounds in number and rate allow a further copy now."""
        if self._allowed_at_s is not None:
            more = (now_s - self._allowed_at_s) * self._per_s
            self._allowance = min(BURST, self._allowance + more)
        self._allowed_at_s = now_s
        while self._begun and next(iter(self._begun.values())) <= now_s:
            self._begun.popitem(last=False)
        return self._allowance >= 1.0 and len(self.under_way) < UNDER_WAY_MAX

    def may_take(self, worker: WorkerKey, prefix: Prefix) -> bool:
        """Whether a worker is getting no copy now, and no copy of this prefix to it began within
        the last AGAIN_S.
        """
        if (prefix.key, worker) in self._begun:
            return False
        return all(copy.target != worker for copy in self.under_way.values())

    def begin(
        self,
        prefix: Prefix,
        target: WorkerKey,
        source: WorkerKey,
        benefit_s: float,
        cost_s: float,
        now_s: float,
    ) -> Copy:
        """Begins a copy, and returns it; `may_begin` must be true."""
        self._ids += 1
        self._allowance -= 1.0
        self._begun[prefix.key, target] = now_s + AGAIN_S
        copy = Copy(self._ids, prefix, target, source, benefit_s, cost_s)
        self.under_way[copy.id] = copy
        self.fates[CopyFate.BEGUN] += 1
        return copy

    def cancel(self, copy: Copy) -> Cancel:
        """Cancels a copy that is under way, and returns the effect that stops it."""
        del self.under_way[copy.id]
        self.fates[CopyFate.CANCELLED] += 1
        return Cancel(copy)

    def ended(self, copy: Copy, done: bool, now_s: float) -> bool:
        """Records whether a copy was made (done) or failed. Returns False if it was cancelled
        before.
        """
        if self.under_way.pop(copy.id, None) is None:
            return False
        self.fates[CopyFate.DONE if done else CopyFate.FAILED] += 1
        if done:
            if len(self._waiting) >= WAITING_MAX:
                oldest, _ = next(iter(self._waiting.values()))
                self.useless(oldest)
            self._waiting[copy.id] = (copy, now_s)
            self._at.setdefault(copy.target, set()).add(copy)
        return True

    def waiting(self, waited_s: float, now_s: float) -> list[Copy]:
        """Copies that were done at least waited_s ago and are not used yet; copies unused for USE_S
        are ended first.
        """
        old = [copy for copy, done_s in self._waiting.values() if now_s - done_s >= USE_S]
        for copy in old:
            self.useless(copy)
        return [copy for copy, done_s in self._waiting.values() if now_s - done_s >= waited_s]

    def useless(self, copy: Copy) -> None:
        """Records that a finished copy was evicted, or not used in time."""
        self._settle(copy, CopyFate.USELESS)

    def on_pick(self, worker: WorkerKey, prefixes: HashArray, held_tokens: int) -> None:
        """Records the use of a worker's copies by a picked request. prefixes: PrefixHashes of its
        prompt. held_tokens: tokens of the prompt that are cached there.
        """
        for copy in tuple(self._at.get(worker, ())):
            if held_tokens >= copy.prefix.token_count and copy.prefix.begins(prefixes):
                self._settle(copy, CopyFate.USED)

    def _settle(self, copy: Copy, fate: CopyFate) -> None:
        del self._waiting[copy.id]
        there = self._at[copy.target]
        there.remove(copy)
        if not there:
            del self._at[copy.target]
        self.fates[fate] += 1
