"""The decision core: what requests, reports, heartbeats and time change.

The worker of a request is decided in router/decide/decision/decider.py; what a reservation changes
from its pick to its end is in reservation_life.py. Pure: no I/O, no clock, no randomness of its
own. The core takes `now_s` and a seeded rng, owns load and reservations, and reads the fleet view.
A driver performs its effects: the gRPC services, or a simulator.

Laws:
- a pick reserves its load at once, unless another router serves the request (Request.observed);
- a refusal changes nothing;
- a worker that failed requests gets none for a while (router/fleet/health/outliers.py);
- the same request id, prompt, model and role get the same answer while they are remembered.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from math import inf

from events.feed.fleet_view import FleetView, Source
from events.feed.newest import Newest
from indexer.identity import WorkerKey
from router.config.settings.configurations import ModelSettings
from router.config.settings.fleet_settings import TOMBSTONE_S
from router.config.settings.routing_settings import RoutingSettings
from router.decide.core.progress import Effects, Pick, Progress, ProgressResult, Repeated
from router.decide.core.reservation_life import ReservationLife
from router.decide.core.unobserved import Unobserved
from router.decide.core.watched import PickObserver, Watched
from router.decide.decision.decider import FULL_RETRY_S, Decider
from router.decide.decision.decision import Decision, Overlap, Prefill
from router.decide.policies.configured import DecisionSettings
from router.decide.policies.policy import Policy
from router.fleet.pools import heartbeat_of
from router.fleet.rates import PRIOR_RATE
from router.fleet.reservations.ids import ReservationIds
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.reservations import Ending, Reservation
from router.fleet.state import Fleet, Troubles
from router.request.refusal import Reason, Refusal
from router.request.request import Request

DRAINED_MAX = 10_000


def _no_mark(_stage: str) -> None:
    """Does nothing: the times of a decision's stages are not measured."""


