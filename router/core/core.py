"""The decision core: what requests, reports, heartbeats and time change.

The worker of a request is decided in router/decision/decider.py; the changes of a decision are made
here. Pure: no I/O, no clock, no randomness of its own. The core takes `now_s` and a seeded rng,
owns load and reservations, and reads the fleet view. The gRPC shell performs its effects, and so
does a simulator: one core, two worlds.

Laws:
- a pick reserves its load at once, and every reservation is released exactly once;
- a refusal changes nothing;
- a worker that failed requests gets none for a while (router/health/outliers.py);
- the same request id, prompt, model and role get the same answer while they are remembered.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from math import inf

from events.feed.fleet_view import FleetView, Source
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import HotPrefixSettings, RoutingSettings
from router.copies.hot_prefixes import Effect as CopyEffect
from router.copies.hot_prefixes import HotPrefixes, Means, recomputed
from router.core.fast_path import Lane
from router.core.progress import Effects, Pick, Progress, ProgressResult, ProgressState, Repeated
from router.core.watched import Unwatched, Watched
from router.decision.decider import FULL_RETRY_S, Decider
from router.decision.decision import Decision, Overlap, Prefill
from router.fleet.pools import heartbeat_of
from router.fleet.state import CacheReport, Fleet, Troubles
from router.health.outliers import Fault
from router.health.ttft_check import TtftCheck
from router.policies.configured import DecisionSettings
from router.policies.policy import Policy
from router.request.refusal import Reason, Refusal
from router.request.request import Fingerprint, Request
from router.reservations.ids import ReservationIds
from router.reservations.load import WorkerLoad
from router.reservations.reservations import Ending, PrefillHold, Reservation, Reservations
from router.reservations.steps import open_reservation

DRAINED_MAX = 10_000
ROOM_BITS = 48
"""Of a pair's room, which stays below 2^63 for any number of ranks."""
_ENDED_BY_US = (Ending.EXPIRED, Ending.WORKER_LOST)
_FAULTS = {
    Ending.FAILED_WORKER: Fault.ERROR,
    Ending.FAILED_TIMEOUT: Fault.TIMEOUT,
    Ending.FAILED_REFUSED: Fault.REFUSED,
}
"""Endings that count against a worker."""


def _no_mark(_stage: str) -> None:
    """Nobody measures."""


