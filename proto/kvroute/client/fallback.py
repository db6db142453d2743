"""Picks without a router: among the workers that routers listed last. Pure: takes the time.

For as long as no router can be reached, requests go by consistent hashing with bounded loads
(bounded_hash.py): of the session, if there is one, else of the prompt's beginning, so that caches
go on being met. What only a router knows (load, caches, the queue, other clients) counts for
nothing; this client's own open requests are all the load there is.

Laws:
- only workers that a router listed as schedulable (or as its last resort), not drained, with an
  address, fitting model, LoRA, role, labels, length and the request's own lists;
- a list is used for age_s_max at most, and one without a schedulable worker replaces none;
- workers listed never exceed WORKERS_MAX, open picks OPEN_MAX, avoided ones the workers listed.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from typing_extensions import override

from kvroute.client.bounded_hash import (
    TOKEN_BYTES_MAX,
    blocks_key,
    ranked,
    session_key,
    tokens_key,
    worker_seed,
)
from kvroute.v1 import (
    Alternative,
    FailureReason,
    Phase,
    Progress,
    ProgressState,
    RouteRequest,
    RouteResponse,
    WorkerStatus,
)

WORKERS_MAX = 16_384
"""Workers (ranks) kept of a list."""
OPEN_MAX = 65_536
"""Picks of the fallback whose end was not reported; past it the oldest one counts as ended."""
OPEN_S_MAX = 600.0
"""The same by time: a pick that nobody reports is open for so long."""
WORKER_S = 0.25
"""Least time between lists for each worker in the last one: a router writes a thousand in 30 ms, so
that a thousand clients of a thousand workers cost all routers an eighth of a core."""
RETRY_S = 5.0
"""After a list that failed."""
OUTPUT_TOKENS_MAX = 4096
"""Expected output that counts for the length, as in a router."""
RESERVATION = "fallback/"
"""What the fallback's reservation ids begin with; no router's do."""
_TOKENS_MAX = TOKEN_BYTES_MAX // 4
_BOTH = frozenset(("both", ""))
_ROLES: Mapping[int, frozenset[str]] = {
    Phase.PHASE_UNSPECIFIED: _BOTH,
    Phase.PHASE_AGGREGATED: _BOTH,
    # Without a router there is no pair: a worker that decodes computes the prompt, too.
    Phase.PHASE_PREFILL_DECODE: _BOTH | {"decode"},
    Phase.PHASE_PREFILL: _BOTH | {"prefill"},
    Phase.PHASE_DECODE: _BOTH | {"decode"},
}
_AGAINST_THE_WORKER = frozenset((
    FailureReason.FAILURE_REASON_UNSPECIFIED,
    FailureReason.FAILURE_REASON_WORKER,
    FailureReason.FAILURE_REASON_TIMEOUT,
))  # fmt: skip
_ENDS = frozenset((ProgressState.PROGRESS_STATE_FINISHED, ProgressState.PROGRESS_STATE_FAILED))

Key: TypeAlias = tuple[str, int]
"""Worker id and rank."""


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """When a client picks by itself, and among which workers."""

    age_s_max: float = 600.0
    """Oldest list of workers that is still used, seconds: addresses find other owners in time."""
    patience_s: float = 0.5
    """How long routers are tried when none can be reached any more; later requests try once."""
    avoid_s: float = 10.0
    """For how long a worker that failed is avoided, if there is another."""
    refresh_s: float = 60.0
    """How often the workers are listed while calls are made, seconds, a quarter more or less; a
    fleet of more than 240 workers is listed less often, 0.25 s for each."""

    def __post_init__(self) -> None:
        for name in ("age_s_max", "patience_s", "avoid_s", "refresh_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ValueError(f"{name} is {getattr(self, name)}; 0 to 1,000,000 s is wanted")


@dataclass(frozen=True, slots=True)
class _Worker:
    key: Key
    rank: int | None
    """None for an engine with one rank."""
    seed: int
    address: str
    labels: Mapping[str, str]
    models: frozenset[str]
    lora_names: frozenset[str]
    role: str
    max_model_len: int
    second: bool
    """A router kept requests away from it: only if there is no other."""


class Fallback:
    """What one client knows for a time without routers."""

    def __init__(self, policy: FallbackPolicy, counts: Counter[str], rng: random.Random) -> None:
        """counts: `fallback_picks`; `fallback_refused` requests that no listed worker fits;
        `worker_lists`, `worker_lists_failed`; `outages` begun."""
        self.policy = policy
        self._counts = counts
        self._rng = rng
        self._statuses: list[WorkerStatus] = []
        self._made: list[_Worker] | None = None
        """Of the statuses, made when they are needed."""
        self._listed_s: float | None = None
        self._due_s = 0.0
        self._routed = 0
        self._away_since_s: float | None = None
        self._open: Counter[Key] = Counter()
        self._picks: OrderedDict[str, tuple[Key, float]] = OrderedDict()
        """Reservation id -> worker, time of the pick; the oldest first."""
        self._avoided: dict[Key, float] = {}
        """Until when."""
        self._refused: set[Key] = set()
        """Of those avoided, the ones that refused a connection last."""
        self._number = 0

    @override
    def __repr__(self) -> str:
        state = "routers away" if self.outage else "routers there"
        return f"<Fallback {len(self._statuses)} workers, {len(self._picks)} open picks, {state}>"

    # What routers say

    @property
    def outage(self) -> bool:
        """Whether no router could be reached, and none has answered since."""
        return self._away_since_s is not None

    def routed(self, now_s: float) -> bool:
        """A router answered; returns whether the workers are to be listed now. Not with a
        program's first request: it may be its last."""
        self._away_since_s = None
        self._routed += 1
        return self._routed > 1 and now_s >= self._due_s

    def listed(self, statuses: Iterable[WorkerStatus], now_s: float) -> None:
        """A router listed its workers."""
        taken = list(statuses)[:WORKERS_MAX]
        self._counts["worker_lists"] += 1
        period_s = max(self.policy.refresh_s, WORKER_S * len(taken))
        self._due_s = now_s + period_s * self._rng.uniform(0.75, 1.25)
        if not any(status.schedulable for status in taken):
            return  # of a router that has just begun, or of a fleet that is away
        self._statuses, self._made, self._listed_s = taken, None, now_s

    def not_listed(self, now_s: float) -> None:
        """A list could not be had."""
        self._counts["worker_lists_failed"] += 1
        self._due_s = now_s + RETRY_S * self._rng.uniform(1.0, 2.0)

    def unreachable(self, now_s: float) -> bool:
        """No router could be reached; returns whether that has lasted for long enough."""
        if self._away_since_s is None:
            self._away_since_s = now_s
            self._counts["outages"] += 1
        return now_s - self._away_since_s >= self.policy.patience_s

    def usable(self, now_s: float) -> bool:
        """Whether there are workers to pick among."""
        return self._listed_s is not None and now_s - self._listed_s <= self.policy.age_s_max

    # Open requests

    def began(self, key: Key) -> None:
        """A request of ours was sent to a worker that a router picked."""
        self._open[key] += 1

    def ended(
        self,
        key: Key,
        now_s: float,
        failure: FailureReason.ValueType | None,
        *,
        refused: bool = False,
    ) -> None:
        """It is over; failure: why it failed, None if it did not; refused: its connection was."""
        if self._open[key] > 1:
            self._open[key] -= 1
        else:
            del self._open[key]
        if failure in _AGAINST_THE_WORKER:
            self._avoid(key, now_s)
            if refused:
                self._refused.add(key)

    def reported(self, progress: Progress, now_s: float) -> None:
        """A step of a pick of ours; only the last one counts."""
        if progress.state not in _ENDS:
            return
        taken = self._picks.pop(progress.reservation_id, None)
        if taken is not None:
            failed = progress.state == ProgressState.PROGRESS_STATE_FAILED
            reason = progress.failure_reason if failed else None
            self.ended(taken[0], now_s, reason, refused=failed and progress.refused)

    # Picks

    def pick(self, request: RouteRequest, now_s: float) -> RouteResponse | None:
        """A worker in the place of a router's; None when none fits."""
        self._forget(now_s)
        fitting = self._fitting(request) if self.usable(now_s) else []
        key = _key(request)
        if not fitting or key is None:
            self._counts["fallback_refused"] += 1
            return None
        avoided = self._avoided
        first = [one for one in fitting if not one.second and one.key not in avoided]
        # Where all have failed, as while the whole host is busy, those at least took connections.
        among = first or [one for one in fitting if one.key not in self._refused] or fitting
        loads = [self._open.get(one.key, 0) for one in among]
        places = ranked(key, [one.seed for one in among], loads, 3)
        worker, *others = (among[place] for place in places)
        self._number += 1
        answer = RouteResponse(
            reservation_id=f"{RESERVATION}{self._number}",
            worker_id=worker.key[0],
            dp_rank=worker.rank,
            address=worker.address,
            labels=worker.labels,
        )
        for other in others:
            answer.alternatives.append(
                Alternative(worker_id=other.key[0], dp_rank=other.rank, address=other.address)
            )
        self._counts["fallback_picks"] += 1
        self._open[worker.key] += 1
        self._picks[answer.reservation_id] = (worker.key, now_s)
        return answer

    def _forget(self, now_s: float) -> None:
        """Ends picks that nobody reports, and the time of those avoided."""
        while self._picks:
            reservation_id, (key, picked_s) = next(iter(self._picks.items()))
            if len(self._picks) < OPEN_MAX and now_s - picked_s < OPEN_S_MAX:
                break
            del self._picks[reservation_id]
            self.ended(key, now_s, None)
        for key in [key for key, until_s in self._avoided.items() if until_s <= now_s]:
            self._forgive(key)

    def _avoid(self, key: Key, now_s: float) -> None:
        self._forgive(key)
        self._avoided[key] = now_s + self.policy.avoid_s
        if len(self._avoided) > WORKERS_MAX:
            self._forgive(next(iter(self._avoided)))

    def _forgive(self, key: Key) -> None:
        self._avoided.pop(key, None)
        self._refused.discard(key)

    def _fitting(self, request: RouteRequest) -> list[_Worker]:
        if self._made is None:
            self._made = _workers(self._statuses)
        roles = _ROLES.get(request.phase)
        if roles is None:
            return []
        models = {name for one in self._made for name in one.models} if not request.model else ()
        if len(models) > 1:
            return []  # as to a router, it is not known which one is meant
        allowed, excluded = set(request.allowed_worker_ids), set(request.excluded_worker_ids)
        tokens = _tokens(request) + min(request.expected_output_tokens, OUTPUT_TOKENS_MAX)
        labels = dict(request.required_labels)
        model, lora = request.model, request.lora_name
        return [
            one
            for one in self._made
            if one.role in roles
            and (not model or model in one.models or model in one.lora_names)
            and (not lora or not one.lora_names or lora in one.lora_names)
            and one.key[0] not in excluded
            and (not allowed or one.key[0] in allowed)
            and (not one.max_model_len or tokens <= one.max_model_len)
            and (not labels or labels.items() <= one.labels.items())
        ]


