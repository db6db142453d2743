"""The decision core: what requests, reports, heartbeats and time change.

Who gets a request is decided in router/decider.py; what that changes, here. Pure: no I/O, no
clock, no randomness of its own. It takes `now_s` and a seeded rng, owns load and reservations, and
reads the fleet view. The gRPC shell performs what it answers, and so does a simulator: one core,
two worlds.

Laws:
- a pick reserves its load at once, and every reservation is released exactly once;
- a refusal changes nothing;
- a worker that failed requests gets none for a while (router/outliers.py);
- the same request id, prompt, model and role get the same answer while they are remembered.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from events.inflight import Peers
from events.view import FleetView, Source
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.capacity import Capacities
from router.config import ModelSettings, RoutingSettings
from router.decider import FULL_RETRY_S, Decider
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
)
from router.eligibility import DRAINED
from router.first_tokens import FirstTokens
from router.further import Further
from router.hot_prefixes import HotPrefixes
from router.lane import Lane
from router.load import WorkerLoad
from router.models import Models
from router.outliers import Fault, Outliers
from router.policies.policy import Policy
from router.pools import Pools, heartbeat_of
from router.rates import PrefillRates
from router.refusals import Reason, Refusal
from router.request import Fingerprint, Request
from router.reservation_ids import ReservationIds
from router.reservations import Ending, PrefillHold, Reservation, Reservations
from router.self_check import SelfCheck
from router.sessions import Sessions
from router.topology import PlaceLabels
from router.ttft_check import TtftCheck
from router.warnings import FleetWatch, WarningCode, WorkerWarning
from router.working_set import WorkingSets

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
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """random_bytes: what ids of reservations are made of; unpredictable, unless for a test."""
        self.view = view
        self.routing = routing
        self.replica = replica
        self.loads: dict[WorkerKey, WorkerLoad] = {}
        self.peers = Peers(replica)
        """The load that other replicas have reserved."""
        self.reservations = Reservations(routing.memory_window_s, routing.reservations_max)
        self.endings: Counter[Ending] = Counter()
        self.outcomes: dict[WorkerKey, Counter[Ending]] = {}
        """The same by worker: of a pair, what was served counts for both halves, and a failure for
        the half that failed."""
        self.outliers = Outliers(
            routing.outliers,
            group=self._group_of,
            sampled_at_s=self._answered_at_s,
            on_change=lambda key: self.pools.on_ejected(key),
        )
        self.first_tokens = FirstTokens()
        self.guarded = 0
        """Picks that the guard moved."""
        self.last_resorts = 0
        """Picks of workers that are tried only where none that answers may take the request."""
        self.strained_picks = 0
        """Picks of workers that are over what was learned of their capacity, since no other had
        room."""
        self.cache_reports: dict[WorkerKey, CacheReport] = {}
        self.self_check = SelfCheck(view)
        self.ready = True
        """False: part of the fleet may not have been heard yet, so that no model is unknown."""
        self.drained: dict[str, None] = {}
        """Worker ids that get nothing new."""
        self.drains = 0
        """Changes of these."""
        self.models = Models(models, model_memory_s)
        self.capacities = Capacities(routing.capacity)
        self.pools = Pools(view, self.models, self.load_of, self.capacities, self.outliers.reason)
        labels = PlaceLabels(routing.host_label, routing.rack_label, routing.cluster_label)
        self.rates = PrefillRates(routing.prefill_rate)
        self.ttft_check = TtftCheck()
        self.sessions = Sessions(routing.session_ttl_s, routing.sessions_max)
        self.working_sets = WorkingSets()
        self.further = Further(self.loads, self.rates, labels, self.sessions, self.working_sets)
        self.decider = Decider(
            routing, view.index, self.pools, self.further, self.drained, rng, models
        )
        self.times_all = False
        """Every pick is timed, since a policy that wants to know watches, or will be asked of the
        decision log; else those of timed policies are."""
        self.pair_picks: Counter[Prefill] = Counter()
        self.tombstone_s = tombstone_s
        self._rng = rng
        self._picks = 0
        self.ids = ReservationIds(replica, random_bytes)
        index = view.index
        self.lane = Lane(self, rng) if isinstance(index, NativeIndex) else None
        """Picks for plain requests; the decider and the rest of this file are its twin, and for all
        others."""
        self.hot: HotPrefixes | None = None
        """Copies what many ask for; None: switched off."""
        self.relay_trouble: Callable[[str], str] = lambda _worker_id: ""
        """Why a relay in this process failed, as a sentence; empty: it runs, or is not here."""
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
        prompt, view = request.prompt, self.view
        view.salted |= bool(prompt.cache_salt)
        view.itemized |= prompt.has_items
        lane = self.lane if watch is None else None
        if lane is not None and (picked := lane.pick(request, now_s, mark)) is not None:
            reservation, overlap, weighed = picked
            self._remember(request, reservation, now_s)
            if self.times_all:
                self.time(reservation, now_s)
            if self.hot is not None:
                self.hot.on_pick(reservation, request.for_all, lambda: request.prompt, now_s)
            return Pick(reservation, partial(self.decider.told, request, weighed, now_s), overlap)
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
        decision = self.decide(request, now_s, mark)
        if not decision.order:
            raise self.decider.refuse(decision)
        if watch is not None:
            watch(decision.computing)
        source = decision.sources[decision.order[0]]
        self.last_resorts += decision.last_resort
        self.strained_picks += decision.strained
        self.guarded += decision.computing.guarded is not None
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
        if computing.policy.timed or self.times_all:
            self.time(reservation, now_s)
        if (predicted_s := computing.scores.ttft_s) is not None:
            self.ttft_check.on_pick(reservation.id, predicted_s.item(computing.order[0]))
        if self.hot is not None:
            seen = reservation.where_computed()
            self.hot.on_pick(seen, request.for_all, lambda: request.prompt, now_s)
        return Pick(reservation, decision, computing.overlap(computing.order[0]))

    @property
    def policies(self) -> dict[str, Policy]:
        """By name, with their parameters."""
        return self.decider.policies

    def time(self, reservation: Reservation, now_s: float) -> None:
        """Tells what timed policies look at of a pick: work under way, and the worker's working
        set. Of a pair, of the worker that computes the prompt."""
        seen = reservation.where_computed()
        source = self.view.sources[seen.worker]
        self.rates.on_pick(
            source.key,
            source.slot,
            heartbeat_of(source).model,
            reservation.id,
            seen.new_tokens,
            reservation.prompt_tokens,
            now_s,
        )
        self.working_sets.on_pick(source.key, reservation.prefixes, now_s)

    def _remember(self, request: Request, reservation: Reservation, now_s: float) -> None:
        """Where a session's KV cache will be."""
        if request.session_id:
            size = heartbeat_of(self.view.sources[reservation.worker]).block_size
            lora_name = request.prompt.lora_name
            self.sessions.put(request.session_id, reservation, size, lora_name, now_s)

    def decide(
        self, request: Request, now_s: float, mark: Callable[[str], None] = _no_mark
    ) -> Decision:
        """What `route` would pick by; changes nothing. See Decider.decide."""
        return self.decider.decide(request, self.ready, now_s, mark)

    def reconfigure(self, routing: RoutingSettings, models: tuple[ModelSettings, ...] = ()) -> None:
        """Decides by other settings from now on (those of router/reload.py may differ).

        models: of them, `routing` alone counts here.
        Raises ConfigError, and changes nothing, for policies that can't be.
        """
        self.decider.reconfigure(routing, models)
        self.routing = routing
        self.outliers.reconfigure(routing.outliers)
        self.capacities.reconfigure(routing.capacity)
        self.pools.on_capacities()
        if self.lane is not None:
            tally = self.lane.tally
            self.lane = Lane(self, self._rng)
            self.lane.tally = tally

    def report(self, progress: Progress, now_s: float, caller: str = "") -> ProgressResult:
        """Moves a reservation on. Counts are cumulative, so a step told twice changes nothing.

        caller: who says so, as far as is known; its word alone ejects no worker that others see
        serve.
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
                # With output its prompt is computed, though nobody told.
                if progress.output_tokens and self._prefill_done(reservation, now_s):
                    self._first_token(reservation, caller, now_s)
                    changed = True
        self.reservations.renew(reservation, now_s + self.routing.lease_s)
        return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED

    def on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        """A worker's heartbeat is in the view."""
        source = self.view.sources[key]
        heartbeat = heartbeat_of(source)
        self.models.on_heartbeat(heartbeat, now_s)
        kinds = self.capacities.kinds_changed
        if self.capacities.on_heartbeat(key, heartbeat):
            self.pools.on_capacity(key)
        if kinds != self.capacities.kinds_changed:
            self.pools.on_capacities()
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
            load.unheard = self._unheard()
            self._put_load(key, load)
            self.outliers.on_relay(key, load.external_requests, source.stream.seq, now_s)

    def on_inflight(self, payload: bytes, now_s: float) -> None:
        """Another replica tells what it has reserved."""
        self._hear(self.peers.on_message(payload, now_s))
        if (told := self.peers.take_verdicts()) is not None:
            self.outliers.hear(*told, now_s)
        self.sessions.tells = bool(self.peers)
        self.sessions.hear(self.peers.take_moved(), now_s)

    def on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        """Workers that the view knows no more: what they had reserved ends."""
        for reservation in self.reservations.on_workers(workers):
            self._end(reservation, Ending.WORKER_LOST, now_s)
        for worker in workers:
            self.loads.pop(worker, None)
            self.cache_reports.pop(worker, None)
            self.outcomes.pop(worker, None)
            self.outliers.forget(worker)
            self.first_tokens.forget(worker)
        kinds = self.capacities.kinds_changed
        self.capacities.on_forgotten(workers)
        if kinds != self.capacities.kinds_changed:
            self.pools.on_capacities()
        self.self_check.on_forgotten(workers)
        self.rates.on_forgotten(workers)
        self.working_sets.on_forgotten(workers)

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
        """Time went by. Returns the reservations that expired.

        Leases, memories and sessions whose time is over end in slices: as long as `behind`, more
        of them wait for `catch_up`.
        """
        expired = self.catch_up(now_s)
        self.models.tick(now_s)
        self._hear(self.peers.tick(now_s))
        self.sessions.tells = bool(self.peers)
        self._look_for_hangs(now_s)
        self.outliers.tick(now_s)
        self.rates.tick()
        self.working_sets.tick(now_s)
        self.pools.refresh()
        self._watch.on_tick(self.loads, now_s)
        return expired

    def behind(self, now_s: float) -> bool:
        """Whether leases, memories or sessions are left whose time is over."""
        return self.reservations.due(now_s) or self.sessions.due(now_s)

    def catch_up(self, now_s: float) -> int:
        """Ends one slice of what is over. Returns the reservations that expired."""
        expired = self.reservations.expired(now_s)
        for reservation in expired:
            self._end(reservation, Ending.EXPIRED, now_s)
        self.reservations.forget_old(now_s)
        self.sessions.forget_old(now_s)
        return len(expired)

    def lora_of(self, model: str) -> str:
        """The LoRA that a request means by its model's name; empty when that is a whole model."""
        self.pools.refresh()
        return self.pools.lora_of(model)

    def block_sizes(self, model: str) -> Collection[int]:
        """In which a model's workers hold blocks; raises Refusal if nobody serves it."""
        self.pools.refresh()
        pool, _ = self.pools.live(model, self.ready)
        return pool.block_sizes

    def serves(self, source: Source, model: str) -> bool:
        """Whether a worker serves a model, by any of its names."""
        return source.heartbeat is not None and self.models.serves(source.heartbeat, model)

    def warnings(self, source: Source, now_s: float) -> list[WorkerWarning]:
        """What an operator should mend about a worker."""
        found = self._watch.warnings(source, now_s)
        if trouble := self.relay_trouble(source.key.worker_id):
            found.append(WorkerWarning(WarningCode.RELAY, trouble))
        return found

    def load_of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load; an idle one for a worker that nothing is known of."""
        return self.loads.get(key) or WorkerLoad()

    def outcomes_of(self, key: WorkerKey) -> Counter[Ending]:
        """How requests that a worker got from this router ended."""
        return self.outcomes.get(key, Counter())

    def cache_report_of(self, key: WorkerKey) -> CacheReport:
        """Predicted against reported cached tokens of a worker; zeros before the first report."""
        return self.cache_reports.get(key) or CacheReport()

    def excluded(self, source: Source) -> str:
        """Why a worker gets no requests; empty when it may.

        A worker of the last resort may once no other of its model and role answers.
        """
        if source.key.worker_id in self.drained:
            return DRAINED
        reason = self.pools.kept_out(source)
        if reason and self.pools.may_be_last(source) and self._no_other(source):
            return ""
        return reason

    def last_resort(self, source: Source) -> bool:
        """Whether a worker gets requests only while none that answers is eligible."""
        return bool(self.pools.kept_out(source)) and self.pools.may_be_last(source)

    def _no_other(self, source: Source) -> bool:
        """Whether no worker of a worker's model and role answers and may be picked."""
        self.pools.refresh()
        up = self.pools.up(source)
        return all(key.worker_id in self.drained for key in up) if self.drained else not up

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
        self._picks += 1
        reservation = Reservation(
            id=self.ids.next(),
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
        self._note_probe(source.key, reservation.id, now_s)
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
        self._note_probe(key, reservation.id, now_s)
        if size:
            self.view.predict(source, reservation.prefixes[overlap.told // size :], now_s)

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
            if seen.worker in self.view.sources:
                known = self.cache_reports.setdefault(seen.worker, CacheReport())
                known.prompt += reservation.prompt_tokens
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
            if self.rates.under_way:
                self.rates.on_end(worker if hold is None else hold.worker, reservation.id)
        self._close(worker, reservation, new_tokens, now_s)
        if hold is not None:
            self._end_prefill(reservation, now_s)
        if self.ttft_check.predicted_s:
            self.ttft_check.on_end(reservation.id)
        self.reservations.end(reservation, ending, now_s)
        self.endings[ending] += 1
        self._count_at(blamed or worker, ending)
        if ending is Ending.FINISHED:
            if hold is not None:
                self._count_at(hold.worker, ending)
            if self.capacities.preempted:
                for key in _workers_of(reservation):
                    if self.capacities.on_served(key):
                        self.pools.on_capacity(key)
        if self.outliers.probing:
            for key in _workers_of(reservation):
                self.outliers.on_end(key, reservation.id)

    def _close(
        self, worker: WorkerKey, reservation: Reservation, new_tokens: int, now_s: float
    ) -> None:
        """A reservation's load on a worker ends. new_tokens: of its prompt, not computed yet."""
        load, source = self._load(worker), self.view.sources.get(worker)
        prefixes, has_tail = reservation.prefixes, reservation.has_tail
        if self.lane is not None and source is not None:
            self.lane.close(source.slot, load, prefixes, has_tail, new_tokens, now_s)
            return
        load.prefill_done(new_tokens)
        load.close(prefixes, has_tail, now_s)
        if source is not None:
            self.pools.put_load(source.slot, load)

    def _first_token(self, reservation: Reservation, caller: str, now_s: float) -> None:
        """The worker that computes a prompt has done so, as the first that is heard of it."""
        opened_s, hold = reservation.opened_at_s, reservation.prefill
        worker = reservation.worker if hold is None else hold.worker
        self.first_tokens.on_first(now_s - opened_s)
        self.outliers.on_served(worker, reservation.id, caller, opened_s, now_s)

    def _decoded(self, reservation: Reservation, caller: str, now_s: float) -> None:
        """Of a pair, the worker that decodes has served its request to the end."""
        opened_s = reservation.opened_at_s
        self.outliers.on_served(reservation.worker, reservation.id, caller, opened_s, now_s)

    def _failed(
        self, reservation: Reservation, progress: Progress, caller: str, now_s: float
    ) -> None:
        """A request has failed, which counts against a worker if it was by its fault."""
        blamed = _blamed(reservation, progress.failed_worker_id)
        self._end(reservation, progress.failure, now_s, blamed)
        fault = _FAULTS.get(progress.failure)
        if fault is not None and blamed in self.view.sources:
            self.outliers.on_failed(blamed, fault, caller, reservation.opened_at_s, now_s)

    def _count_at(self, key: WorkerKey, ending: Ending) -> None:
        counts = self.outcomes.get(key)
        if counts is None:
            if key not in self.view.sources:
                return
            counts = self.outcomes[key] = Counter()
        counts[ending] += 1

    def _note_probe(self, key: WorkerKey, reservation_id: str, now_s: float) -> None:
        if key in self.outliers.probing:
            self.outliers.on_pick(key, reservation_id, now_s)

    def _look_for_hangs(self, now_s: float) -> None:
        """Suspects workers that owe first tokens for far longer than was predicted."""
        settings, outliers = self.routing.outliers, self.outliers
        if not settings.enabled or not self.first_tokens.may_judge():
            return
        for key, load in self.loads.items():
            standing = outliers.standing(key)
            if standing is None:
                owes = load.prefills >= settings.hang_requests
                last_s = outliers.served_s(key)
                owed_s = self.first_tokens.owed_for_s(key, owes, last_s, now_s)
            else:  # old requests may hang there for ever; what is asked of it now are its probes
                self.first_tokens.forget(key)
                owed_s = now_s - min(standing.probes.values(), default=now_s)
            if owed_s <= settings.hang_s or (source := self.view.sources.get(key)) is None:
                continue
            rate = self.rates.rate(key, heartbeat_of(source).model)
            predicted_s = max(self.first_tokens.mean_s, load.prefill_tokens_active / rate)
            if owed_s > settings.hang_s + settings.hang_factor * predicted_s:
                outliers.on_overdue(key, now_s)

    def _answered_at_s(self, key: WorkerKey) -> float | None:
        """When an engine last answered its relay, by our clock; None: its relay never asked.

        Heartbeats that are delayed, as beside a flood of other messages, don't make it later: a
        dead engine would seem to have answered since it refused connections.
        """
        source = self.view.sources.get(key)
        if source is None or (heartbeat := source.heartbeat) is None:
            return None
        if heartbeat.sampled_at_s is None:
            return None
        return heartbeat.sampled_at_s + source.clock.seconds

    def _group_of(self, key: WorkerKey) -> Collection[WorkerKey]:
        source = self.view.sources.get(key)
        return () if source is None else self.pools.group(source)

    def _hear(self, workers: Collection[WorkerKey]) -> None:
        for key in workers:
            if key in self.view.sources:
                load = self._load(key)
                load.hear(*self.peers.heard(key, load.sampled_at_s or 0.0))
                load.unheard = self._unheard()
                self._put_load(key, load)

    def _unheard(self) -> float:
        """What peers have just sent to a worker: replicas that see the same and guess differently
        do not all take the one that is a little better for the same moment."""
        return self._rng.random() if self.peers else 0.0

    def _put_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        if (source := self.view.sources.get(key)) is not None:
            (self.lane or self.pools).put_load(source.slot, load)

    def _load(self, key: WorkerKey) -> WorkerLoad:
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = WorkerLoad()
        return load


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
