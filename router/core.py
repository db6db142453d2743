"""The decision core: which worker gets the request, and what that changes.

Pure: no I/O, no clock, no randomness of its own. It takes `now_s` and a seeded rng, owns load and
reservations, and reads the fleet view. The gRPC shell performs what it answers, and so does a
simulator: one core, two worlds.

Laws:
- a pick reserves its load at once, and every reservation is released exactly once;
- a refusal changes nothing;
- an excluded worker is never picked, nor one whose cost is not a number;
- the same request id, prompt, model and role get the same answer while they are remembered.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

import numpy as np
import numpy.typing as npt

from events.inflight import Peers
from events.view import FleetView, Source, schedulable
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex, cheapest
from router.candidates import COLUMNS, Candidates, Column, Flags
from router.config import ModelSettings, RoutingSettings
from router.decision import (
    CacheReport,
    Decision,
    Overlap,
    Pick,
    Prefill,
    Progress,
    ProgressResult,
    ProgressState,
    Repeated,
    Request,
    Role,
    Weighed,
)
from router.eligibility import (
    DRAINED,
    NOT_A_NUMBER,
    OUTPUT_TOKENS_MAX,
    TOO_LONG,
    exclusions,
    narrows_nothing,
    only_roles,
    too_long,
)
from router.further import Further
from router.hot_prefixes import HotPrefixes
from router.lane import Lane
from router.load import WorkerLoad
from router.models import Models
from router.pairs import Matched, Pairs, Stages
from router.policies.configured import configured
from router.policies.dynamo_adaptive import DYNAMO_ADAPTIVE
from router.policies.own import Failure, PolicyFailed
from router.policies.policy import Policy, Scores
from router.pools import Pool, Pools, heartbeat_of
from router.prompt import Prompt
from router.rates import PrefillRates
from router.refusals import Reason, Refusal
from router.reservations import Ending, Fingerprint, PrefillHold, Reservation, Reservations
from router.self_check import SelfCheck
from router.sessions import Session, Sessions
from router.topology import PlaceLabels
from router.ttft_check import TtftCheck
from router.warnings import FleetWatch, WorkerWarning

DRAINED_MAX = 10_000
FULL_RETRY_S = 0.5
"""What RetryInfo says when all are full: about the time until something ends."""
ROOM_BITS = 48
"""Of a pair's room, which stays below 2^63 for any number of ranks."""
_FULL = "full"
_ENDED_BY_US = (Ending.EXPIRED, Ending.WORKER_LOST)


def _no_mark(_stage: str) -> None:
    """Nobody measures."""


