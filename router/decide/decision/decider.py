"""Decides about a request: a policy gives each worker of its pool a cost, and the lowest is first.

    Request ─> policy, pool ─> overlaps ─> rows ─> costs ─> order ─> Decision

Pure, like the core that it is a part of. Laws:
- a decision changes nothing but the state of the rng, and the counts of failed policies;
- an excluded worker, or a worker whose cost is not a number, is never first in order;
- a worker that is over its learned capacity (router/fleet/health/capacity.py) is first only where
  no worker has room;
- a worker of the last resort is first only where no answering worker may take the request at all.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from indexer.identity import WorkerKey
from indexer.index import BlockIndex
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import RoutingSettings
from router.decide.decision.decision import Decision, Overlap
from router.decide.decision.label_shares import of_share
from router.decide.decision.nobody_fits import NobodyFits
from router.decide.decision.objectives import held_from, least_missed, missed_at, none_keeps
from router.decide.decision.pairs import FETCHES_FROM_OTHERS, Matched, Pairs, Stages, of_kind
from router.decide.decision.ranking import Ranking, RowUsers, kernel_of, prefill_inputs
from router.decide.policies.affinity import held, with_bonus
from router.decide.policies.candidates import Candidates
from router.decide.policies.configured import DecisionSettings, PolicySettings
from router.decide.policies.dynamo_adaptive import DYNAMO_ADAPTIVE
from router.decide.policies.own import Failure, PolicyFailed
from router.decide.policies.policy import Policy
from router.fleet.blocks_ahead import SIMULATED_MAX, BlocksAhead
from router.fleet.eligibility import (
    DRAINED,
    OUTPUT_TOKENS_MAX,
    TOO_LONG,
    Barred,
    Exclusions,
    answering_first,
    loaded_first,
    too_long,
)
from router.fleet.on_demand import last_slot
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.state import Fleet
from router.fleet.table import COLUMNS, Column, Flags
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal
from router.request.request import Request, Role, Session

FULL_RETRY_S = 0.5
"""RetryInfo in seconds when all workers are full: about the time until some request ends."""
_FULL_COLUMN, _PREFILL_COLUMN = COLUMNS.index("full"), COLUMNS.index("prefill_tokens_active")
_RAW, _USABLE = Overlap._fields.index("raw"), Overlap._fields.index("usable")
_KERNELS_MAX = 256
"""Kernels of policies that are kept."""
_kernel_of = lru_cache(_KERNELS_MAX)(kernel_of)


class Decider:
    """Makes the decisions of a router, by the settings in force and the present state of the fleet.

    Over 300 lines: the steps of one decision, over rows and scores that they share.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingSettings,
        rng: random.Random,
        models: Iterable[ModelSettings] = (),
    ) -> None:
        """models: configured models, each with its own routing settings or none."""
        self.use(DecisionSettings.of(routing, models))
        self.looks_ahead = False
        """Whether a request that can wait needs KV blocks for its whole prompt and answer."""
        self.policy_failures: Counter[tuple[str, Failure]] = Counter()
        """Decisions for which a policy of the operator's own failed, by policy and kind."""
        self._policy_error = ""
        self._fleet = fleet
        self._index: BlockIndex = fleet.view.index
        self._pools = fleet.pools
        self._further = fleet.further
        self._loads = fleet.loads
        self._pairs = Pairs(fleet.further)
        self._rng = rng
        self._exclusions = Exclusions(fleet.drained)

    def use(self, settings: DecisionSettings) -> None:
        """Puts other settings in force."""
        self._of_fleet, self._of_models = settings.of_fleet, settings.of_models
        self._routing = settings.of_fleet.routing

    @property
    def policies(self) -> dict[str, Policy]:
        """Policies of the fleet with their parameters, by name; without models' own policies."""
        return self._of_fleet.policies

    def settings_of(self, model: str, pool: Pool) -> PolicySettings:
        """The settings of a request that names a model, and whose workers are a pool.

        The settings are those of the model that the request names, by name or alias; else, as for a
        LoRA or a request without a model, those of the model that all workers of the pool serve.
        """
        if not self._of_models:
            return self._of_fleet
        if (own := self._of_models.get(model)) is not None:
            return own
        served = {self._of_models.get(name, self._of_fleet) for name in set(pool.models)}
        return served.pop() if len(served) == 1 else self._of_fleet

    def decide(
        self,
        request: Request,
        ready: bool,
        now_s: float,
        mark: Callable[[str], None],
        *,
        may_exceed: bool = True,
    ) -> Decision:
        """Decides about a request. Raises Refusal if no worker serves its model, its prompt is too
        long, it may not name its policy, or no worker holds its session.

        ready: see Fleet.ready. mark: called with the name of each stage (hash, match, cost) at its
        end. may_exceed: whether workers over their learned capacity may be picked where no other
        has room; False: the request can wait. The decision's `order` is empty when no worker can be
        picked, and `refuse` says why.
        """
        if request.prompt.token_count > self._routing.prompt_tokens_max:
            raise Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {request.prompt.token_count} tokens, the limit is"
                f" {self._routing.prompt_tokens_max} (routing.prompt_tokens_max)",
            )
        self._pools.refresh()
        pool, kept_out = self._pools.live(request.model, ready)
        decision = self._with_room(self._matched(request, pool, kept_out, now_s, mark), may_exceed)
        if not decision.order and not _waits(decision):
            for last in self._pools.last_resorts(request.model, ready):
                matched = self._matched(request, last.pool, last.kept_out, now_s, mark)
                otherwise = self._with_room(matched._replace(last=last.reasons), may_exceed)
                if otherwise.order:
                    otherwise.last_resort = True
                    decision = otherwise
                    break
        mark("cost")
        return decision

    def _matched(
        self,
        request: Request,
        pool: Pool,
        kept_out: list[tuple[Source, str]],
        now_s: float,
        mark: Callable[[str], None],
    ) -> Matched:
        """The overlaps of a pool's workers with a prompt, and the settings of its decision.

        Raises Refusal for a policy that the request can't have.
        """
        settings = self.settings_of(request.model, pool) if self._of_models else self._of_fleet
        policy = self._policy(request, settings) if request.policy else settings.default
        prompt = request.prompt
        for size in pool.block_sizes:
            prompt.prefixes(size)
        mark("hash")
        if size := pool.only_block_size:
            overlaps = self._overlaps_of(prompt, size, pool.slots)
        else:
            overlaps = self._overlaps(prompt, pool)
        mark("match")
        table = self._pools.table(pool)
        if request.observed:  # it takes no room
            table = table.copy()
            table[_FULL_COLUMN] = 0.0
            table[_PREFILL_COLUMN] += self._fleet.observed.ahead(pool.workers, now_s)
            overlaps = self._before_it_came(prompt, pool, overlaps, now_s)
        return Matched(request, pool, kept_out, table, overlaps, now_s, settings, policy)

    def _with_room(self, matched: Matched, may_exceed: bool) -> Decision:
        """The decision among workers with room; if there is none and may_exceed, among those over
        their estimated capacity, too."""
        decision = self._decide(matched)
        if decision.order:
            if self.looks_ahead and not may_exceed and decision.prefill is None:
                return self._with_blocks(matched, decision)
        elif may_exceed:
            table = self._pools.with_over_estimate(matched.pool, matched.table)
            if table is not None:
                over_estimate = self._decide(matched._replace(table=table))
                over_estimate.over_estimate = True
                return over_estimate if over_estimate.order else decision
        return decision

    def _with_blocks(self, matched: Matched, decision: Decision) -> Decision:
        """Returns the decision if its pick has KV blocks for the whole request; else one in which
        all workers that have too few (router/fleet/blocks_ahead.py) count as full."""
        request, source = matched.request, decision.sources[decision.order[0]]
        output_tokens, load = self.output_tokens(request), self._loads.get(source.key)
        tokens = request.prompt.token_count + output_tokens
        if self._pools.written.surely_fits(source.slot, load, tokens):
            return decision
        promised = self._pools.blocks_promised
        ahead = BlocksAhead(matched.pool, self._loads, request.prompt, output_tokens, promised)
        for _ in range(SIMULATED_MAX):
            if ahead.has_enough(decision.order[0], matched.now_s):
                return decision
            ahead.look_at_all()
            decision = self._decide_without(matched, ahead.short)
            if not decision.order:
                return decision
        return self._decide_without(matched, ahead.short | ahead.unsure)

    def _decide_without(self, matched: Matched, full: Flags) -> Decision:
        """A decision in which the rows that are True in `full` count as full, too."""
        table = matched.table.copy()
        table[_FULL_COLUMN, full] = 1.0
        return self._decide(matched._replace(table=table))

    def _decide(self, matched: Matched) -> Decision:
        request, pool, settings = matched.request, matched.pool, matched.settings
        policy = matched.policy
        if request.role is Role.BOTH:
            return self._judge(matched, policy, self._eligible(request, pool))
        routing, policies = settings.routing, settings.policies
        if request.role is Role.PAIR:
            stages = Stages(
                policy if request.policy else policies[routing.prefill_policy],
                policies[routing.decode_policy],
                policy,
                routing.local_prefill_tokens,
            )
            return self._pairs.decide(matched, stages, self._judge, self._eligible)
        if request.resumed is not None:
            holders = self._holders(matched, request.resumed)
            stage = policy if request.policy else policies[routing.decode_policy]
            away = self._further.topology(pool).mean_distance(holders)
            computed = _at(pool, request.resumed.worker)
            fetches = of_kind(pool, computed if computed.any() else holders, routing.pair_labels)
            eligible = self._eligible(request, pool).narrowed(fetches, FETCHES_FROM_OTHERS)
            return self._judge(matched, stage, eligible, away)
        return self._judge(matched, policy, self._eligible(request, pool))

    def refuse(self, decision: Decision) -> NobodyFits:
        """The refusal of a request for which no worker of a pool can be picked."""
        exclusions = sorted(decision.exclusions().items())
        counts = "(" + ", ".join(f"{reason}: {count}" for reason, count in exclusions) + ")"
        refused = partial(NobodyFits, decision=decision)
        if not len(decision.pool):
            of = f" for {decision.request.model!r}" if decision.request.model else ""
            return refused(Reason.NO_WORKER, f"no live worker{of} {counts}")
        if decision.ranking.full:
            return refused(Reason.ALL_WORKERS_FULL, f"no worker has room {counts}", FULL_RETRY_S)
        may_come_back = [source for source, _ in decision.not_live]
        too_short = []
        for source, reason in zip(decision.sources, decision.excluded, strict=True):
            if reason == TOO_LONG:
                too_short.append(heartbeat_of(source).max_model_len)
            elif reason == DRAINED:
                may_come_back.append(source)
        output_tokens = self.output_tokens(decision.request)
        if too_short and all(
            too_long(decision.request, output_tokens, heartbeat_of(source))
            for source in may_come_back
        ):
            return refused(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {decision.request.prompt.token_count} tokens and fits no worker"
                f" with its expected output; the longest context is {max(too_short)} tokens",
            )
        if decision.prefill is not None and not decision.prefill.order:
            return self.refuse(decision.prefill)
        return refused(Reason.NO_ELIGIBLE_WORKER, f"no worker may take this request {counts}")

    def take_policy_error(self) -> str:
        """Returns the error of the last policy that failed since the previous call of this method;
        empty: none failed.
        """
        error, self._policy_error = self._policy_error, ""
        return error

    def _policy(self, request: Request, settings: PolicySettings) -> Policy:
        """The policy that a request names; raises Refusal if it is unknown or may not be named."""
        routing, policies, name = settings.routing, settings.policies, request.policy
        if name != routing.policy and not routing.policy_per_request:
            raise Refusal(
                Reason.POLICY_NOT_ALLOWED,
                "this router lets no request choose a policy (routing.policy_per_request)",
            )
        if (policy := policies.get(name)) is None:
            known = ", ".join(policies)
            raise Refusal(Reason.UNKNOWN_POLICY, f"unknown policy {name!r}; there are {known}")
        return policy

    def _holders(self, matched: Matched, session: Session) -> Flags:
        """The workers that hold most of a session's KV cache; raises Refusal if no worker does.

        They are those with the longest match in the index. Without any match: the worker of the
        session's last request, if its stream has no full trust or the blocks are not known.
        """
        pool, trust = matched.pool, matched.table[COLUMNS.index("trust")]
        held = trust * matched.overlaps[0]
        longest = held.max(initial=0.0)
        holders: Flags = held == longest
        if longest > 0:
            return holders
        was_there = _at(pool, session.worker)
        holders = was_there & ((trust < 1) | (not len(session.prefixes)))
        if not holders.any():
            raise Refusal(
                Reason.UNKNOWN_SESSION,
                f"no worker holds session {matched.request.session_id!r} any more",
            )
        return holders

    def able(self, decision: Decision) -> int:
        """Number of workers that can compute the prompt, before label shares and affinity."""
        request, pool = decision.request, decision.pool
        if request.role is Role.PAIR:
            request = replace(request, role=Role.PREFILL)
        return len(pool) - sum(self._eligible(request, pool).counts.values())

    def _eligible(self, request: Request, pool: Pool) -> Barred:
        """The rows of a pool that can't take a request, with reasons: role, labels and so on."""
        return self._exclusions.of(request, self.output_tokens(request), pool)

    def _judge(
        self,
        matched: Matched,
        policy: Policy,
        eligible: Barred,
        kv_distance: Column | None = None,
        *,
        is_alone: bool = False,
    ) -> Decision:
        """Scores the workers of a pool by a policy, and orders them; if the policy fails, by
        `dynamo-adaptive`. See Judge."""
        request, pool, not_live, table, overlaps, now_s, settings, _, last = matched
        prompt, session_id, barred = request.prompt, request.session_id, eligible
        if last:
            barred = answering_first(barred, last)
        if prompt.lora_name:
            barred = loaded_first(barred, prompt.lora_name, pool, table[_FULL_COLUMN])
        if shares := settings.routing.label_shares:
            drawn_by = session_id or request.request_id
            barred = of_share(barred, shares, drawn_by, pool, table[_FULL_COLUMN])
        # Of a pair, the session goes on where it is decoded.
        if session_id and (request.role is not Role.PAIR or kv_distance is not None):
            affinity = self._routing.affinity
            if affinity.hard:
                row = self._further.session_row(pool, session_id)
                barred = held(barred, row, table[_FULL_COLUMN])
            policy = with_bonus(policy, affinity.bonus.get(policy.name, 0.0))
        sheds = False
        if request.objective is not None and pool.sources:
            barred, table, sheds = self._within(matched, barred, kv_distance, is_alone)
        size = pool.only_block_size
        prefixes = prompt.prefixes(size) if size else None
        ranking = Ranking(table, overlaps, prompt.token_count, prefixes, barred.mask)
        decision = Decision(
            request,
            policy,
            pool,
            overlaps,
            barred,
            not_live,
            now_s,
            self._further,
            kv_distance,
            ranking,
        )
        decision.sheds = sheds
        if not pool.sources:
            return decision
        if policy.invests and prefixes is not None:
            decision.invested_tokens = self._further.invested_tokens(
                pool, table, overlaps[1], ranking.best_overlap(), prefixes, now_s
            )
            ranking.invest(decision.invested_tokens)
        try:
            self._score(decision)
        except PolicyFailed as failed:
            self.policy_failures[policy.name, failed.failure] += 1
            self._policy_error = f"policy {policy.name!r}: {failed}"
            default = settings.policies[DYNAMO_ADAPTIVE.name]
            return self._judge(matched, default, eligible, kv_distance, is_alone=is_alone)
        in_turn = bool(session_id)
        wanted = 1 + max(1, self._routing.alternatives)  # receipts name the runner-up
        order = ranking.in_order(wanted, in_turn, self._rng)
        if decision.draws and len(order) > 1:
            drawn = _drawn(decision)
            order = [drawn, *(row for row in order if row != drawn)][:wanted]
        guard = settings.routing.guard
        # A decode worker of a pair doesn't wait for prompts.
        if kv_distance is None and guard.looks_at(decision.policy.name):
            decision.guard = guard
            numbers = guard.request_tokens, guard.margin
            order = ranking.moved(*numbers, order, in_turn, self._rng)
        decision.order = order
        return decision

    def _within(
        self, matched: Matched, eligible: Barred, kv_distance: Column | None, is_alone: bool
    ) -> tuple[Barred, npt.NDArray[np.float64], bool]:
        """Bars rows that miss the request's objectives by more than others do. Returns the barred
        rows; the table, in which workers that a sheddable request has to wait for are full; and
        Decision.sheds."""
        request, pool, table = matched.request, matched.pool, matched.table
        objective = request.objective
        if objective is None:
            return eligible, table, False
        about = table, request, matched.overlaps, pool, self._further, matched.now_s
        rows = Candidates(eligible, *about, kv_distance)
        sheddable, due_s = objective.sheddable and not request.observed, objective.due_s
        if sheddable and objective.ttft_s is not None:
            due_s = matched.now_s + objective.ttft_s
        computes = kv_distance is None
        answers = is_alone or not computes or request.role in (Role.BOTH, Role.DECODE)
        missed = missed_at(rows, objective, due_s, computes=computes, answers=answers)
        if sheddable:
            held = held_from(missed, rows) & eligible.can(len(pool))
            if held.any():
                room = table[_FULL_COLUMN] == 0
                sheds = none_keeps(rows, objective, room, computes=computes, answers=answers)
                table = table.copy()
                table[_FULL_COLUMN, held] = 1.0
                return eligible, table, sheds
        return least_missed(missed, eligible, table[_FULL_COLUMN]), table, False

    def _overlaps(self, prompt: Prompt, pool: Pool) -> npt.NDArray[np.int32]:
        """Each worker's overlap with the prompt, in tokens: a row for each field of Overlap."""
        tokens = np.zeros((len(Overlap._fields), len(pool)), np.int32)
        for size in pool.block_sizes:
            of_size = [heartbeat_of(source).block_size == size for source in pool.sources]
            rows = np.flatnonzero(of_size)
            tokens[:, rows] = self._overlaps_of(prompt, size, pool.slots[rows])
        return tokens

    def _overlaps_of(
        self, prompt: Prompt, size: int, slots: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int32]:
        if not size:  # workers whose block size is unknown yet
            return np.zeros((len(Overlap._fields), len(slots)), np.int32)
        # The engine recomputes the last block of a fully cached prompt.
        usable_max = (prompt.token_count - 1) // size
        return self._index.overlap(prompt.prefixes(size), usable_max, slots, size)

    def _before_it_came(
        self, prompt: Prompt, pool: Pool, overlaps: npt.NDArray[np.int32], now_s: float
    ) -> npt.NDArray[np.int32]:
        """Overlaps, in tokens, of a request that another router serves, without blocks that engines
        stored just now and that are likely the prompt's own: the other router sent the prompt to
        an engine before this router got its copy, and no earlier prompt has these blocks.
        """
        view, observed = self._fleet.view, self._fleet.observed
        if (newest := view.newest) is None:
            return overlaps
        overlaps = overlaps.copy()
        shared: dict[int, int] = {}
        for row in np.flatnonzero(overlaps[_RAW]).tolist():
            slot, size = int(pool.slots[row]), heartbeat_of(pool.sources[row]).block_size
            prefixes = prompt.prefixes(size)
            if newest.first(slot, prefixes, now_s) is None:
                continue
            if (start := shared.get(size)) is None:
                start = shared[size] = observed.shared_blocks(prefixes)
            place = newest.first(slot, prefixes[start:], now_s)
            if place is not None:
                _cut(overlaps[:, row], (start + place) * size)
        return overlaps

    def _score(self, decision: Decision) -> None:
        """Computes the costs of at least one row, by the policy's kernel or function; raises
        PolicyFailed, and changes nothing, if the function fails."""
        policy, pool, ranking = decision.policy, decision.pool, decision.ranking
        kernel = _kernel_of(policy)
        if kernel is None or not (pool.only_block_size or not kernel.reads_users):
            scores = policy.score(decision.rows)
            if scores.chances is not None:
                # The draw is in the receipt, so that a pick can be redone.
                shared = {**scores.shared_terms, "draw": self._rng.random()}
                scores = replace(scores, shared_terms=shared)
            decision.scores = scores
            ranking.take(np.ascontiguousarray(scores.costs, np.float64), scores.ttft_s)
            return
        users = recent = inputs = None
        if kernel.reads_users:
            users = pool.made(_users_of)
            users.refresh(self._loads, self._fleet.loads_changed)
        if kernel.reads_recent:
            recent = self._further.recent_blocks(pool)
        if kernel.reads_prefill:
            inputs = self._prefill_inputs(pool)
        about = decision.request.expected_output_tokens or 0, decision.kv_distance
        mean_work, now_s = self._further.rates.mean_work, decision.decided_at_s
        ranking.score(kernel, users, recent, inputs, mean_work, now_s, *about)
        if policy.affinity_bonus:
            row = self._further.session_row(pool, decision.request.session_id)
            if row >= 0:
                ranking.lessen(row, policy.affinity_bonus)

    def _prefill_inputs(self, pool: Pool) -> npt.NDArray[np.float64]:
        rates = self._further.rates
        table = rates.table(pool.made(last_slot))
        inputs = prefill_inputs(table, self._pools.others_waiting, pool.slots)
        rate = inputs[0]
        if not rate.all():
            for row in np.flatnonzero(rate == 0).tolist():  # nothing was ever sent there
                rate[row] = rates.anchor(pool.models[row])
        return inputs

    def output_tokens(self, request: Request) -> int:
        """Number of output tokens expected of a request, OUTPUT_TOKENS_MAX at most."""
        expected = request.expected_output_tokens
        if expected is None:
            expected = self._routing.expected_output_tokens
        return min(expected, OUTPUT_TOKENS_MAX)