class RouterCore:
    """The decisions of a replica.

    Over 300 lines: every cause enters here, and all change the same fleet and reservations.
    """

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
        random_bytes: Callable[[int], bytes],
        copy_means: Means | None = None,
        watched: Watched | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        """random_bytes: what ids of reservations are made of; unpredictable, unless for a test.
        copy_means: how hot prefixes are copied; None: workers compute them. watched: by observers
        of decisions; None: there are none. troubles: see Fleet."""
        self.fleet = Fleet(
            view,
            routing,
            models=models,
            model_memory_s=model_memory_s,
            replica=replica,
            troubles=troubles or {},
        )
        self.routing = routing
        self.replica = replica
        self.reservations = Reservations(routing.memory_window_s, routing.reservations_max)
        self.endings: Counter[Ending] = Counter()
        self.guarded = 0
        """Picks that the guard moved."""
        self.last_resorts = 0
        """Picks of workers that are tried only where none that answers may take the request."""
        self.strained_picks = 0
        """Picks of workers over their learned capacity, since no other had room."""
        self.ttft_check = TtftCheck()
        self.decider = Decider(self.fleet, routing, rng, models)
        self.watched = watched or Unwatched()
        self.pair_picks: Counter[Prefill] = Counter()
        self.tombstone_s = tombstone_s
        self._rng = rng
        self._picks = 0
        self.ids = ReservationIds(replica, random_bytes)
        self._ended: list[Reservation] | None = None
        """Reservations that ended since `take_ended`; None: they are not kept."""
        self.room = 0
        """Changes by which a worker may have room that had none, or may take what it could not:
        requests that wait and were tried at one number are not tried again at the same."""
        self.lane = Lane(self, rng) if isinstance(view.index, NativeIndex) else None
        """Picks for plain requests; the decider and the rest of this file are its twin, and for all
        others."""
        self._copy_means = copy_means or recomputed(routing.prefill_rate)
        self._copies: HotPrefixes | None = None
        """Kept for its counters after copying was switched off."""
        self.hot: HotPrefixes | None = None
        """Copies what many ask for; None: switched off."""
        self.copy_prefixes(routing.hot_prefixes)

    def route(
        self,
        request: Request,
        now_s: float,
        mark: Callable[[str], None] = _no_mark,
        watch: Callable[[Decision], None] | None = None,
        *,
        may_strain: bool = True,
    ) -> Pick | Repeated:
        """Picks and reserves; raises Refusal. mark is called with the name of each stage's end.

        watch: gets the decision before anything of it is reserved, and changes nothing; of a pair
        the decision about the prefill worker. may_strain: see Decider.decide.
        """
        prompt, view = request.prompt, self.fleet.view
        view.salted |= bool(prompt.cache_salt)
        view.itemized |= prompt.has_items
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
            earlier.shared = True
            return Repeated(earlier)
        if self.reservations.full():
            raise Refusal(
                Reason.TOO_MANY_RESERVATIONS,
                f"{len(self.reservations)} requests are in flight, as many or as long as this"
                " router keeps (routing.reservations_max)",
                FULL_RETRY_S,
            )
        decision = self.decide(request, now_s, mark, may_strain=may_strain)
        if not decision.order:
            raise self.decider.refuse(decision)
        if watch is not None:
            watch(decision.computing)
        source, computing = decision.sources[decision.order[0]], decision.computing
        reservation = self.reserve(
            source,
            request.request_id,
            request.fingerprint(),
            request.prompt.prefixes(heartbeat_of(source).block_size),
            request.prompt.token_count,
            decision.overlap(decision.order[0]),
            now_s,
            computes=computing is decision and request.resumed is None,
            output_tokens=self.decider.output_tokens(request),
        )
        try:
            self._on_reserved(request, decision, reservation, now_s)
        except BaseException:
            self.withdraw(reservation, now_s)
            raise
        return Pick(reservation, decision, computing.overlap(computing.order[0]))

    def on_priority(self, source: Source) -> None:
        """A request with a priority got a worker, whose engine may schedule by none."""
        heartbeat = heartbeat_of(source)
        if not heartbeat.priority_scheduling:
            model = self.fleet.models.names(heartbeat.model)[0]
            self.fleet.ignored_priorities.note(model, source.key)

    @property
    def policies(self) -> dict[str, Policy]:
        """By name, with their parameters."""
        return self.decider.policies

    def time(self, reservation: Reservation, now_s: float) -> None:
        """Tells what timed policies look at of a pick: work under way, and the worker's working
        set. Of a pair, of the worker that computes the prompt."""
        seen = reservation.where_computed()
        source = self.fleet.view.sources[seen.worker]
        self.fleet.rates.on_pick(
            source.key,
            source.slot,
            heartbeat_of(source).model,
            reservation.id,
            seen.new_tokens,
            reservation.prompt_tokens,
            now_s,
        )
        self.fleet.working_sets.on_pick(source.key, source.slot, reservation.prefixes, now_s)

    def _on_reserved(
        self, request: Request, decision: Decision, reservation: Reservation, now_s: float
    ) -> None:
        """Changes of a pick beside its worker's load."""
        source, computing = decision.sources[decision.order[0]], decision.computing
        self.last_resorts += decision.last_resort
        self.strained_picks += decision.strained
        self.guarded += computing.guarded is not None
        self._predict(source, reservation.prefixes, reservation.predicted_tokens, now_s)
        self._note_probe(source.key, reservation.id, now_s)
        self._remember(request, reservation, now_s)
        if decision.how is not None:
            self.pair_picks[decision.how] += 1
            if computing is not decision:
                self._reserve_prefill(reservation, computing, now_s)
        if computing.policy.timed or self.watched.timed:
            self.time(reservation, now_s)
        if (predicted_s := computing.scores.ttft_s) is not None:
            self.ttft_check.on_pick(reservation.id, predicted_s.item(computing.order[0]))
        if self.hot is not None:
            seen = reservation.where_computed()
            self.hot.on_pick(seen, request.for_all, lambda: request.prompt, now_s)

    def _predict(self, source: Source, prefixes: HashArray, held_tokens: int, now_s: float) -> None:
        """A worker will hold a prompt. held_tokens: of the prompt, by the worker's events."""
        if size := heartbeat_of(source).block_size:
            # The index knows blocks held beyond these, too, and predicts only the rest.
            self.fleet.view.predict(source, prefixes[held_tokens // size :], now_s)

    def _remember(self, request: Request, reservation: Reservation, now_s: float) -> None:
        """Where a session's KV cache will be."""
        if request.session_id:
            size = heartbeat_of(self.fleet.view.sources[reservation.worker]).block_size
            lora_name = request.prompt.lora_name
            self.fleet.sessions.put(request.session_id, reservation, size, lora_name, now_s)

    def decide(
        self,
        request: Request,
        now_s: float,
        mark: Callable[[str], None] = _no_mark,
        *,
        may_strain: bool = True,
    ) -> Decision:
        """The decision that `route` would make; changes nothing. See Decider.decide."""
        return self.decider.decide(request, self.fleet.ready, now_s, mark, may_strain=may_strain)

    def reconfigure(self, routing: RoutingSettings, models: tuple[ModelSettings, ...] = ()) -> None:
        """`use` of settings that are still to be checked; raises ConfigError, and changes nothing,
        for policies that can't be."""
        self.use(DecisionSettings.of(routing, models))

    def use(self, settings: DecisionSettings) -> None:
        """Decides by other settings from now on (those of router/config/reload.py may differ)."""
        self.decider.use(settings)
        self.routing = routing = settings.of_fleet.routing
        self.fleet.reconfigure(routing)
        if self.lane is not None:
            tally = self.lane.tally
            self.lane = Lane(self, self._rng)
            self.lane.tally = tally

    def copy_prefixes(self, settings: HotPrefixSettings) -> list[CopyEffect]:
        """Starts, changes or ends the copying of hot prefixes; returns which copies end with it."""
        if not settings.enabled:
            effects = self.hot.forget() if self.hot is not None else []
            self.hot = None
            return effects
        if self._copies is None:
            self._copies = HotPrefixes(self.fleet, settings, self._copy_means)
        else:
            self._copies.reconfigure(settings)
        self.hot = self._copies
        return []

    def report(self, progress: Progress, now_s: float, caller: str = "") -> ProgressResult:
        """Moves a reservation on. Counts are cumulative, so a repeated step changes nothing.

        caller: the reporting client, if known; its reports alone eject no worker that serves
        others.
        """
        reservation = self.reservations.get(progress.reservation_id)
        if reservation is None:
            return ProgressResult.UNKNOWN
        changed = self._learn(reservation, progress, now_s)
        if reservation.ended is not None:
            if reservation.ended in _ENDED_BY_US:
                return ProgressResult.UNKNOWN  # the caller must learn that it holds nothing
            return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED
        match progress.state:
            case ProgressState.FINISHED:
                if not reservation.prefill_done:
                    self._first_token(reservation, caller, now_s)
                if reservation.prefill is not None:
                    self._decoded(reservation, caller, now_s)
                self._end(reservation, Ending.FINISHED, now_s)
                return ProgressResult.APPLIED
            case ProgressState.FAILED:
                self._failed(reservation, progress, caller, now_s)
                return ProgressResult.APPLIED
            case ProgressState.PREFILL_DONE:
                if self._prefill_done(reservation, now_s):
                    self._first_token(reservation, caller, now_s)
                    self._measure(reservation, now_s)
                    changed = True
            case ProgressState.RUNNING:
                changed |= not reservation.running
                reservation.running = True
                # Output proves that the prompt is computed, without a report.
                if progress.output_tokens and self._prefill_done(reservation, now_s):
                    self._first_token(reservation, caller, now_s)
                    changed = True
        self.reservations.renew(reservation, now_s + self.routing.lease_s)
        return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED

    def on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        """A worker's heartbeat is in the view."""
        source = self.fleet.view.sources[key]
        heartbeat = heartbeat_of(source)
        self.fleet.models.on_heartbeat(heartbeat, now_s)
        kinds = self.fleet.capacities.kinds_changed
        if self.fleet.capacities.on_heartbeat(key, heartbeat):
            self.fleet.pools.on_capacity(key)
        if kinds != self.fleet.capacities.kinds_changed:
            self.fleet.pools.on_capacities()
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
                *self.fleet.peers.heard(key, now_s - age_s),
            )
            load.unheard = self._unheard()
            self._put_load(key, load)
            self.room += _fell(before, load)
            self.fleet.outliers.on_relay(key, load.external_requests, source.stream.seq, now_s)

    def on_inflight(self, payload: bytes, now_s: float) -> None:
        """Another replica tells what it has reserved."""
        self._hear(self.fleet.peers.on_message(payload, now_s))
        if (verdicts := self.fleet.peers.take_verdicts()) is not None:
            self.fleet.outliers.hear(*verdicts, now_s)
        self.fleet.sessions.announces = bool(self.fleet.peers)
        self.fleet.sessions.hear(self.fleet.peers.take_moved(), now_s)

    def on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        """Workers that left the view: their reservations end."""
        for reservation in self.reservations.on_workers(workers):
            self._end(reservation, Ending.WORKER_LOST, now_s)
        self.fleet.forget(workers)

    def drain(self, worker_id: str) -> int:
        """No new picks of a worker. Returns its ranks."""
        if worker_id not in self.fleet.drained and len(self.fleet.drained) >= DRAINED_MAX:
            here = {key.worker_id for key in self.fleet.view.sources}
            away = (drained for drained in self.fleet.drained if drained not in here)
            del self.fleet.drained[next(away, next(iter(self.fleet.drained)))]
        self.fleet.drained[worker_id] = None
        self.fleet.drains += 1
        return len(self.fleet.view.ranks(worker_id))

    def undrain(self, worker_id: str) -> int:
        """Takes a worker back in. Returns its ranks."""
        self.fleet.drained.pop(worker_id, None)
        self.fleet.drains += 1
        self.room += 1
        return len(self.fleet.view.ranks(worker_id))

    def remove(self, worker_id: str, tombstone_s: float, now_s: float) -> int:
        """Forgets a worker, ignores it for a while (0: the configured time). Returns its ranks."""
        removed = self.fleet.view.remove(worker_id, now_s + (tombstone_s or self.tombstone_s))
        self.on_forgotten(removed, now_s)
        return len(removed)

    def on_time(self, now_s: float) -> Effects:
        """Time went by: `tick`, and what its driver performs, in a process or in virtual time.

        As long as `behind`, the driver calls `catch_up` with turns for others between.
        """
        expired = self.tick(now_s)
        resyncs = self.fleet.self_check.begin_resyncs(now_s)
        return Effects(expired, resyncs, self.fleet.outliers.take_news())

    def tick(self, now_s: float) -> int:
        """Time went by. Returns the reservations that expired.

        Leases, memories and sessions whose time is over end in slices: as long as `behind`, more
        of them wait for `catch_up`.
        """
        expired = self.catch_up(now_s)
        self.fleet.models.tick(now_s)
        self._hear(self.fleet.peers.tick(now_s))
        self.fleet.sessions.announces = bool(self.fleet.peers)
        self._look_for_hangs(now_s)
        self.fleet.tick(now_s)
        self.room += 1
        return expired

    def behind(self, now_s: float) -> bool:
        """Whether leases, memories or sessions are left whose time is over."""
        return self.reservations.due(now_s) or self.fleet.sessions.due(now_s)

    def catch_up(self, now_s: float) -> int:
        """Ends one slice of what is over. Returns the reservations that expired."""
        expired = self.reservations.expired(now_s)
        for reservation in expired:
            self._end(reservation, Ending.EXPIRED, now_s)
        self.reservations.forget_old(now_s)
        self.fleet.sessions.forget_old(now_s)
        return len(expired)

    def keep_ended(self, keep: bool) -> None:
        """Whether reservations that end are kept for `take_ended`, which must be called then."""
        self._ended = (self._ended or []) if keep else None

    def take_ended(self) -> list[Reservation]:
        """Reservations that ended since the last call, as far as they are kept."""
        ended = self._ended
        if ended is None:
            return []
        self._ended = []
        return ended

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
        output_tokens: int = 0,
    ) -> Reservation:
        """Reserves a pick's load: prefixes are the prompt's, overlap is that of the source.

        computes: whether the worker computes the prompt itself. output_tokens: what is expected of
        its answer. What is open is in the reservations before anything else happens, so that it can
        be withdrawn.
        """
        size = heartbeat_of(source).block_size
        self._picks += 1
        reservation = Reservation(
            id=self.ids.next(),
            request_id=request_id,
            worker=source.key,
            fingerprint=fingerprint,
            prefixes=prefixes,
            has_tail=not size or prompt_tokens % size > 0,
            prompt_tokens=prompt_tokens,
            predicted_tokens=overlap.by_events,
            new_tokens=prompt_tokens - overlap.usable if computes else 0,
            opened_at_s=now_s,
            lease_ends_s=now_s + self.routing.lease_s,
            answer=b"",
        )
        load = self.fleet.load(source.key)
        open_reservation(self.reservations, load, reservation, output_tokens, self._picks)
        self.fleet.pools.put_load(source.slot, load)
        return reservation

    def _reserve_prefill(self, reservation: Reservation, decision: Decision, now_s: float) -> None:
        """Has another worker compute the prompt of what was just reserved."""
        row = decision.order[0]
        source, overlap = decision.sources[row], decision.overlap(row)
        key = source.key
        ranks = max(1, len(self.fleet.view.ranks(key.worker_id)))
        hold = PrefillHold(
            worker=key,
            predicted_tokens=overlap.by_events,
            new_tokens=reservation.prompt_tokens - overlap.usable,
            # SGLang finds the rank that a prompt was computed on by room % ranks.
            room=self._rng.getrandbits(ROOM_BITS) * ranks + key.dp_rank % ranks,
        )
        load = self.fleet.load(key)
        load.open(reservation.prefixes, reservation.has_tail, hold.new_tokens, now_s)
        reservation.prefill = hold
        self._picks += 1
        load.last_picked = self._picks
        self.fleet.pools.put_load(source.slot, load)
        self._note_probe(key, reservation.id, now_s)
        self._predict(source, reservation.prefixes, overlap.by_events, now_s)

    def _end_prefill(self, reservation: Reservation, now_s: float) -> None:
        """The prompt is computed, or nobody wants it any more: once."""
        hold = reservation.prefill
        if hold is None or not hold.open:
            return
        hold.open = False
        self._close(hold.worker, reservation, hold.new_tokens, now_s)

    def _learn(self, reservation: Reservation, progress: Progress, now_s: float) -> bool:
        """Takes over what a step tells of counts, once."""
        changed = progress.output_tokens > reservation.output_tokens
        if changed:
            reservation.output_tokens = progress.output_tokens
        if progress.cached_tokens is not None and reservation.cached_tokens is None:
            reservation.cached_tokens = min(progress.cached_tokens, reservation.prompt_tokens)
            changed = True
            seen = reservation.where_computed()
            if seen.worker in self.fleet.view.sources:
                known = self.fleet.cache_reports.setdefault(seen.worker, CacheReport())
                known.prompt += reservation.prompt_tokens
                known.predicted += seen.predicted_tokens
                known.reported += reservation.cached_tokens
                self.fleet.self_check.on_report(seen, reservation.cached_tokens, now_s)
        return changed

    def _prefill_done(self, reservation: Reservation, now_s: float) -> bool:
        if reservation.prefill_done:
            return False
        reservation.prefill_done = True
        self.room += self.fleet.capacities.bounds_phases
        self._end_prefill(reservation, now_s)
        load = self.fleet.load(reservation.worker)
        load.prefill_done(reservation.new_tokens)
        self._put_load(reservation.worker, load)
        self.fleet.rates.on_end(reservation.where_computed().worker, reservation.id)
        return True

    def _measure(self, reservation: Reservation, now_s: float) -> None:
        """Learns from a prompt that is said to be done just now."""
        self.ttft_check.on_done(reservation.id, now_s - reservation.opened_at_s)
        seen = reservation.where_computed()
        source = self.fleet.view.sources.get(seen.worker)
        if source is not None and source.heartbeat is not None:
            self.fleet.rates.on_done(
                source.key,
                source.slot,
                source.heartbeat.model,
                seen.new_tokens,
                reservation.prompt_tokens,
                reservation.opened_at_s,
                now_s,
            )

    def _end(
        self,
        reservation: Reservation,
        ending: Ending,
        now_s: float,
        blamed: WorkerKey | None = None,
    ) -> None:
        """blamed: of a pair that failed, the half by whose fault."""
        worker, hold = reservation.worker, reservation.prefill
        new_tokens = 0
        if not reservation.prefill_done:
            reservation.prefill_done = True
            new_tokens = reservation.new_tokens
            if self.fleet.rates.under_way:
                self.fleet.rates.on_end(worker if hold is None else hold.worker, reservation.id)
        self.fleet.load(worker).outputs.drop(reservation.id)
        self._close(worker, reservation, new_tokens, now_s)
        if hold is not None:
            self._end_prefill(reservation, now_s)
        if self.ttft_check.predicted_s:
            self.ttft_check.on_end(reservation.id)
        self.reservations.end(reservation, ending, now_s)
        self.endings[ending] += 1
        if self._ended is not None:
            self._ended.append(reservation)
        self.fleet.count(blamed or worker, ending)
        if ending is Ending.FINISHED:
            if hold is not None:
                self.fleet.count(hold.worker, ending)
            if self.fleet.capacities.preempted:
                for key in _workers_of(reservation):
                    if self.fleet.capacities.on_served(key):
                        self.fleet.pools.on_capacity(key)
        if self.fleet.outliers.probing:
            for key in _workers_of(reservation):
                self.fleet.outliers.on_end(key, reservation.id)

    def _close(
        self, worker: WorkerKey, reservation: Reservation, new_tokens: int, now_s: float
    ) -> None:
        """A reservation's load on a worker ends. new_tokens: of its prompt, not computed yet."""
        self.room += 1
        load, source = self.fleet.load(worker), self.fleet.view.sources.get(worker)
        prefixes, has_tail = reservation.prefixes, reservation.has_tail
        load.close(prefixes, has_tail, now_s, new_tokens)
        if source is not None:
            self.fleet.pools.put_load(source.slot, load)

    def _first_token(self, reservation: Reservation, caller: str, now_s: float) -> None:
        """The first sign that a worker has computed a reservation's prompt."""
        opened_s, hold = reservation.opened_at_s, reservation.prefill
        worker = reservation.worker if hold is None else hold.worker
        self.fleet.first_tokens.on_first(now_s - opened_s)
        self.fleet.outliers.on_served(worker, reservation.id, caller, opened_s, now_s)

    def _decoded(self, reservation: Reservation, caller: str, now_s: float) -> None:
        """Of a pair, the worker that decodes has served its request to the end."""
        opened_s = reservation.opened_at_s
        self.fleet.outliers.on_served(reservation.worker, reservation.id, caller, opened_s, now_s)

    def _failed(
        self, reservation: Reservation, progress: Progress, caller: str, now_s: float
    ) -> None:
        """A request has failed, which counts against a worker if it was by its fault."""
        blamed = _blamed(reservation, progress.failed_worker_id)
        self._end(reservation, progress.failure, now_s, blamed)
        fault = _FAULTS.get(progress.failure)
        if fault is not None and blamed in self.fleet.view.sources:
            self.fleet.outliers.on_failed(blamed, fault, caller, reservation.opened_at_s, now_s)

    def _note_probe(self, key: WorkerKey, reservation_id: str, now_s: float) -> None:
        if key in self.fleet.outliers.probing:
            self.fleet.outliers.on_pick(key, reservation_id, now_s)

    def _look_for_hangs(self, now_s: float) -> None:
        """Suspects workers that owe first tokens for far longer than was predicted."""
        settings, outliers = self.routing.outliers, self.fleet.outliers
        if not settings.enabled or not self.fleet.first_tokens.may_judge():
            return
        for key, load in self.fleet.loads.items():
            standing = outliers.standing(key)
            if standing is None:
                owes = load.prefills >= settings.hang_requests
                last_s = outliers.served_s(key)
                owed_s = self.fleet.first_tokens.owed_for_s(key, owes, last_s, now_s)
            else:  # old requests may hang there for ever; only its probes count now
                self.fleet.first_tokens.forget(key)
                owed_s = now_s - min(standing.probes.values(), default=now_s)
            if owed_s <= settings.hang_s or (source := self.fleet.view.sources.get(key)) is None:
                continue
            rate = self.fleet.rates.rate(key, heartbeat_of(source).model)
            predicted_s = max(self.fleet.first_tokens.mean_s, load.prefill_tokens_active / rate)
            if owed_s > settings.hang_s + settings.hang_factor * predicted_s:
                outliers.on_overdue(key, now_s)

    def _hear(self, workers: Collection[WorkerKey]) -> None:
        for key in workers:
            if key in self.fleet.view.sources:
                load = self.fleet.load(key)
                before = _taken(load)
                load.hear(*self.fleet.peers.heard(key, load.sampled_at_s or 0.0))
                load.unheard = self._unheard()
                self._put_load(key, load)
                self.room += _fell(before, load)

    def _unheard(self) -> float:
        """Guess of the requests that peers have just sent to a worker, 0 to 1: with different
        guesses, replicas with equal views do not all pick the same slightly better worker."""
        return self._rng.random() if self.fleet.peers else 0.0

    def _put_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        if (source := self.fleet.view.sources.get(key)) is not None:
            self.fleet.pools.put_load(source.slot, load)


def _taken(load: WorkerLoad) -> tuple[float, float, float]:
    """Load that takes a worker's room; its first sample counts as less."""
    if load.sampled_at_s is None:
        return inf, inf, inf
    return load.active_requests(), load.active_blocks(), load.prefill_tokens_active


def _fell(before: tuple[float, float, float], load: WorkerLoad) -> bool:
    """Whether a worker may have more room than before."""
    return any(now < then for now, then in zip(_taken(load), before, strict=True))


def _workers_of(reservation: Reservation) -> list[WorkerKey]:
    """The worker, or both of a pair."""
    if reservation.prefill is None:
        return [reservation.worker]
    return [reservation.worker, reservation.prefill.worker]


def _blamed(reservation: Reservation, failed_worker_id: str) -> WorkerKey:
    """The worker by whose fault a request failed.

    Of a pair the one that the caller names; else, until the prompt is computed, the one that
    computes it.
    """
    if reservation.prefill is None:
        return reservation.worker
    halves = _workers_of(reservation)
    named = [key for key in halves if key.worker_id == failed_worker_id]
    if len(named) == 1:
        return named[0]
    return reservation.worker if reservation.prefill_done else reservation.prefill.worker