class RouterCore:
    """One replica's decisions."""

    def __init__(
        self,
        view: FleetView,
        routing: RoutingSettings,
        *,
        models: tuple[ModelSettings, ...] = (),
        model_memory_s: float = 300.0,
        tombstone_s: float = 60.0,
        replica: str = "",
        rng: random.Random,
    ) -> None:
        self.view = view
        self.routing = routing
        self.replica = replica
        self.loads: dict[WorkerKey, WorkerLoad] = {}
        self.peers = Peers(replica)
        """The load that other replicas have reserved."""
        self.reservations = Reservations(routing.memory_window_s, routing.reservations_max)
        self.endings: Counter[Ending] = Counter()
        self.cache_reports: dict[WorkerKey, CacheReport] = {}
        self.self_check = SelfCheck(view)
        self.ready = True
        """False: part of the fleet may not have been heard yet, so that no model is unknown."""
        self.drained: dict[str, None] = {}
        """Worker ids that get nothing new."""
        self.drains = 0
        """Changes of these."""
        self.models = Models(models, model_memory_s)
        self.pools = Pools(view, self.models, self.load_of)
        self.policies = configured(routing)
        """By name, with their parameters."""
        self.policy_failures: Counter[tuple[str, Failure]] = Counter()
        """Decisions that a policy of the operator's could not make."""
        self._policy_error = ""
        labels = PlaceLabels(routing.host_label, routing.rack_label, routing.cluster_label)
        self.rates = PrefillRates(routing.prefill_rate)
        self.ttft_check = TtftCheck()
        self.sessions = Sessions(routing.session_ttl_s, routing.sessions_max)
        self.further = Further(self.loads, self.rates, labels, self.sessions)
        self.pairs = Pairs(self.further)
        self.pair_picks: Counter[Prefill] = Counter()
        self._of_role: dict[Role, tuple[Pool, Sequence[str]]] = {}
        """Who is of another role, in the pool that was asked last."""
        self.tombstone_s = tombstone_s
        self._rng = rng
        self._picks = 0
        self._ids = 0
        index = view.index
        self.lane = Lane(self, rng) if isinstance(index, NativeIndex) else None
        """Picks for plain requests; the rest of this file is its twin, and for all others."""
        self.hot: HotPrefixes | None = None
        """Copies what many ask for; None: switched off."""
        self._watch = FleetWatch(view, self.self_check, lambda name: self.models.names(name)[0])

    def route(
        self,
        request: Request,
        now_s: float,
        mark: Callable[[str], None] = _no_mark,
        watch: Callable[[Decision], None] | None = None,
    ) -> Pick | Repeated:
        """Picks and reserves; raises Refusal. mark is called with the name of each stage's end.

        watch: sees the decision before anything of it is reserved, and changes nothing; of a pair
        the one for whoever computes the prompt.
        """
        lane = self.lane if watch is None else None
        if lane is not None and (picked := lane.pick(request, now_s, mark)) is not None:
            reservation, overlap, weighed = picked
            self._remember(request, reservation, now_s)
            if self.hot is not None:
                self.hot.on_pick(reservation, request.for_all, lambda: request.prompt, now_s)
            return Pick(reservation, partial(self._told, request, weighed, now_s), overlap)
        earlier = self.reservations.of_request(request.request_id)
        if earlier is not None:
            if earlier.fingerprint != request.fingerprint():
                raise Refusal(
                    Reason.REQUEST_ID_REUSED,
                    f"request id {request.request_id!r} was used with another prompt, model or"
                    " phase",
                )
            if earlier.ended is None:  # the answer names the whole lease, so it begins again
                self.reservations.renew(earlier, now_s + self.routing.lease_s)
            return Repeated(earlier)
        if self.reservations.full():
            raise Refusal(
                Reason.TOO_MANY_RESERVATIONS,
                f"{len(self.reservations)} requests are in flight, as many or as long as this"
                " router keeps (routing.reservations_max)",
                FULL_RETRY_S,
            )
        decision = self.decide(request, now_s, mark)
        if not decision.order:
            raise self.refuse(decision)
        if watch is not None:
            watch(decision.computing)
        source = decision.sources[decision.order[0]]
        reservation = self.reserve(
            source,
            request.request_id,
            request.fingerprint(),
            request.prompt.prefixes(heartbeat_of(source).block_size),
            request.prompt.token_count,
            decision.overlap(decision.order[0]),
            now_s,
            computes=decision.computing is decision and request.resumed is None,
        )
        self._remember(request, reservation, now_s)
        computing = decision.computing
        if decision.how is not None:
            self.pair_picks[decision.how] += 1
            if computing is not decision:
                self._reserve_prefill(reservation, computing, now_s)
        if computing.policy.timed:
            seen = reservation.where_computed()
            source = computing.sources[computing.order[0]]
            self.rates.on_pick(
                source.key,
                source.slot,
                heartbeat_of(source).model,
                reservation.id,
                seen.new_tokens,
                reservation.prompt_tokens,
                now_s,
            )
        if (predicted_s := computing.scores.ttft_s) is not None:
            self.ttft_check.on_pick(reservation.id, predicted_s.item(computing.order[0]))
        if self.hot is not None:
            seen = reservation.where_computed()
            self.hot.on_pick(seen, request.for_all, lambda: request.prompt, now_s)
        return Pick(reservation, decision, computing.overlap(computing.order[0]))

    def _remember(self, request: Request, reservation: Reservation, now_s: float) -> None:
        """Where a session's KV cache will be."""
        if request.session_id:
            size = heartbeat_of(self.view.sources[reservation.worker]).block_size
            lora_name = request.prompt.lora_name
            self.sessions.put(request.session_id, reservation, size, lora_name, now_s)

    def decide(
        self, request: Request, now_s: float, mark: Callable[[str], None] = _no_mark
    ) -> Decision:
        """Scores the pool and changes nothing; raises Refusal when there is no pool to score.

        Whoever asks looks at `order`: it is empty when nobody can be picked, and `refuse` says why.
        """
        policy = self._policy(request)
        if request.prompt.token_count > self.routing.prompt_tokens_max:
            raise Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {request.prompt.token_count} tokens, the limit is"
                f" {self.routing.prompt_tokens_max} (routing.prompt_tokens_max)",
            )
        self.pools.refresh()
        pool, down = self.pools.live(request.model, self.ready)
        for size in pool.block_sizes:
            request.prompt.prefixes(size)
        mark("hash")
        overlaps = self._overlaps(request.prompt, pool)
        mark("match")
        matched = Matched(request, pool, down, self.pools.table(pool), overlaps, now_s)
        if request.role is Role.PAIR:
            stages = Stages(
                policy if request.policy else self.policies[self.routing.prefill_policy],
                self.policies[self.routing.decode_policy],
                policy,
                self.routing.local_prefill_tokens,
                self.routing.local_prefill_percent / 100,
            )
            decision = self.pairs.decide(matched, stages, self._judge, self._eligible)
        elif request.resumed is not None:
            holders = self._holders(matched, request.resumed)
            stage = policy if request.policy else self.policies[self.routing.decode_policy]
            away = self.further.mean_distance(pool, holders)
            decision = self._judge(matched, stage, self._eligible(request, pool), away)
        else:
            decision = self._judge(matched, policy, self._eligible(request, pool))
        mark("cost")
        return decision

    def _holders(self, matched: Matched, session: Session) -> Flags:
        """The workers that hold most of a session's KV cache; raises Refusal if nobody does.

        By the index; by where its last request went if that can't say.
        """
        pool, trust = matched.pool, matched.table[COLUMNS.index("trust")]
        held = trust * matched.overlaps[0]
        longest = held.max(initial=0.0)
        holders: Flags = held == longest
        if longest > 0:
            return holders
        was_there = np.array([key == session.worker for key in pool.workers], np.bool_)
        holders = was_there & ((trust < 1) | (not len(session.prefixes)))
        if not holders.any():
            raise Refusal(
                Reason.UNKNOWN_SESSION,
                f"nobody holds session {matched.request.session_id!r} any more",
            )
        return holders

    def _eligible(self, request: Request, pool: Pool) -> Sequence[str]:
        """A reason for each worker that can't take a request; empty where it can."""
        output_tokens = self._output_tokens(request)
        if not narrows_nothing(request, output_tokens, pool, bool(self.drained)):
            return exclusions(request, output_tokens, pool, self.drained)
        role = request.role
        if pool.roles <= {role, Role.BOTH}:
            return pool.all_eligible
        known = self._of_role.get(role)
        if known is None or known[0] is not pool:
            known = self._of_role[role] = pool, only_roles(pool, role)
        return known[1]

    def _judge(
        self,
        matched: Matched,
        policy: Policy,
        eligible: Sequence[str],
        kv_distance: Column | None = None,
    ) -> Decision:
        """Scores a pool, and puts it in order."""
        request, pool, not_live, table, overlaps, now_s = matched
        rows = self._rows(request, pool, table, overlaps, eligible, now_s, kv_distance)
        policy, scores = self._scored(policy, rows)
        excluded, order, tied = self._order(rows, scores)
        return Decision(
            request,
            policy,
            rows,
            pool.sources,
            overlaps,
            scores,
            excluded,
            order,
            tied,
            not_live,
            now_s,
        )

    def _told(self, request: Request, weighed: Weighed, now_s: float) -> Decision:
        """A decision of the lane, as the general way would have told it."""
        policy = self._policy(request)
        pool = weighed.pool
        rows = self._rows(request, pool, weighed.table, weighed.tokens, weighed.eligible, now_s)
        scores = policy.score(rows)
        costs = scores.costs.tolist()
        excluded = [
            reason or (_FULL if full else "" if isfinite(cost) else NOT_A_NUMBER)
            for reason, full, cost in zip(weighed.eligible, rows.full.tolist(), costs, strict=True)
        ]
        return Decision(
            request,
            policy,
            rows,
            pool.sources,
            weighed.tokens,
            scores,
            excluded,
            weighed.order,
            weighed.tied,
            weighed.not_live,
            now_s,
        )

    def reconfigure(self, routing: RoutingSettings) -> None:
        """Decides by other settings from now on (those of router/reload.py may differ).

        Raises ConfigError, and changes nothing, for policies that can't be.
        """
        self.policies = configured(routing)
        self.routing = routing
        if self.lane is not None:
            tally = self.lane.tally
            self.lane = Lane(self, self._rng)
            self.lane.tally = tally

    def report(self, progress: Progress, now_s: float) -> ProgressResult:
        """Moves a reservation on. Counts are cumulative, so a step told twice changes nothing."""
        reservation = self.reservations.get(progress.reservation_id)
        if reservation is None:
            return ProgressResult.UNKNOWN
        changed = self._learn(reservation, progress, now_s)
        if reservation.ended in _ENDED_BY_US:
            return ProgressResult.UNKNOWN  # whoever reports must learn that it holds nothing
        if reservation.ended is not None:
            return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED
        match progress.state:
            case ProgressState.FINISHED:
                self._end(reservation, Ending.FINISHED, now_s)
                return ProgressResult.APPLIED
            case ProgressState.FAILED:
                self._end(reservation, progress.failure, now_s)
                return ProgressResult.APPLIED
            case ProgressState.PREFILL_DONE:
                if self._prefill_done(reservation, now_s):
                    self._measure(reservation, now_s)
                    changed = True
            case ProgressState.RUNNING:
                changed |= not reservation.running
                reservation.running = True
                if progress.output_tokens:  # so its prompt is computed, though nobody told
                    changed |= self._prefill_done(reservation, now_s)
        self.reservations.renew(reservation, now_s + self.routing.lease_s)
        return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED

    def on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        """A worker's heartbeat is in the view."""
        source = self.view.sources[key]
        heartbeat = heartbeat_of(source)
        self.models.on_heartbeat(heartbeat, now_s)
        if heartbeat.sampled_at_s is not None:
            # The age is by the relay's clock alone, so that a skew between hosts does no harm.
            age_s = max(0.0, heartbeat.sent_at_s - heartbeat.sampled_at_s)
            load = self._load(key)
            load.sample(
                heartbeat.running,
                heartbeat.waiting,
                heartbeat.used_blocks,
                now_s - age_s,
                *self.peers.heard(key, now_s - age_s),
            )
            self._put_load(key, load)

    def on_inflight(self, payload: bytes, now_s: float) -> None:
        """Another replica tells what it has reserved."""
        self._hear(self.peers.on_message(payload, now_s))

    def on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        """Workers that the view knows no more: what they had reserved ends."""
        for reservation in self.reservations.on_workers(workers):
            self._end(reservation, Ending.WORKER_LOST, now_s)
        for worker in workers:
            self.loads.pop(worker, None)
            self.cache_reports.pop(worker, None)
        self.self_check.on_forgotten(workers)
        self.rates.on_forgotten(workers)

    def drain(self, worker_id: str) -> int:
        """No new picks of a worker. Returns its ranks."""
        if worker_id not in self.drained and len(self.drained) >= DRAINED_MAX:
            here = {key.worker_id for key in self.view.sources}
            away = (drained for drained in self.drained if drained not in here)
            del self.drained[next(away, next(iter(self.drained)))]
        self.drained[worker_id] = None
        self.drains += 1
        return len(self.view.ranks(worker_id))

    def undrain(self, worker_id: str) -> int:
        """Takes a worker back in. Returns its ranks."""
        self.drained.pop(worker_id, None)
        self.drains += 1
        return len(self.view.ranks(worker_id))

    def remove(self, worker_id: str, tombstone_s: float, now_s: float) -> int:
        """Forgets a worker, ignores it for a while (0: the configured time). Returns its ranks."""
        removed = self.view.remove(worker_id, now_s + (tombstone_s or self.tombstone_s))
        self.on_forgotten(removed, now_s)
        return len(removed)

    def tick(self, now_s: float) -> int:
        """Time went by. Returns the reservations that expired."""
        expired = self.reservations.expired(now_s)
        for reservation in expired:
            self._end(reservation, Ending.EXPIRED, now_s)
        self.reservations.forget_old(now_s)
        self.sessions.forget_old(now_s)
        self.models.tick(now_s)
        self._hear(self.peers.tick(now_s))
        self.rates.tick()
        self.pools.refresh()
        self._watch.on_tick(self.loads, now_s)
        return len(expired)

    def lora_of(self, model: str) -> str:
        """The LoRA that a request means by its model's name; empty when that is a whole model."""
        self.pools.refresh()
        return self.pools.lora_of(model)

    def serves(self, source: Source, model: str) -> bool:
        """Whether a worker serves a model, by any of its names."""
        return source.heartbeat is not None and self.models.serves(source.heartbeat, model)

    def warnings(self, source: Source, now_s: float) -> list[WorkerWarning]:
        """What an operator should mend about a worker."""
        return self._watch.warnings(source, now_s)

    def take_policy_error(self) -> str:
        """What the last policy did wrong that failed since this was asked; empty: none did."""
        told, self._policy_error = self._policy_error, ""
        return told

    def load_of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load; an idle one for a worker that nothing is known of."""
        return self.loads.get(key) or WorkerLoad()

    def excluded(self, source: Source) -> str:
        """Why a worker gets no requests at all; empty when it may."""
        if source.key.worker_id in self.drained:
            return DRAINED
        return schedulable(source, self.view.mass_silence)

    def _policy(self, request: Request) -> Policy:
        name = request.policy or self.routing.policy
        if name != self.routing.policy and not self.routing.policy_per_request:
            raise Refusal(
                Reason.POLICY_NOT_ALLOWED,
                "requests may not choose a policy here (routing.policy_per_request)",
            )
        if (policy := self.policies.get(name)) is None:
            known = ", ".join(self.policies)
            raise Refusal(Reason.UNKNOWN_POLICY, f"unknown policy {name!r}; there are {known}")
        return policy

    def _scored(self, policy: Policy, rows: Candidates) -> tuple[Policy, Scores]:
        """The costs of rows, and the policy that made them: the default one for one that fails."""
        if not len(rows):
            return policy, Scores(np.zeros(0))
        try:
            scores = policy.score(rows)
            if scores.chances is not None:  # what is drawn is told, so that a pick can be redone
                told = {**scores.shared_terms, "draw": self._rng.random()}
                scores = replace(scores, shared_terms=told)
            return policy, scores
        except PolicyFailed as failed:
            self.policy_failures[policy.name, failed.failure] += 1
            self._policy_error = f"policy {policy.name!r}: {failed}"
        default = self.policies[DYNAMO_ADAPTIVE.name]
        return default, default.score(rows)

    def _overlaps(self, prompt: Prompt, pool: Pool) -> npt.NDArray[np.int32]:
        """What each worker holds of the prompt, in tokens: a row for each field of Overlap."""
        if len(pool.block_sizes) == 1:
            return self._overlaps_of(prompt, next(iter(pool.block_sizes)), pool.slots)
        tokens = np.zeros((len(Overlap._fields), len(pool)), np.int32)
        for size in pool.block_sizes:
            told = [heartbeat_of(source).block_size == size for source in pool.sources]
            rows = np.flatnonzero(told)
            tokens[:, rows] = self._overlaps_of(prompt, size, pool.slots[rows])
        return tokens

    def _overlaps_of(
        self, prompt: Prompt, size: int, slots: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int32]:
        if not size:  # workers that have not told their block size yet
            return np.zeros((len(Overlap._fields), len(slots)), np.int32)
        # The engine recomputes the last block of a fully cached prompt.
        usable_max = (prompt.token_count - 1) // size
        blocks = self.view.index.overlap(prompt.prefixes(size), usable_max, slots)
        tokens: npt.NDArray[np.int32] = blocks * np.int32(size)
        return tokens

    def _rows(
        self,
        request: Request,
        pool: Pool,
        table: npt.NDArray[np.float64],
        overlaps: npt.NDArray[np.int32],
        excluded: Sequence[str],
        now_s: float,
        kv_distance: Column | None = None,
    ) -> Candidates:
        trust = table[COLUMNS.index("trust")]
        return Candidates(
            workers=pool.workers,
            prompt_tokens=request.prompt.token_count,
            overlap_tokens=trust * overlaps[1],
            excluded=excluded,
            table=table,
            request=request,
            tokens=overlaps,
            pool=pool,
            further=self.further,
            now_s=now_s,
            kv_distance=kv_distance,
        )

    def _output_tokens(self, request: Request) -> int:
        """What a request is expected to bring out."""
        told = request.expected_output_tokens
        return min(self.routing.expected_output_tokens if told is None else told, OUTPUT_TOKENS_MAX)

    def _order(self, rows: Candidates, scores: Scores) -> tuple[Sequence[str], list[int], int]:
        """Why rows can't be picked; the pick and the rows next to it, cheapest first; how many tie.

        Rows that tie take turns from a random one on, so that no second choice is everybody's.
        Where the policy gives chances, the pick is drawn by them.
        """
        excluded, can = rows.excluded, None
        if self.pools.any_full or any(excluded):
            excluded = [
                reason or (_FULL if full else "")
                for reason, full in zip(excluded, rows.full.tolist(), strict=True)
            ]
            can = np.array([not reason for reason in excluded], np.bool_)
        wanted = 1 + max(1, self.routing.alternatives)  # receipts name the runner-up
        tied, following, bad = cheapest(scores.costs, can, wanted)
        if bad:
            excluded = list(excluded)
            for row in bad:
                excluded[row] = excluded[row] or NOT_A_NUMBER
        first = self._rng.randrange(len(tied)) if len(tied) > 1 else 0
        order = [*tied[first:], *tied[:first], *following][:wanted]
        if scores.chances is not None and len(order) > 1:
            drawn = _drawn(rows, scores.chances, excluded, scores.shared_terms["draw"])
            order = [drawn, *(row for row in order if row != drawn)][:wanted]
        return excluded, order, len(tied)

    def refuse(self, decision: Decision) -> Refusal:
        """Why nobody in a pool can be picked."""
        refusal = self._refusal(decision)
        refusal.decision = refusal.decision or decision
        return refusal

    def _refusal(self, decision: Decision) -> Refusal:
        told = ", ".join(
            f"{count} {reason}" for reason, count in sorted(decision.exclusions().items())
        )
        if not len(decision.rows):
            of = f" for {decision.request.model!r}" if decision.request.model else ""
            return Refusal(Reason.NO_WORKER, f"no live worker{of}: {told}")
        if _FULL in decision.excluded:
            return Refusal(Reason.ALL_WORKERS_FULL, f"no worker has room: {told}", FULL_RETRY_S)
        may_come_back = [source for source, _ in decision.not_live]
        too_short = []
        for source, reason in zip(decision.sources, decision.excluded, strict=True):
            if reason == TOO_LONG:
                too_short.append(heartbeat_of(source).max_model_len)
            elif reason == DRAINED:
                may_come_back.append(source)
        output_tokens = self._output_tokens(decision.request)
        if too_short and all(
            too_long(decision.request, output_tokens, heartbeat_of(one)) for one in may_come_back
        ):
            return Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {decision.rows.prompt_tokens} tokens and fits no worker with what"
                f" it is expected to bring out; the longest takes {max(too_short)}",
            )
        if decision.prefill is not None and not decision.prefill.order:
            return self.refuse(decision.prefill)
        return Refusal(Reason.NO_ELIGIBLE_WORKER, f"no worker may take this request: {told}")

    def withdraw(self, reservation: Reservation, now_s: float) -> None:
        """Ends a reservation whose answer could not be given."""
        if reservation.ended is None:
            self._end(reservation, Ending.FAILED_UNKNOWN, now_s)

    def reserve(
        self,
        source: Source,
        request_id: str,
        fingerprint: Fingerprint,
        prefixes: HashArray,
        prompt_tokens: int,
        overlap: Overlap,
        now_s: float,
        *,
        computes: bool = True,
    ) -> Reservation:
        """Reserves a pick's load: prefixes are the prompt's, overlap is that of the source.

        computes: whether the worker computes the prompt itself.
        """
        size = heartbeat_of(source).block_size
        self._ids += 1
        self._picks += 1
        reservation = Reservation(
            id=f"{self.replica}-{self._ids}",
            request_id=request_id,
            worker=source.key,
            fingerprint=fingerprint,
            prefixes=prefixes,
            has_tail=not size or prompt_tokens % size > 0,
            prompt_tokens=prompt_tokens,
            predicted_tokens=overlap.told,
            new_tokens=prompt_tokens - overlap.usable if computes else 0,
            opened_at_s=now_s,
            lease_ends_s=now_s + self.routing.lease_s,
            answer=b"",
        )
        load = self._load(source.key)
        load.open(prefixes, reservation.has_tail, reservation.new_tokens, now_s)
        load.last_picked = self._picks
        self.pools.put_load(source.slot, load)
        if size:
            # What it holds on from there, too: the index knows, and predicts only the rest.
            self.view.predict(source, prefixes[overlap.told // size :], now_s)
        self.reservations.add(reservation)
        return reservation

    def _reserve_prefill(self, reservation: Reservation, decision: Decision, now_s: float) -> None:
        """Has another worker compute the prompt of what was just reserved."""
        row = decision.order[0]
        source, overlap = decision.sources[row], decision.overlap(row)
        key, size = source.key, heartbeat_of(source).block_size
        ranks = max(1, len(self.view.ranks(key.worker_id)))
        hold = reservation.prefill = PrefillHold(
            worker=key,
            predicted_tokens=overlap.told,
            new_tokens=reservation.prompt_tokens - overlap.usable,
            # SGLang finds the rank that a prompt was computed on by room % ranks.
            room=self._rng.getrandbits(ROOM_BITS) * ranks + key.dp_rank % ranks,
        )
        load = self._load(key)
        load.open(reservation.prefixes, reservation.has_tail, hold.new_tokens, now_s)
        self._picks += 1
        load.last_picked = self._picks
        self.pools.put_load(source.slot, load)
        if size:
            self.view.predict(source, reservation.prefixes[overlap.told // size :], now_s)

    def _end_prefill(self, reservation: Reservation, now_s: float) -> None:
        """The prompt is computed, or nobody wants it any more: once."""
        hold = reservation.prefill
        if hold is None or not hold.open:
            return
        hold.open = False
        load = self._load(hold.worker)
        load.prefill_done(hold.new_tokens)
        load.close(reservation.prefixes, reservation.has_tail, now_s)
        self._put_load(hold.worker, load)

    def _learn(self, reservation: Reservation, progress: Progress, now_s: float) -> bool:
        """Takes over what a step tells of counts, once."""
        changed = progress.output_tokens > reservation.output_tokens
        if changed:
            reservation.output_tokens = progress.output_tokens
        if progress.cached_tokens is not None and reservation.cached_tokens is None:
            reservation.cached_tokens = min(progress.cached_tokens, reservation.prompt_tokens)
            changed = True
            seen = reservation.where_computed()
            if seen.worker in self.view.sources:
                known = self.cache_reports.setdefault(seen.worker, CacheReport())
                known.predicted += seen.predicted_tokens
                known.reported += reservation.cached_tokens
                self.self_check.on_report(seen, reservation.cached_tokens, now_s)
        return changed

    def _prefill_done(self, reservation: Reservation, now_s: float) -> bool:
        if reservation.prefill_done:
            return False
        reservation.prefill_done = True
        self._end_prefill(reservation, now_s)
        load = self._load(reservation.worker)
        load.prefill_done(reservation.new_tokens)
        self._put_load(reservation.worker, load)
        self.rates.on_end(reservation.where_computed().worker, reservation.id)
        return True

    def _measure(self, reservation: Reservation, now_s: float) -> None:
        """Learns from a prompt that is said to be done just now."""
        self.ttft_check.on_done(reservation.id, now_s - reservation.opened_at_s)
        seen = reservation.where_computed()
        source = self.view.sources.get(seen.worker)
        if source is not None and source.heartbeat is not None:
            self.rates.on_done(
                source.key,
                source.slot,
                source.heartbeat.model,
                seen.new_tokens,
                reservation.prompt_tokens,
                reservation.opened_at_s,
                now_s,
            )

    def _end(self, reservation: Reservation, ending: Ending, now_s: float) -> None:
        load = self._load(reservation.worker)
        if not reservation.prefill_done:
            reservation.prefill_done = True
            load.prefill_done(reservation.new_tokens)
            self.rates.on_end(reservation.where_computed().worker, reservation.id)
        load.close(reservation.prefixes, reservation.has_tail, now_s)
        self._put_load(reservation.worker, load)
        self._end_prefill(reservation, now_s)
        self.ttft_check.on_end(reservation.id)
        self.reservations.end(reservation, ending, now_s)
        self.endings[ending] += 1

    def _hear(self, workers: Collection[WorkerKey]) -> None:
        for key in workers:
            if key in self.view.sources:
                load = self._load(key)
                load.hear(*self.peers.heard(key, load.sampled_at_s or 0.0))
                self._put_load(key, load)

    def _put_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        if (source := self.view.sources.get(key)) is not None:
            (self.lane or self.pools).put_load(source.slot, load)

    def _load(self, key: WorkerKey) -> WorkerLoad:
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = WorkerLoad()
        return load


def _drawn(
    rows: Candidates, chances: npt.NDArray[np.float64], excluded: Sequence[str], draw: float
) -> int:
    """The row that a number from 0 to 1 stands for: one that can be picked, by its chance.

    Of those, in the order of worker ids and ranks, the first whose chance and those before it are
    more than that share of all their chances.
    """
    can = sorted(
        (row for row, reason in enumerate(excluded) if not reason),
        key=rows.workers.__getitem__,
    )
    reached = np.cumsum(chances[can])
    # Rounding may bring the draw to the very end, which is the last that has a chance.
    last = np.searchsorted(reached, reached[-1])
    return can[int(min(last, np.searchsorted(reached, draw * reached[-1], "right")))]