def _cut(overlap: npt.NDArray[np.int32], tokens: int) -> None:
    """Bounds one worker's overlap, in place, to a prompt's first `tokens`. The tokens beyond are
    taken from the predicted ones first, then from disk, host and device memory."""
    overlap[_RAW] = min(overlap[_RAW], tokens)
    over = max(0, overlap[_USABLE] - tokens)
    overlap[_USABLE] -= over
    for tier in range(len(overlap) - 1, _USABLE, -1):
        taken = min(over, overlap[tier])
        overlap[tier] -= taken
        over -= taken


def _waits(decision: Decision) -> bool:
    """Whether some answering worker may take a request without a pick once it has room; then no
    last resort is tried."""
    return decision.waits or (decision.prefill is not None and decision.prefill.waits)


def _users_of(pool: Pool) -> RowUsers:
    return RowUsers(pool.workers)


def _at(pool: Pool, worker: WorkerKey) -> Flags:
    """True for one worker's row."""
    return np.array([key == worker for key in pool.workers], np.bool_)


def _drawn(decision: Decision) -> int:
    """The row that is picked by chance. `draw` is a random number from 0 to 1, and a term.

    Rows that can be picked are put in the order of worker ids and ranks; the first is picked at
    which the sum of chances so far exceeds draw * the sum of all their chances.
    """
    chances, draw = decision.scores.chances, decision.scores.shared_terms["draw"]
    if chances is None:
        raise AssertionError(f"{decision.policy.name} returned no chances to draw by")
    can = sorted(
        (row for row, reason in enumerate(decision.excluded) if not reason),
        key=decision.pool.workers.__getitem__,
    )
    reached = np.cumsum(chances[can])
    # Rounding may bring the draw to the very end, which is the last that has a chance.
    last = np.searchsorted(reached, reached[-1])
    return can[int(min(last, np.searchsorted(reached, draw * reached[-1], "right")))]
