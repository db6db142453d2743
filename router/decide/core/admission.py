"""Requests that wait for a worker with room, and their turns. Pure.

    route: a worker has room ─> decided at once
           no worker has     ─> waits in the AdmissionQueue
                              dispatch: a worker has room again ─> decided
                                        the wait is over        ─> decided a last time, or refused

The queue (router/decide/queue) says whose turn it is. This module knows the workers: which requests
wait for the same workers, and whether any of these has room. The driver's Job says what a decision
leads to: the desk's answers a message, a simulated client's takes the request to the picked engine.

Laws:
- a request waits only while no worker that may take it has room (for a sheddable one: headroom for
  its objectives), or behind others of its pool, in this router or in others
  (router/decide/core/fleet_turns.py);
- a request that could not be decided keeps its place in the order;
- one call of `dispatch` makes ATTEMPTS_MAX attempts at most; the driver calls again for the rest;
- failed attempts take a bounded share of the time (router/decide/core/attempts.py); once that share
  is spent, requests wait though a worker may have room, until the driver calls again later; then
  the pool whose last failed attempt is longest ago comes first;
- no waiting request is refused because of a learned bound of workers' capacity, unless its band has
  a share of that: the decision at the end of its wait knows no such bound;
- no request is refused for its expected wait while a worker of its model has room, or is full only
  by a learned bound.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from math import inf
from random import Random
from typing import Protocol

from router.config.settings.queue_settings import QueueSettings
from router.decide.core.attempts import VainAttempts
from router.decide.core.core import RouterCore
from router.decide.core.fleet_turns import FleetTurns
from router.decide.core.pool import Pool
from router.decide.core.progress import ProgressResult
from router.decide.core.sight import FleetSight
from router.decide.decision.decider import FULL_RETRY_S
from router.decide.decision.decision import Decision
from router.decide.decision.nobody_fits import NobodyFits
from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.waiter import Waiter
from router.fleet.histogram import Histogram
from router.fleet.reservations.reservations import Reservation
from router.request.narrowing import Narrowing
from router.request.refusal import Reason, Refusal
from router.request.request import Objective, Request, Wait

ATTEMPTS_MAX = 16
"""Attempts in one call of `dispatch`: each is a whole decision, of 30 to 100 us."""
ENDS_MAX = 16
"""Requests whose waits one call of `dispatch` ends, at most."""
LOOKS_MAX = 64
"""Waiting requests that one `dispatch` checks for waits that can't end in time: 0.5 ms."""
BANDS_MAX = 64
"""Bands whose waits are counted, those of earlier configurations among them."""
AHEAD_S = 0.01
"""Seconds before its call's deadline at which a wait ends, so that the refusal arrives in time."""
BELIEVED_S = 10.0
"""Seconds after another router ended in which callers that say they waited there are believed."""
WAITS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of waits, in seconds."""


class Job(Protocol):
    """Interface: what the driver does for one request. The last call for a request is a `refuse`,
    or a `decide` that returns.
    """

    @property
    def request_id(self) -> str:
        """Request id that the caller gave; empty: none."""

    @property
    def owner(self) -> str:
        """Name of the caller's identity; empty: the caller needed no key."""

    def decide(self, waited_s: float, may_exceed: bool) -> Reservation:
        """Reserves a worker for the request, and returns the reservation; raises Refusal, and
        reserves nothing. may_exceed: see Decider.decide.
        """

    def refuse(self, refusal: Refusal) -> None:
        """Answers the request with a refusal; it waits no longer."""