def _workers(statuses: list[WorkerStatus]) -> list[_Worker]:
    """Those of a list that a request may be sent to."""
    ranks = Counter(status.worker_id for status in statuses)
    return [
        _Worker(
            key=(status.worker_id, status.dp_rank),
            rank=status.dp_rank if ranks[status.worker_id] > 1 or status.dp_rank else None,
            seed=worker_seed(status.worker_id, status.dp_rank),
            address=status.address,
            labels=dict(status.labels),
            models=frozenset((status.model, *status.model_aliases)),
            lora_names=frozenset(status.lora_names),
            role=status.role,
            max_model_len=status.max_model_len,
            second=not status.schedulable or status.HasField("ejection"),
        )
        for status in statuses
        if status.address and not status.drained and (status.schedulable or status.last_resort)
    ]


def _tokens(request: RouteRequest) -> int:
    match request.WhichOneof("prompt"):
        case "token_bytes":
            return len(request.token_bytes) // 4
        case "token_ids":
            return len(request.token_ids.ids)
        case "block_hashes":
            return request.block_hashes.prompt_tokens
        case _:
            return 0


def _key(request: RouteRequest) -> int | None:
    """None for a request without a prompt: only a router knows where its KV cache is."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        return None
    if request.session_id:
        return session_key(request.session_id)
    if prompt == "token_bytes":
        return tokens_key(request.token_bytes)
    if prompt == "token_ids":
        ids = request.token_ids.ids[:_TOKENS_MAX]
        return tokens_key(b"".join(one.to_bytes(4, "little") for one in ids))
    hashed = request.block_hashes
    blocks = max(1, _TOKENS_MAX // hashed.block_size) if hashed.block_size else 1
    return blocks_key(hashed.hashes[:blocks])
