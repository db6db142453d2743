"""Hot prefixes, which many requests begin with: decides which to copy to another worker. Pure.

    picks ─on_pick─> rates ─> hot prefixes ─decide─> Copy ─(a driver makes it)─> ended

A prefix is hot from the score HOT_SCORE on (router/decide/copies/prefix_rates.py). It is copied
when all workers that hold it and could be picked are busy, another worker is not, and

    benefit = requests expected there in the next minute * prefill time saved each
            > 1.5 * cost

    requests expected there = 60 * rate (requests a second) / (holders + 1)
    cost = transfer time over the link + 5 ms, or the prefill time where the target computes it

A worker is busy with more requests (running, waiting and reserved) than BUSY_REQUESTS and than the
mean of its pool, or when it is full. The target is the worker with the fewest requests, and has at
most half as many as any holder. Source: Mooncake's Conductor, as an outsider derived it from the
paper; that a new copy gets an equal share of the requests, and not all of them, is ours.

Laws:
- a copy goes to no worker that could not be picked for the prompt: drained, silent, full, of
  another role or block size, or without its LoRA;
- the decisions read the fleet and change nothing in it;
- counted prefixes, hot prefixes, the bytes of hot prefixes and copies are bounded.
"""

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from events.plane.facts import WARM_TOKENS_MAX
from indexer.hashing import HashArray
from router.config.settings.routing_settings import HotPrefixSettings
from router.decide.copies.copies import Cancel, Copies, Copy, Prefix
from router.decide.copies.prefix_rates import PrefixKey, PrefixRate, PrefixRates
from router.fleet.eligibility import exclusion, would_load
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.reservations.reservations import Reservation
from router.fleet.state import Fleet
from router.fleet.table import COLUMNS, Column
from router.request.narrowing import Narrowing
from router.request.prompt import Prompt
from router.request.request import Request, Role

TOKENS_MIN = 512
"""Fewest tokens of a prefix that is counted: shorter ones are computed faster than copied."""
COUNTED_MAX = 1 << 16
"""Prefixes whose hits are counted, about 200 bytes each."""
BYTES_MAX = 64 << 20
"""Bytes of tokens and hashes of hot prefixes, at most."""
HOT_MAX = 512
HOT_SCORE = 4.0
"""Score, hits / sqrt(age in seconds), from which on a prefix is hot: four hits in its first second,
31 in its first minute. The benefit decides about a copy; the score bounds the prefixes to weigh."""
BUSY_REQUESTS = 10
"""Active requests up to which a worker is not busy, however few the others have: with so few, a
copy would save no wait."""
CONSIDER_S = 1.0
"""Seconds between two times at which a hot prefix is weighed."""
CONSIDERED_MAX = 16
"""Hot prefixes that one `decide` weighs, at most: each costs a look-up in the index."""
TARGET_SHARE = 0.5
"""Most requests of a target, as a share of the least busy holder's."""
MARGIN = 1.5
HORIZON_S = 60.0
OVERHEAD_S = 0.005
"""Seconds that a transfer takes beside the time for its bytes."""
LOOK_S = 5.0
"""Seconds between two looks for copies that were evicted."""
WARM_OUTPUT_TOKENS = 1
CONFIRMED_S = 2.0
"""Seconds after a copy is done in which its worker's events confirm it, if it was not evicted."""

_QUEUE, _FULL = COLUMNS.index("active_slots"), COLUMNS.index("full")

REASONS = (
    "holders_not_busy", "no_room", "no_target", "no_worker", "not_held", "not_worth_it",
    "tokens_unknown", "too_many",
)  # fmt: skip

Effect = Copy | Cancel


class Means(NamedTuple):
    """How copies are made in this deployment, and what they cost."""

    prefill_s: Callable[[int], float]
    """Seconds that the prefill of a prompt of so many tokens takes."""
    copy_s: Callable[[int, int], float]
    """Seconds that a copy of so many tokens over such a distance (router/fleet/topology.py) takes;
    inf: no copy is possible."""
    by_relays: bool
    """Whether the target's relay has its engine compute the tokens: the relay must allow that, and
    the tokens must be known. False: the target fetches the KV cache."""


def recomputed(prefill_rate: float) -> Means:
    """Copies that workers compute themselves, at prefill_rate tokens a second."""

    def prefill_s(tokens: int) -> float:
        return tokens / prefill_rate

    return Means(prefill_s, lambda tokens, _distance: prefill_s(tokens), by_relays=True)