class Admission:
    """The admission queue of one replica, and what it knows of the fleet.

    Over 300 lines: whatever changes the queue ends in one dispatch over the same requests.
    """

    def __init__(self, core: RouterCore, settings: QueueSettings, rng: Random) -> None:
        self._sight = FleetSight(core)
        self.queue = AdmissionQueue(settings, rng, self._sight)
        self.waits: dict[str, Histogram] = {}
        """Waits of the requests that got a worker, by band."""
        self.in_vain, self.sheddable_in_vain = VainAttempts(), VainAttempts()
        """Budgets of failed attempts: of requests that are not sheddable, and of sheddable ones,
        whose spent budget holds up no others."""
        self.fleet_turns = FleetTurns(core, self.queue)
        self.moved_waits: Counter[str] = Counter()
        """`claimed`: requests that waited here and said that they had waited in another router;
        `believed`: requests of these whose time there was counted."""
        self._believes_until_s = -inf
        self._core = core
        self._charged: dict[str, tuple[str, float]] = {}
        """Open reservations by id, where tenants have quotas: the tenant, and what it was charged
        if the length is an estimate, else 0."""
        self._is_closed = False
        self._note_rules()

    def __len__(self) -> int:
        return len(self.queue)

    def configure(self, settings: QueueSettings, now_s: float) -> None:
        """Puts other settings in force. Requests that wait go on waiting."""
        self.queue.configure(settings, now_s)
        self.fleet_turns.configure()
        self._note_rules()

    def may_wait(self, wait: Wait) -> bool:
        """Whether a request may wait in the queue at all."""
        return self._takes_waits and wait.timeout_s != 0

    def route(
        self,
        request: Request,
        wait: Wait,
        now_s: float,
        size_bytes: int,
        job: Callable[[], Job],
        decide: Callable[[bool], Reservation],
    ) -> Waiter | None:
        """Decides a request, or queues it; returns its Waiter if it is queued. Raises Refusal.

        job: called for a request that is queued. decide: reserves a worker at once, as Job.decide
        does later; its argument is may_exceed. size_bytes: memory that the request takes while it
        waits.
        """
        may_wait, decision, rule = self.may_wait(wait), None, None
        if self._has_rules and (rule := self._rule_against(request, wait, now_s)) and not may_wait:
            raise rule.copy()
        if rule is None and (not may_wait or not self._is_behind(request)):
            try:
                reservation = decide(not may_wait)
                if self._has_rules:
                    self._took(request.tenant, reservation, request.charged_tokens, now_s)
                return None
            except NobodyFits as refusal:
                if not may_wait or refusal.reason is not Reason.ALL_WORKERS_FULL:
                    raise
                decision = refusal.decision
        waiter = self._waiter(request, wait, decision, now_s, size_bytes)
        waiter.payload, pool = job(), self._pool_of(request)
        if (too_long := self._too_long(pool, waiter, now_s)) is not None:
            raise too_long.copy()
        displaced = self.queue.offer(pool, waiter, now_s)
        if displaced is not None:
            _job(displaced).refuse(self.queue.displacement(now_s))
        if wait.waited_s > 0:
            self.moved_waits["claimed"] += 1
            waiter.moved_s = min(wait.waited_s, max(0.0, waiter.expires_s - waiter.arrived_s))
            if now_s < self._believes_until_s:
                self._believe(waiter, now_s)
        return waiter

    def waiting(self) -> dict[Pool, int]:
        """Number of waiting requests of each pool."""
        pools = self.queue.pools()
        return {pool: self.queue.waiting(pool) for pool in pools if isinstance(pool, Pool)}

    def base_model(self, model: str) -> str:
        """Name of the model in whose pool requests for `model`, an alias or LoRA too, wait."""
        return self._core.fleet.base_model(model)

    def owners(self, request_id: str) -> set[str]:
        """Names of the identities whose requests with this id wait."""
        return {_job(waiter).owner for waiter in self.queue.find(request_id)}

    def cancel(self, request_id: str, now_s: float) -> bool:
        """Removes and refuses waiting requests with an id, since a Report cancels them; returns
        whether there were any.
        """
        waiting = self.queue.find(request_id)
        for waiter in waiting:
            self.queue.cancel(waiter, now_s)
            message = "a Report with the request's id cancelled the wait"
            _job(waiter).refuse(Refusal(Reason.CANCELLED, message))
        return bool(waiting)

    def reprioritize(self, request_id: str, priority: int, now_s: float) -> ProgressResult:
        """Gives a waiting request another priority."""
        waiting = self.queue.find(request_id)
        if not waiting:
            return ProgressResult.UNKNOWN
        others = [waiter for waiter in waiting if waiter.priority != priority]
        for waiter in others:
            self.queue.reprioritize(waiter, priority, now_s)
        return ProgressResult.APPLIED if others else ProgressResult.UNCHANGED

    def dispatch(self, now_s: float) -> bool:
        """Decides requests whose turn it is, and ends waits that are over or can't end in time.
        Returns whether the driver should call again at once.
        """
        ends = 0
        while ends < ENDS_MAX and (waiter := self.queue.over(now_s)) is not None:
            self._decide_last(waiter, now_s)
            ends += 1
        more = self._attempts(now_s)
        self._refuse_early(now_s)
        return more or ends == ENDS_MAX

    def close(self, refusal: Refusal, now_s: float) -> None:
        """Refuses all requests that wait, with this refusal."""
        self._is_closed = True
        self._note_rules()
        self.fleet_turns.stop(now_s)
        for waiter in self.queue.clear(now_s):
            _job(waiter).refuse(refusal)

    def _attempts(self, now_s: float) -> bool:
        """Decides requests whose turn it is; returns whether more may be decided at once."""
        self._note_lost(now_s)
        left = ATTEMPTS_MAX
        for pool in self.queue.pools():
            unkept: dict[Narrowing | None, Objective] = {}
            """Objectives that no worker with room keeps, whatever the prompt; by narrowing."""
            held = self.fleet_turns.held(pool, now_s)
            for waiter in self.queue.candidates(pool, self._core.fleet.room, now_s, held):
                if not self._core.fleet.has_room(waiter.model) and not self._is_known(
                    _job(waiter).request_id
                ):
                    break
                sheddable, failed = waiter.sheddable, unkept.get(waiter.narrowing)
                if sheddable is None and not self.in_vain.may_be(now_s):
                    return False
                if not left:
                    return True
                is_shed = sheddable is not None and (
                    not self.sheddable_in_vain.may_be(now_s)
                    or (failed is not None and failed.covers(sheddable))
                )
                if is_shed or self._is_beyond_share(waiter, now_s):
                    self.queue.passed(waiter, self._core.fleet.room)
                    continue
                left -= 1
                if self._decide(waiter, now_s) and sheddable is not None:
                    unkept[waiter.narrowing] = sheddable
        return False

    def _note_lost(self, now_s: float) -> None:
        """Believes callers that moved here from a router that is gone: it said that it stops, or
        was silent for TTL_S (events/feed/replicas.py)."""
        lost = self._core.fleet.replicas.take_lost()
        if not lost:
            return
        self._believes_until_s = max(at_s for at_s, _ in lost) + BELIEVED_S
        if now_s >= self._believes_until_s:
            return
        for waiter in [waiter for _, waiter in self.queue.waiters() if waiter.moved_s]:
            self._believe(waiter, now_s)

    def _believe(self, waiter: Waiter, now_s: float) -> None:
        """Counts the time that a request is said to have waited in another router; the end of its
        wait stays."""
        self.queue.backdate(waiter, waiter.arrived_s - waiter.moved_s, now_s)
        waiter.moved_s = 0.0
        self.moved_waits["believed"] += 1

    def _refuse_early(self, now_s: float) -> None:
        """Refuses some of the requests whose wait can't end in time."""
        for waiter in self.queue.take_doubtful(now_s, LOOKS_MAX):
            if self._is_known(_job(waiter).request_id):
                continue  # it gets the answer of the earlier request with its id
            if (too_long := self._too_long(waiter.pool, waiter, now_s)) is not None:
                _job(waiter).refuse(too_long)

    def _too_long(self, pool: Hashable, waiter: Waiter, now_s: float) -> Refusal | None:
        """The refusal of a request whose wait can't end in time; None: it may wait."""
        if not self.queue.refuses_early or self._core.fleet.may_serve(waiter.model):
            return None
        return self.queue.too_long(pool, waiter, now_s)

    def _decide(self, waiter: Waiter, now_s: float) -> bool:
        """Decides a request, or leaves it in the queue. Returns Decision.sheds: if true, sheddable
        requests with the same or stricter objectives need not be tried."""
        try:
            reservation = _job(waiter).decide(now_s - waiter.arrived_s, may_exceed=False)
        except NobodyFits as refusal:
            if refusal.reason is Reason.ALL_WORKERS_FULL:
                self.queue.passed(waiter, self._core.fleet.room)
                self.queue.put_last(waiter.pool)
                budget = self.in_vain if waiter.sheddable is None else self.sheddable_in_vain
                budget.add(len(refusal.decision.pool) if refusal.decision else 0)
                return refusal.decision is not None and refusal.decision.sheds
            self._end(waiter, refusal, now_s)
        except Refusal as refusal:
            self._end(waiter, refusal, now_s)
        else:
            self._dispatched(waiter, reservation, now_s)
        return False

    def _decide_last(self, waiter: Waiter, now_s: float) -> None:
        """Decides a request whose wait is over, or refuses it."""
        job, rule = _job(waiter), None
        if not self._is_known(job.request_id):
            rule = self._quota_against(waiter.tenant, now_s)
            if rule is None and self._is_beyond_share(waiter, now_s):
                rule = self.queue.timeout(waiter, now_s)
        if rule is not None:
            self.queue.expired(waiter, now_s)
            job.refuse(rule)
            return
        try:
            reservation = job.decide(now_s - waiter.arrived_s, may_exceed=True)
        except Refusal as refusal:
            self.queue.expired(waiter, now_s)
            full = refusal.reason is Reason.ALL_WORKERS_FULL
            job.refuse(self.queue.timeout(waiter, now_s) if full else refusal)
        except BaseException:  # which ends this request, and must not come again
            self.queue.expired(waiter, now_s)
            raise
        else:
            self._dispatched(waiter, reservation, now_s)

    def _dispatched(self, waiter: Waiter, reservation: Reservation, now_s: float) -> None:
        """Removes a request that has its worker from the queue, and counts it."""
        band = self.queue.band(waiter)
        if band not in self.waits and len(self.waits) < BANDS_MAX:
            self.waits[band] = Histogram(WAITS_S)
        if (waits := self.waits.get(band)) is not None:
            waits.add(now_s - waiter.arrived_s)
        waiter.reservation_id = reservation.id
        self.fleet_turns.took(waiter)
        self.queue.dispatched(waiter, *_tokens(reservation), now_s)
        self._took(waiter.tenant, reservation, waiter.charged_tokens, now_s)

    def _end(self, waiter: Waiter, refusal: Refusal, now_s: float) -> None:
        """Refuses a waiting request for another reason than lack of room."""
        self.queue.unserved(waiter, now_s)
        _job(waiter).refuse(refusal)

    def _rule_against(self, request: Request, wait: Wait, now_s: float) -> Refusal | None:
        """The refusal of a new request by a quota or a band's share, even if workers have room;
        None: neither is reached."""
        if self._is_known(request.request_id):
            return None
        if (rule := self._quota_against(request.tenant, now_s)) is not None:
            return rule
        if not self._has_shares:
            return None
        if not self._is_beyond_share(self._waiter(request, wait, None, now_s, 0), now_s):
            return None
        return Refusal(
            Reason.ALL_WORKERS_FULL,
            "the share of the workers that requests of this priority may fill is full"
            " (queue.bands share_percent)",
            FULL_RETRY_S,
        )

    def _quota_against(self, tenant: str, now_s: float) -> Refusal | None:
        key = self.queue.tenants.held_by(tenant, now_s)
        if key is None:
            return None
        return Refusal(
            Reason.TENANT_QUOTA,
            f"tenant {tenant!r} is at its quota (queue.tenants {key})",
            FULL_RETRY_S,
        )

    def _is_beyond_share(self, waiter: Waiter, now_s: float) -> bool:
        """Whether as much of the pool is in use as the band of a request may fill."""
        if not self._has_shares:
            return False
        share = self.queue.share_of(waiter, now_s)
        return share < 1 and self._core.fleet.fill(waiter.model) >= share

    def measured(
        self, reservation_id: str, prompt_tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """Corrects a tenant's charge by the tokens that an engine counted for a prompt, where the
        router had an estimate.
        """
        tenant, charged = self._charged.get(reservation_id, ("", 0.0))
        if not charged:
            return
        self._charged[reservation_id] = tenant, 0.0
        cached_tokens = min(cached_tokens, prompt_tokens)
        cost = self.queue.tenants.cost(prompt_tokens - cached_tokens, cached_tokens)
        self.queue.tenants.corrected(tenant, cost - charged, now_s)

    def _took(
        self, tenant: str, reservation: Reservation, charged_tokens: int, now_s: float
    ) -> None:
        """Charges the tenant of a request that has its worker, and notes the reservation, whose end
        counts, too. An earlier request's answer costs nothing. charged_tokens: see Request."""
        tenants = self.queue.tenants
        if not tenants.have_quotas or reservation.shared:
            return
        charged = max(tenants.cost(*_tokens(reservation)), float(charged_tokens))
        tenants.took(tenant, charged, now_s)
        if reservation.ended is None:
            self._charged[reservation.id] = tenant, charged if charged_tokens else 0.0
        else:  # its caller left meanwhile
            tenants.ended(tenant)

    def _on_end(self, reservation: Reservation) -> None:
        """Takes a reservation that ends off its tenant's requests in flight."""
        if (counted := self._charged.pop(reservation.id, None)) is not None:
            self.queue.tenants.ended(counted[0])

    def _note_rules(self) -> None:
        """Derives what the present settings demand; called when they change."""
        have_quotas = self.queue.tenants.have_quotas
        self._has_shares = self.queue.has_shares
        self._has_rules = have_quotas or self._has_shares
        """Whether quotas or bands' shares may hold requests while workers have room."""
        settings = self.queue.settings
        self._takes_waits = settings.max_waiting > 0 and not self._is_closed
        self._core.decider.looks_ahead = settings.max_waiting > 0
        self._core.life.on_end = self._on_end if have_quotas else None
        if not have_quotas:
            self._charged.clear()

    def _is_behind(self, request: Request) -> bool:
        """Whether others wait for the workers of a request, here or in another replica; False for a
        request id that has an answer."""
        if not len(self.queue) and not self.fleet_turns.is_contended:
            return False
        pool = self._pool_of(request)
        waits = self.queue.waiting(pool) > 0 or self.fleet_turns.wanted(pool)
        return waits and not self._is_known(request.request_id)

    def _is_known(self, request_id: str) -> bool:
        """Whether a request id has an answer already: its repetition takes no room."""
        return self._core.reservations.of_request(request_id) is not None

    def _waiter(
        self,
        request: Request,
        wait: Wait,
        decision: Decision | None,
        now_s: float,
        size_bytes: int,
    ) -> Waiter:
        timeout_s = self.queue.settings.timeout_s if wait.timeout_s is None else wait.timeout_s
        slo_ends_s = inf if wait.ttft_slo_s is None else now_s + wait.ttft_slo_s
        tokens = request.prompt.token_count
        held_tokens = decision.best_overlap_tokens() if decision is not None else 0
        chain, block_size = None, 0
        if self.queue.needs_prefixes:
            chain, block_size = self._sight.chain(request.prompt, request.model)
            if chain is not None and decision is None:
                held_tokens = self._sight.held_tokens(chain, block_size, tokens, request.model)
        return Waiter(
            # A second request of an id waits by itself, and gets the first one's answer.
            request_id=request.request_id,
            arrived_s=now_s,
            expires_s=max(now_s, min(wait.deadline_s - AHEAD_S, now_s + timeout_s)),
            deadline_s=min(wait.deadline_s, slo_ends_s),
            model=request.model,
            tenant=request.tenant,
            priority=wait.priority,
            narrowing=request.narrowing,
            sheddable=_sheddable(request),
            needs_prefill=request.resumed is None,
            prompt_tokens=tokens,
            charged_tokens=request.charged_tokens,
            new_tokens=tokens - held_tokens,
            output_tokens=self._core.decider.output_tokens(request),
            size_bytes=size_bytes,
            prefixes=chain,
            block_size=block_size,
        )

    def _pool_of(self, request: Request) -> Pool:
        return Pool(self.base_model(request.model), request.role)


def _sheddable(request: Request) -> Objective | None:
    """The objectives of a sheddable request; None: the request is not sheddable."""
    objective = request.objective
    return objective if objective is not None and objective.sheddable else None


def _tokens(reservation: Reservation) -> tuple[int, int]:
    """Tokens of a prompt that its worker, of a pair the prefill worker, computes, and that it has
    cached; none for an earlier request's answer."""
    if reservation.shared:
        return 0, 0
    new_tokens = reservation.where_computed().new_tokens
    return new_tokens, max(0, reservation.prompt_tokens - new_tokens)


def _job(waiter: Waiter) -> Job:
    job: Job = waiter.payload  # type: ignore[assignment]  # the queue doesn't look at it
    return job