class RouterCore:
    """The decision core of a replica.

    Over 300 lines: requests, reports, heartbeats and time change the same fleet and reservations.
    """

    def __init__(
        self,
        view: FleetView,
        routing: RoutingSettings,
        *,
        rng: random.Random,
        random_bytes: Callable[[int], bytes],
        models: tuple[ModelSettings, ...] = (),
        replica: str = "",
        watched: Watched | None = None,
        troubles: Troubles | None = None,
        prefill_rate: float = PRIOR_RATE,
    ) -> None:
        """random_bytes: returns so many bytes, for ids of reservations; unpredictable, unless for a
        test. watched: what observers of decisions need; None: there are none. troubles,
        prefill_rate: see Fleet."""
        self.fleet = Fleet(
            view,
            routing,
            models=models,
            replica=replica,
            troubles=troubles or {},
            prefill_rate=prefill_rate,
        )
        self.routing = routing
        self.replica = replica
        self.life = life = ReservationLife(
            self.fleet, routing, ids=ReservationIds(replica, random_bytes), rng=rng
        )
        self.reservations = life.reservations
        self.unobserved = Unobserved(life)
        self.endings, self.finish_reasons = life.endings, life.finish_reasons
        self.ttft_check, self.tpot_check = life.ttft_check, life.tpot_check
        self.ids = life.ids
        self.guarded = 0
        """Picks that the guard moved."""
        self.last_resorts = 0
        """Picks of last resorts: no answering worker could take the request."""
        self.over_estimate_picks = 0
        """Picks of workers over their learned capacity, since no other had room."""
        self.decider = Decider(self.fleet, routing, rng, models)
        self.watched = watched
        self.pair_picks: Counter[Prefill] = Counter()
        self._rng = rng
        self._pick_observers: list[PickObserver] = []
        self.keeps_tokens = False
        """Whether an observer of picks needs prompts as tokens."""
        self.on_observer_fault: Callable[[PickObserver, Exception], None] | None = None
        """Called with an observer of picks and the error it raised; None: the error goes on."""

    def route(
        self,
        request: Request,
        now_s: float,
        mark: Callable[[str], None] = _no_mark,
        watch: Callable[[Decision], None] | None = None,
        *,
        may_exceed: bool = True,
        write: Callable[[Pick], bytes] | None = None,
    ) -> Pick | Repeated:
        """Picks a worker for a request, and reserves its load; raises Refusal.

        mark, may_exceed: see Decider.decide. watch: gets the decision before anything of it is
        reserved, and changes nothing; of a pair the decision about the prefill worker. write: gets
        the pick before anything of it is reserved, and returns the answer that the reservation
        keeps; if it raises, nothing is reserved.
        """
        prompt, view = request.prompt, self.fleet.view
        if prompt.cache_salt:
            view.salted = True
        if prompt.has_items:
            view.itemized = True
        if request.observed and view.newest is None:
            view.newest = Newest()
        earlier = self.reservations.of_request(request.request_id)
        if earlier is not None and not request.observed:
            return self._repeated(earlier, request, now_s)
        if self.reservations.full() and not request.observed:
            raise Refusal(
                Reason.TOO_MANY_RESERVATIONS,
                f"{len(self.reservations)} requests are in flight, the most that this router keeps"
                " in number (routing.reservations_max) or in bytes of prompts' hashes",
                FULL_RETRY_S,
            )
        ready = self.fleet.ready
        decision = self.decider.decide(request, ready, now_s, mark, may_exceed=may_exceed)
        if not decision.order:
            raise self.decider.refuse(decision)
        computing = decision.computing
        row = decision.order[0]
        source, overlap = decision.pool.sources[row], decision.overlap(row)
        is_computed = computing is decision and request.resumed is None
        reservation = self.life.made(source, request, overlap, now_s, computes=is_computed)
        if watch is not None:
            decision.keep()
            computing.reservation_id = reservation.id
            watch(computing)
        if computing is not decision:
            reservation.prefill = self.life.hold(reservation, computing)
            overlap = computing.overlap(computing.order[0])
        pick = Pick(reservation, decision, overlap)
        if write is not None:
            reservation.answer = write(pick)
        else:  # the pick, with its decision, is the answer
            decision.keep_table()
        if request.observed:
            self._observe(computing, overlap, now_s)
            return pick
        tpot_s = decision.tpot_s
        self.life.open(source, reservation, self.decider.output_tokens(request))
        try:
            if request.tenant:
                self.fleet.tenants.on_pick(request.tenant, prompt.token_count, overlap.usable)
            self._on_reserved(source, decision, reservation, now_s)
            if tpot_s is not None:
                self.tpot_check.on_pick(reservation.id, tpot_s)
        except BaseException:
            self.withdraw(reservation, now_s)
            raise
        return pick

    def _observe(self, computing: Decision, overlap: Overlap, now_s: float) -> None:
        """Counts a pick for a request that another router serves. computing: the decision about
        the worker that would compute its prompt.

        The pick does not count for shared prefixes (router/fleet/shared_prefixes.py): tokens that
        it invests would never be computed, and so be invested again and again.
        """
        request, source = computing.request, computing.sources[computing.order[0]]
        tokens = request.prompt.token_count
        if request.tenant:
            self.fleet.tenants.on_pick(request.tenant, tokens, overlap.usable)
        model = self.fleet.models.names(heartbeat_of(source).model)[0]
        able = self.decider.able(computing)
        observed = self.fleet.observed
        observed.on_prompt(request.prompt.prefixes(heartbeat_of(source).block_size))
        observed.on_pick(source.key, model, able, tokens, overlap.usable, now_s)

    def _repeated(self, earlier: Reservation, request: Request, now_s: float) -> Repeated:
        _, block_size, _, _ = earlier.fingerprint
        if earlier.fingerprint != request.fingerprint(block_size):
            raise Refusal(
                Reason.REQUEST_ID_REUSED,
                f"request id {request.request_id!r} was used with another prompt, model or phase",
            )
        if earlier.ended is None:  # the answer names the whole lease, so it begins again
            self.reservations.renew(earlier, now_s + self.routing.lease_s)
        earlier.shared = True
        return Repeated(earlier)

    @property
    def policies(self) -> dict[str, Policy]:
        """Policies with their parameters, by name; see Decider.policies."""
        return self.decider.policies

    def _on_reserved(
        self, source: Source, decision: Decision, reservation: Reservation, now_s: float
    ) -> None:
        """Counts a pick that was reserved, and updates what later picks read, except the load of
        its worker (ReservationLife.open)."""
        request, computing = decision.request, decision.computing
        if decision.last_resort:
            self.last_resorts += 1
        if decision.over_estimate:
            self.over_estimate_picks += 1
        if computing.ranking.moved_from >= 0:
            self.guarded += 1
        self.life.predict(source, reservation.prefixes, reservation.predicted_tokens, now_s)
        if self.fleet.outliers.probing:
            self.life.note_probe(source.key, reservation.id, now_s)
        if request.session_id:
            self.life.remember(request, reservation, now_s)
        if decision.how is not None:
            self.pair_picks[decision.how] += 1
            if computing is not decision:
                prefill_source = computing.sources[computing.order[0]]
                self.life.open_prefill(prefill_source, reservation, now_s)
        timed = computing.policy.timed or (self.watched is not None and self.watched.timed)
        if timed or request.objective is not None:
            self.life.time(reservation, computing.best_overlap_tokens(), now_s)
        if (predicted_s := computing.ttft_s) is not None:
            self.ttft_check.on_pick(reservation.id, predicted_s)
        for observer in self._pick_observers:
            try:
                observer.on_pick(reservation, request, now_s)
            except Exception as error:  # of the observer alone
                if self.on_observer_fault is None:
                    raise
                self.on_observer_fault(observer, error)

    def decide(
        self,
        request: Request,
        now_s: float,
        mark: Callable[[str], None] = _no_mark,
        *,
        may_exceed: bool = True,
    ) -> Decision:
        """The decision that `route` would make; changes nothing. See Decider.decide."""
        return self.decider.decide(request, self.fleet.ready, now_s, mark, may_exceed=may_exceed)

    def reconfigure(self, routing: RoutingSettings, models: tuple[ModelSettings, ...] = ()) -> None:
        """Checks settings and puts them in force; raises ConfigError, and changes nothing, for
        policies that can't be used.
        """
        self.use(DecisionSettings.of(routing, models))

    def use(self, settings: DecisionSettings) -> None:
        """Puts checked settings in force; only keys that a reload may change may differ
        (router/config/reload.py)."""
        self.decider.use(settings)
        self.routing = routing = settings.of_fleet.routing
        self.life.lease_s = routing.lease_s
        self.fleet.reconfigure(routing)

    def observe_picks(self, observer: PickObserver, wanted: bool) -> None:
        """Has an observer called with each later pick, if wanted; else no longer."""
        others = [other for other in self._pick_observers if other is not observer]
        self._pick_observers = [*others, observer] if wanted else others
        self.keeps_tokens = any(each.keeps_tokens for each in self._pick_observers)

    def report(self, progress: Progress, now_s: float, caller: str = "") -> ProgressResult:
        """Applies a reported step to a reservation or a waiting request; see
        ReservationLife.report.
        """
        result = self.life.report(progress, now_s, caller)
        if progress.unobserved and result is not ProgressResult.UNKNOWN:
            reservation = self.reservations.get(progress.reservation_id)
            if reservation is not None and reservation.ended is None:
                self.unobserved.add(reservation)
        return result

    def withdraw(self, reservation: Reservation, now_s: float) -> None:
        """Ends a reservation whose answer could not be given; see ReservationLife.withdraw."""
        self.life.withdraw(reservation, now_s)

    def on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        """Applies a worker's heartbeat, which is in the fleet view already."""
        source = self.fleet.view.sources[key]
        heartbeat = heartbeat_of(source)
        self.fleet.models.on_heartbeat(heartbeat, now_s)
        if self.fleet.observed.picks:
            model = self.fleet.models.names(heartbeat.model)[0]
            self.fleet.observed.on_heartbeat(key, model, heartbeat.numbers)
        if self.fleet.capacities.on_heartbeat(key, heartbeat):
            self.fleet.pools.on_capacity(key)
        if heartbeat.sampled_at_s is not None:
            # The age is by the relay's clock alone, so that a skew between hosts does no harm.
            age_s = max(0.0, heartbeat.sent_at_s - heartbeat.sampled_at_s)
            load = self.fleet.load(key)
            before = _taken(load)
            load.sample(
                heartbeat.running,
                heartbeat.waiting,
                heartbeat.used_blocks,
                now_s - age_s,
                *self.fleet.replicas.heard(key, now_s - age_s),
            )
            load.unheard = self._unheard()
            self.unobserved.on_sample(key, int(load.missing), now_s)
            self.fleet.put_load(key, load)
            self.fleet.room += _fell(before, load)
            self.fleet.outliers.on_relay(key, load.external_requests, source.stream.seq, now_s)

    def on_inflight(self, payload: bytes, now_s: float) -> None:
        """Applies a message in which another replica says what load it has reserved."""
        self._hear(self.fleet.replicas.on_message(payload, now_s))
        if (verdicts := self.fleet.replicas.take_verdicts()) is not None:
            self.fleet.outliers.hear(*verdicts, now_s)
        self.fleet.sessions.announces = bool(self.fleet.replicas)
        self.fleet.sessions.hear(self.fleet.replicas.take_moved(), now_s)

    def on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        """Ends the reservations of workers that left the fleet view."""
        for reservation in self.reservations.on_workers(workers):
            self.life.end(reservation, Ending.WORKER_LOST, now_s)
        self.fleet.forget(workers)

    def drain(self, worker_id: str) -> int:
        """Gives a worker no new requests. Returns its number of ranks."""
        if worker_id not in self.fleet.drained and len(self.fleet.drained) >= DRAINED_MAX:
            here = {key.worker_id for key in self.fleet.view.sources}
            away = (drained for drained in self.fleet.drained if drained not in here)
            del self.fleet.drained[next(away, next(iter(self.fleet.drained)))]
        self.fleet.drained[worker_id] = None
        self.fleet.drains += 1
        return len(self.fleet.view.ranks(worker_id))

    def undrain(self, worker_id: str) -> int:
        """Gives a drained worker requests again. Returns its number of ranks."""
        self.fleet.drained.pop(worker_id, None)
        self.fleet.drains += 1
        self.fleet.room += 1
        return len(self.fleet.view.ranks(worker_id))

    def remove(self, worker_id: str, tombstone_s: float, now_s: float) -> int:
        """Forgets a worker, and ignores its heartbeats for tombstone_s (0: the configured time).
        Returns its number of ranks.
        """
        removed = self.fleet.view.remove(worker_id, now_s + (tombstone_s or TOMBSTONE_S))
        self.on_forgotten(removed, now_s)
        return len(removed)

    def on_time(self, now_s: float) -> Effects:
        """Does what is due by time (`tick`), and returns effects for the driver to perform.

        While `behind` is true, the driver calls `catch_up`, and lets other tasks run between the
        calls.
        """
        expired = self.tick(now_s)
        resyncs = self.fleet.self_check.begin_resyncs(now_s)
        return Effects(expired, resyncs, self.fleet.outliers.take_news())

    def tick(self, now_s: float) -> int:
        """Does what is due by time. Returns the number of reservations that expired.

        Leases, memories and sessions whose time is over end in slices: while `behind` is true, more
        of them are left for `catch_up`.
        """
        expired = self.catch_up(now_s)
        self.unobserved.look(now_s)
        self.fleet.models.tick(now_s)
        self._hear(self.fleet.replicas.tick(now_s))
        self.fleet.sessions.announces = bool(self.fleet.replicas)
        self.fleet.tick(now_s)
        self.fleet.room += 1
        return expired

    def behind(self, now_s: float) -> bool:
        """Whether leases, memories or sessions are left whose time is over."""
        return self.reservations.due(now_s) or self.fleet.sessions.due(now_s)

    def catch_up(self, now_s: float) -> int:
        """Ends one slice of the leases, memories and sessions whose time is over. Returns the
        number of reservations that expired."""
        expired = self.reservations.expired(now_s)
        for reservation in expired:
            self.life.end(reservation, Ending.EXPIRED, now_s)
        self.reservations.forget_old(now_s)
        self.fleet.sessions.forget_old(now_s)
        return len(expired)

    def _hear(self, workers: Collection[WorkerKey]) -> None:
        for key in workers:
            if key in self.fleet.view.sources:
                load = self.fleet.load(key)
                before = _taken(load)
                load.hear(*self.fleet.replicas.heard(key, load.sampled_at_s or 0.0))
                load.unheard = self._unheard()
                self.fleet.put_load(key, load)
                self.fleet.room += _fell(before, load)

    def _unheard(self) -> float:
        """Guess of the requests that other replicas have just sent to a worker, 0 to 1: with
        different guesses, replicas with equal views do not all pick the same slightly better
        worker."""
        return self._rng.random() if self.fleet.replicas else 0.0


def _taken(load: WorkerLoad) -> tuple[float, float, float]:
    """Load that takes a worker's room: active requests and blocks, prompt tokens to compute.
    Infinite before the first sample, which so counts as a fall."""
    if load.sampled_at_s is None:
        return inf, inf, inf
    return load.active_requests(), load.active_blocks(), load.prefill_tokens_active


def _fell(before: tuple[float, float, float], load: WorkerLoad) -> bool:
    """Whether a worker may have more room than before."""
    return any(now < then for now, then in zip(_taken(load), before, strict=True))