def carried(prefill_s: Callable[[int], float], transfer_s: Callable[[int, int], float]) -> Means:
    """Returns the means of copies that a worker fetches from another worker's cache. prefill_s:
    seconds to compute so many tokens. transfer_s: seconds to transfer so many tokens over a
    distance of router/fleet/topology.py (0: the same host, to 3).
    """
    return Means(
        prefill_s,
        lambda tokens, distance: transfer_s(tokens, distance) + OVERHEAD_S,
        by_relays=False,
    )


@dataclass(slots=True, eq=False)
class _Hot:
    """A hot prefix."""

    prefix: Prefix
    rate: PrefixRate
    request: Request
    """A request for the prefix alone."""
    longer: list["_Hot"] = field(default_factory=list)
    """Longer hot prefixes that begin with this one; some may be dropped by now."""
    considered_at_s: float = -inf


class _Workers(NamedTuple):
    """The workers of a prefix's pool, row by row."""

    pool: Pool
    queues: Column
    """Requests running, waiting and reserved."""
    idle: npt.NDArray[np.bool_]
    """True for each worker that is neither full nor busy."""


class HotPrefixes:
    """All hot prefixes of a router: an observer of its picks while it is enabled."""

    keeps_tokens = True

    def __init__(self, fleet: Fleet, settings: HotPrefixSettings, means: Means) -> None:
        self.rates = PrefixRates(COUNTED_MAX)
        self.copies = Copies()
        self.reasons: Counter[str] = Counter()
        """Why hot prefixes were not copied, or not kept: see REASONS."""
        self.bytes_max = BYTES_MAX
        self.hot_score: float = HOT_SCORE
        self.busy_requests = BUSY_REQUESTS
        self.byte_count = 0
        """Bytes of the tokens and hashes that are kept of hot prefixes."""
        self._fleet = fleet
        self._settings = settings
        self._means = means
        self._tokens_max = WARM_TOKENS_MAX if means.by_relays else sys.maxsize
        """Tokens of a copy, at most: of a longer prefix the beginning is copied."""
        self._hot: dict[PrefixKey, _Hot] = {}
        self._lacked_room = False
        self._cooled_at_s = self._looked_at_s = -inf

    def __len__(self) -> int:
        return len(self._hot)

    @override
    def __repr__(self) -> str:
        return f"<HotPrefixes {len(self)} hot, {self.rates!r}, {self.copies!r}>"

    @property
    def enabled(self) -> bool:
        return self._settings.enabled

    def reconfigure(self, settings: HotPrefixSettings) -> list[Effect]:
        """Puts other settings in force; returns the effects that cancel copies which end
        with it.
        """
        self._settings = settings
        return [] if settings.enabled else self.forget()

    def forget(self) -> list[Effect]:
        """Forgets all prefixes and hits; returns the effects that cancel copies under way."""
        self._hot.clear()
        self.byte_count = 0
        self.rates.forget()
        return [self.copies.cancel(copy) for copy in list(self.copies.under_way.values())]

    def on_pick(self, reservation: Reservation, request: Request, now_s: float) -> None:
        """Counts the prefixes of a routed request's prompt."""
        reservation = reservation.where_computed()
        prefixes, held_tokens = reservation.prefixes, reservation.predicted_tokens
        self.copies.on_pick(reservation.worker, prefixes, held_tokens)
        _, _, model, role = reservation.fingerprint
        narrowing = request.narrowing
        confined = narrowing is not None and narrowing.confines
        if not len(prefixes) or confined or role == Role.DECODE:
            return
        block_size = heartbeat_of(self._fleet.view.sources[reservation.worker]).block_size
        blocks_max = min(len(prefixes), self._tokens_max // block_size)
        for blocks in depths(blocks_max, held_tokens // block_size, block_size):
            key = model, int(prefixes[blocks - 1])
            rate = self.rates.hit(key, now_s)
            # A score is never above the hits, which are at hand.
            if rate.hits < self.hot_score:
                continue
            if (hot := self._hot.get(key)) is not None:
                if hot.prefix.token_bytes is None:
                    self._add_tokens(hot, request.prompt)
            elif rate.score(now_s) >= self.hot_score:
                self._keep(key, rate, role, request.prompt, prefixes[:blocks], block_size)

    def decide(self, now_s: float) -> list[Effect]:
        """Returns copies to begin and to cancel now. The driver calls this every second or more
        often.
        """
        self._fleet.pools.refresh()
        if now_s - self._cooled_at_s >= CONSIDER_S:
            self._cooled_at_s = now_s
            self._let_cold_go(now_s)
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._look_for_evicted(now_s)
        effects: list[Effect] = [
            self.copies.cancel(copy)
            for copy in list(self.copies.under_way.values())
            if not self._still_wanted(copy)
        ]
        for hot in islice(self._due(now_s), CONSIDERED_MAX):
            outcome = self._weigh(hot, now_s)
            if isinstance(outcome, Copy):
                effects.append(outcome)
            else:
                self.reasons[outcome] += 1
        return effects

    def ended(self, copy: Copy, done: bool, now_s: float) -> None:
        """Records the end of a copy. The driver calls this for each copy that was not cancelled."""
        source = self._fleet.view.sources.get(copy.target)
        if self.copies.ended(copy, done, now_s) and done and source is not None:
            # Events confirm the copy, but not of a worker without events.
            held = int(self._runs(copy.prefix, np.array([source.slot], np.intp))[0])
            self._fleet.view.predict(source, copy.prefix.chain[held:], now_s)

    def _keep(
        self,
        key: PrefixKey,
        rate: PrefixRate,
        role: str,
        prompt: Prompt,
        chain: HashArray,
        block_size: int,
    ) -> None:
        """Stores a new hot prefix with what a copy of it needs, unless a bound is reached."""
        tokens = self._tokens(prompt, len(chain) * block_size)
        byte_count = chain.nbytes + len(tokens or b"")
        if len(self._hot) >= HOT_MAX or self.byte_count + byte_count > self.bytes_max:
            self.reasons["no_room"] += 1
            self._lacked_room = True
            return
        prefix = Prefix(
            key,
            key[0],
            Role.PREFILL if role == Role.PAIR else Role(role),
            block_size,
            chain.copy(),
            tokens,
            prompt.lora_name,
            prompt.cache_salt,
        )
        hot = self._hot[key] = _Hot(prefix, rate, _asking(prefix))
        self.byte_count += prefix.byte_count
        for blocks in depths(len(chain) - 1, 0, block_size):
            if (shorter := self._hot.get((prefix.model, int(chain[blocks - 1])))) is not None:
                shorter.longer.append(hot)

    def _add_tokens(self, hot: _Hot, prompt: Prompt) -> None:
        """Adds the tokens of a hot prefix, which earlier requests did not bring."""
        count = hot.prefix.token_count
        if self.byte_count + 4 * count > self.bytes_max:
            return
        if (tokens := self._tokens(prompt, count)) is not None:
            hot.prefix = replace(hot.prefix, token_bytes=tokens)
            self.byte_count += len(tokens)

    def _tokens(self, prompt: Prompt, count: int) -> bytes | None:
        """The first tokens of a prompt, if copies need them and they are known; else None."""
        return prompt.leading_tokens(count) if self._means.by_relays else None

    def _let_cold_go(self, now_s: float) -> None:
        """Drops prefixes that are no longer hot; after a lack of room the colder half, too (a hot
        one comes back with its next hit); and those beyond bytes_max."""
        scores = sorted((hot.rate.score(now_s), key) for key, hot in self._hot.items())
        cold = bisect_left(scores, self.hot_score, key=itemgetter(0))
        if self._lacked_room:
            cold = max(cold, len(scores) // 2)
            self._lacked_room = False
        for i, (_, key) in enumerate(scores):
            if i >= cold and self.byte_count <= self.bytes_max:
                break
            self.byte_count -= self._hot.pop(key).prefix.byte_count

    def _look_for_evicted(self, now_s: float) -> None:
        for copy in self.copies.waiting(CONFIRMED_S, now_s):
            source = self._fleet.view.sources.get(copy.target)
            slots = np.array([] if source is None else [source.slot], np.intp)
            if not (self._runs(copy.prefix, slots) >= len(copy.prefix.chain)).any():
                self.copies.useless(copy)

    def _still_wanted(self, copy: Copy) -> bool:
        workers = self._workers(copy.prefix)
        if workers is None or copy.target not in workers.pool.workers:
            return False
        row = workers.pool.workers.index(copy.target)
        return bool(workers.idle[row]) and self._can_take(_asking(copy.prefix), workers.pool, row)

    def _due(self, now_s: float) -> Iterator[_Hot]:
        """Hot prefixes to be weighed now, first those that were weighed longest ago."""
        waited = sorted(self._hot.values(), key=attrgetter("considered_at_s"))
        for hot in waited:
            if now_s - hot.considered_at_s < CONSIDER_S:
                return
            hot.considered_at_s = now_s
            if not self._carried_along(hot, now_s):
                yield hot

    def _carried_along(self, hot: _Hot, now_s: float) -> bool:
        """Whether a longer hot prefix with at least half the hits is copied in its place."""
        hot.longer = [longer for longer in hot.longer if self._hot.get(longer.prefix.key) is longer]
        rate = hot.rate.rate(now_s)
        return any(2 * longer.rate.rate(now_s) >= rate for longer in hot.longer)

    def _weigh(self, hot: _Hot, now_s: float) -> Copy | str:
        """Begins a copy of a hot prefix and returns it; or returns the reason, of REASONS."""
        prefix, means = hot.prefix, self._means
        if means.by_relays and prefix.token_bytes is None:
            return "tokens_unknown"
        if not self.copies.may_begin(now_s):
            return "too_many"
        if (workers := self._workers(prefix)) is None:
            return "no_worker"
        pool, queues, idle = workers
        runs = self._runs(prefix, pool.slots)
        holds = runs >= len(prefix.chain)
        sources = np.flatnonzero(holds).tolist()
        if not sources:
            return "not_held"
        if any(idle[row] and self._can_take(hot.request, pool, row) for row in sources):
            return "holders_not_busy"
        holders = [row for row in sources if self._can_take(hot.request, pool, row)]
        shortest = min((float(queues[row]) for row in holders), default=inf)
        rows = np.flatnonzero(idle & ~holds & (queues <= TARGET_SHARE * shortest))
        target = next(
            (
                row
                for row in rows[np.argsort(queues[rows], kind="stable")].tolist()
                if self._can_take(hot.request, pool, row)
                and self.copies.may_take(pool.workers[row], prefix)
                and (heartbeat_of(pool.sources[row]).warms or not means.by_relays)
            ),
            None,
        )
        if target is None:
            return "no_target"
        between = self._fleet.further.topology(pool).between
        source = min(sources, key=lambda row: between(row, target))
        missing_tokens = (len(prefix.chain) - int(runs[target])) * prefix.block_size
        expected = HORIZON_S * hot.rate.rate(now_s) / (len(holders) + 1)
        benefit_s = expected * means.prefill_s(missing_tokens)
        cost_s = means.copy_s(missing_tokens, int(between(source, target)))
        if benefit_s <= MARGIN * cost_s:
            return "not_worth_it"
        return self.copies.begin(
            prefix, pool.workers[target], pool.workers[source], benefit_s, cost_s, now_s
        )

    def _workers(self, prefix: Prefix) -> _Workers | None:
        """The workers of a prefix's pool; None: no worker serves the model any more."""
        pools, pool = self._fleet.pools, self._fleet.pool(prefix.model)
        if pool is None:
            return None
        queues = pools.columns[_QUEUE].take(pool.slots)
        full = pools.columns[_FULL].take(pool.slots) > 0
        busy_above = max(self.busy_requests, float(queues.mean()) if len(pool) else 0.0)
        return _Workers(pool, queues, ~full & (queues <= busy_above))

    def _can_take(self, request: Request, pool: Pool, row: int) -> bool:
        """Whether a row's worker, once it has room, can take a request without loading a LoRA."""
        source, lora_name = pool.sources[row], request.prompt.lora_name
        if lora_name and would_load(heartbeat_of(source), lora_name):
            return False
        return not exclusion(request, WARM_OUTPUT_TOKENS, source, self._fleet.drained)

    def _runs(self, prefix: Prefix, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Number of a prefix's leading blocks that each worker holds, or is predicted to hold."""
        runs: npt.NDArray[np.int32] = self._fleet.view.index.overlap(
            prefix.chain, len(prefix.chain), slots
        )[0]
        return runs


def depths(block_count: int, held_blocks: int, block_size: int) -> list[int]:
    """Lengths, in blocks, at which the beginnings of a prompt are counted: doubling from
    TOKENS_MIN on, block_count at most; and held_blocks, the part that the picked worker held, after
    which prompts differ."""
    blocks = least = max(1, TOKENS_MIN // block_size)
    lengths = []
    while blocks <= block_count:
        lengths.append(blocks)
        blocks *= 2
    if least <= held_blocks <= block_count and held_blocks not in lengths:
        lengths.append(held_blocks)
    return lengths


def _asking(prefix: Prefix) -> Request:
    """A request that is the prefix and nothing else."""
    prompt = Prompt(
        prefix.token_count, lora_name=prefix.lora_name, hashes_block_size=prefix.block_size
    )
    narrowing = Narrowing(lora_name=prefix.lora_name).or_none
    return Request("", prompt, prefix.model, prefix.role, narrowing=narrowing)
