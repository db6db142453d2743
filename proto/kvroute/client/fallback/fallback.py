"""Picks without a router, among the workers that routers listed last. Pure: the time is given.

While no router can be reached, requests go by consistent hashing with bounded loads
(bounded_hash.py): of the session, if there is one, else of the prompt's beginning, so that caches
are still hit. Facts that only a router has (load, caches, the queue, other clients) are left out;
the only load is this client's own open requests.

Laws:
- a pick is a worker that a router listed as schedulable (or as a last resort), not drained, with
  an address, and that fits the request's model, LoRA, role, labels, length, allowed and excluded
  workers;
- a list is used for age_s_max seconds at most; a list without a schedulable worker is not taken;
- listed workers never exceed WORKERS_MAX, open picks OPEN_MAX, and workers that are avoided since
  they failed WORKERS_MAX.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from typing_extensions import override

from kvroute.client.fallback.bounded_hash import (
    TOKEN_BYTES_MAX,
    blocks_key,
    ranked,
    session_key,
    text_key,
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
"""Workers (ranks) that are kept of a router's list, at most."""
OPEN_MAX = 65_536
"""Picks of the fallback whose end was not reported; past the bound the oldest counts as ended."""
OPEN_S_MAX = 600.0
"""Seconds after which a pick whose end was not reported counts as ended."""
WORKER_S = 0.25
"""Seconds that each worker of the last list adds to the least time until the next: a router writes
1,000 workers in 30 ms, so that 1,000 clients of 1,000 workers cost all routers an eighth of a core.
"""
RETRY_S = 5.0
"""Least seconds from a failed attempt to list the workers to the next attempt."""
OUTPUT_TOKENS_MAX = 4096
"""Expected output tokens that count towards a request's length, at most, as in a router."""
RESERVATION = "fallback/"
"""Prefix of the fallback's reservation ids; no router's ids have it."""
_TOKENS_MAX = TOKEN_BYTES_MAX // 4
TEXT_BYTES_A_TOKEN = 4
"""Bytes of a text or a body that count as one token, as in a router."""
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
    """Age of the oldest list of workers that is used, seconds: addresses get other owners
    in time."""
    patience_s: float = 0.5
    """Seconds for which requests try to reach routers once none can be reached; after that,
    requests make one attempt each."""
    avoid_s: float = 10.0
    """Seconds for which a worker that failed is avoided, if there is another."""
    refresh_s: float = 60.0
    """Seconds between lists of workers while calls are made, a quarter more or less; at least
    0.25 s for each worker, so that a fleet of more than 240 is listed less often."""

    def __post_init__(self) -> None:
        for name in ("age_s_max", "patience_s", "avoid_s", "refresh_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ValueError(f"{name} is {getattr(self, name)}; 0 to 1,000,000 s is wanted")


@dataclass(frozen=True, slots=True)
class _Worker:
    key: Key
    rank: int | None
    """None for an engine with a single rank."""
    seed: int
    address: str
    labels: Mapping[str, str]
    models: frozenset[str]
    lora_names: frozenset[str]
    role: str
    max_model_len: int
    second: bool
    """Second choice: a router kept requests away from the worker, which is picked only if there is
    no other."""


class Fallback:
    """One client's last list of workers, open requests and picks without routers."""

    def __init__(self, policy: FallbackPolicy, counts: Counter[str], rng: random.Random) -> None:
        """counts: `fallback_picks`; `fallback_refused` requests without a fitting listed worker;
        `worker_lists`, `worker_lists_failed`; `outages` begun."""
        self.policy = policy
        self._counts = counts
        self._rng = rng
        self._statuses: list[WorkerStatus] = []
        self._made: list[_Worker] | None = None
        """The workers of `_statuses`, made when they are needed; None: not made yet."""
        self._listed_s: float | None = None
        self._due_s = 0.0
        self._routed = 0
        self._away_since_s: float | None = None
        self._open: Counter[Key] = Counter()
        self._picks: OrderedDict[str, tuple[Key, float]] = OrderedDict()
        """Reservation id -> worker, time of the pick; the oldest first."""
        self._avoided: dict[Key, float] = {}
        """Worker -> end of its avoidance."""
        self._refused: set[Key] = set()
        """Avoided workers that refused their last connection."""
        self._number = 0

    @override
    def __repr__(self) -> str:
        state = "routers away" if self.outage else "routers there"
        return f"<Fallback {len(self._statuses)} workers, {len(self._picks)} open picks, {state}>"

    # Answers of routers

    @property
    def outage(self) -> bool:
        """Whether no router could be reached, and none has answered since."""
        return self._away_since_s is not None

    def routed(self, now_s: float) -> bool:
        """Records that a router answered; returns whether to list the workers now: not with a
        program's first request, which may be its last.
        """
        self._away_since_s = None
        self._routed += 1
        return self._routed > 1 and now_s >= self._due_s

    def listed(self, statuses: Iterable[WorkerStatus], now_s: float) -> None:
        """Takes a router's list of workers, unless none is schedulable, and sets when the next is
        due."""
        kept = list(statuses)[:WORKERS_MAX]
        self._counts["worker_lists"] += 1
        period_s = max(self.policy.refresh_s, WORKER_S * len(kept))
        self._due_s = now_s + period_s * self._rng.uniform(0.75, 1.25)
        if not any(status.schedulable for status in kept):
            return  # the router has just started, or the whole fleet is away
        self._statuses, self._made, self._listed_s = kept, None, now_s

    def not_listed(self, now_s: float) -> None:
        """Records that the workers could not be listed."""
        self._counts["worker_lists_failed"] += 1
        self._due_s = now_s + RETRY_S * self._rng.uniform(1.0, 2.0)

    def unreachable(self, now_s: float) -> bool:
        """Records that no router could be reached; returns whether that has lasted
        for patience_s.
        """
        if self._away_since_s is None:
            self._away_since_s = now_s
            self._counts["outages"] += 1
        return now_s - self._away_since_s >= self.policy.patience_s

    def usable(self, now_s: float) -> bool:
        """Whether there is a list of workers that is not older than age_s_max."""
        return self._listed_s is not None and now_s - self._listed_s <= self.policy.age_s_max

    # Open requests

    def began(self, key: Key) -> None:
        """Records a request that was sent to a worker which a router picked."""
        self._open[key] += 1

    def ended(
        self,
        key: Key,
        now_s: float,
        failure: FailureReason.ValueType | None,
        *,
        refused: bool = False,
    ) -> None:
        """Records the end of a request. failure: None if it succeeded; refused: whether the worker
        refused the connection.
        """
        if self._open[key] > 1:
            self._open[key] -= 1
        else:
            del self._open[key]
        if failure in _AGAINST_THE_WORKER:
            self._avoid(key, now_s)
            if refused:
                self._refused.add(key)

    def reported(self, progress: Progress, now_s: float) -> None:
        """Applies a step of one of the fallback's picks; only its end counts."""
        if progress.state not in _ENDS:
            return
        taken = self._picks.pop(progress.reservation_id, None)
        if taken is not None:
            failed = progress.state == ProgressState.PROGRESS_STATE_FAILED
            reason = progress.failure_reason if failed else None
            self.ended(taken[0], now_s, reason, refused=failed and progress.refused)

    # Picks

    def pick(self, request: RouteRequest, now_s: float) -> RouteResponse | None:
        """A worker instead of a router's pick; None when no worker fits."""
        self._forget(now_s)
        fitting = self._fitting(request) if self.usable(now_s) else []
        key = _key(request)
        if not fitting or key is None:
            self._counts["fallback_refused"] += 1
            return None
        avoided = self._avoided
        first = [each for each in fitting if not each.second and each.key not in avoided]
        # When all have failed, as on a busy host, workers that accepted a connection come first.
        among = first or [each for each in fitting if each.key not in self._refused] or fitting
        loads = [self._open.get(each.key, 0) for each in among]
        places = ranked(key, [each.seed for each in among], loads, 3)
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
        """Ends picks whose end was not reported in time, and avoidances that are over."""
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
        names = [each.models for each in self._made]
        if names and not request.model and not frozenset.intersection(*names):
            return []  # ambiguous, as to a router
        allowed, excluded = set(request.allowed_worker_ids), set(request.excluded_worker_ids)
        tokens = _tokens(request) + min(request.expected_output_tokens, OUTPUT_TOKENS_MAX)
        labels, unwanted = dict(request.required_labels), set(request.excluded_labels.items())
        model, lora = request.model, request.lora_name
        return [
            each
            for each in self._made
            if each.role in roles
            and (not model or model in each.models or model in each.lora_names)
            and (not lora or not each.lora_names or lora in each.lora_names)
            and each.key[0] not in excluded
            and (not allowed or each.key[0] in allowed)
            and (not each.max_model_len or tokens <= each.max_model_len)
            and (not labels or labels.items() <= each.labels.items())
            and unwanted.isdisjoint(each.labels.items())
        ]


def _workers(statuses: list[WorkerStatus]) -> list[_Worker]:
    """The workers of a list that a request may be sent to."""
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
        case "estimated_tokens":
            return request.estimated_tokens
        case None:
            return 0
        case prompt:
            return len(_text(request, prompt)) // TEXT_BYTES_A_TOKEN


def _text(request: RouteRequest, prompt: str) -> bytes:
    """The bytes of a prompt that is a text or a body; prompt: the name of its field."""
    content: str | bytes = getattr(request, prompt)
    return content.encode() if isinstance(content, str) else content


def _key(request: RouteRequest) -> int | None:
    """The hash key of a request's session, or else of its prompt's beginning; None: the request has
    no prompt, and only a router knows where its KV cache is."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        return None
    if request.session_id:
        return session_key(request.session_id)
    if prompt == "token_bytes":
        return tokens_key(request.token_bytes)
    if prompt == "token_ids":
        ids = request.token_ids.ids[:_TOKENS_MAX]
        return tokens_key(b"".join(token_id.to_bytes(4, "little") for token_id in ids))
    if prompt == "estimated_tokens":
        return text_key(request.request_id.encode())  # no two requests have a beginning in common
    if prompt != "block_hashes":
        return text_key(_text(request, prompt))
    hashed = request.block_hashes
    blocks = max(1, _TOKENS_MAX // hashed.block_size) if hashed.block_size else 1
    return blocks_key(hashed.hashes[:blocks])
