"""A reservation from its pick to its end, and what its steps change: loads, predictions, counts.

    open ──PREFILL_DONE──> running ──FINISHED, FAILED, lease, worker lost──> ended

Laws:
- a reservation ends exactly once, whatever is reported, and frees what it held on each worker;
- counts in reports are cumulative: a repeated step changes nothing.
"""

import random
from collections import Counter
from collections.abc import Callable

from events.feed.fleet_view import Source
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.config.settings.routing_settings import RoutingSettings
from router.decide.core.progress import Progress, ProgressResult, ProgressState
from router.decide.decision.decision import Decision, Overlap
from router.fleet.health.outliers import Fault
from router.fleet.health.time_check import TimeCheck
from router.fleet.pools import heartbeat_of
from router.fleet.rates import work
from router.fleet.reservations.ids import ReservationIds
from router.fleet.reservations.reservations import Ending, PrefillHold, Reservation, Reservations
from router.fleet.reservations.steps import open_reservation
from router.fleet.state import CacheReport, Fleet
from router.request.request import Request

MEMORY_LEASES = 1.5
"""Time for which a request is remembered after its end, in leases: a caller that was silent for a
lease finds its request again."""
ROOM_BITS = 48
"""Random bits of a pair's room, which stays below 2^63 for any number of ranks."""
_ENDED_BY_US = (Ending.EXPIRED, Ending.WORKER_LOST)
_FAULTS = {
    Ending.FAILED_WORKER: Fault.ERROR,
    Ending.FAILED_TIMEOUT: Fault.TIMEOUT,
    Ending.FAILED_REFUSED: Fault.REFUSED,
}
"""Endings that count against a worker."""


class ReservationLife:
    """All open reservations of a replica, and the changes that their steps make."""

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingSettings,
        *,
        ids: ReservationIds,
        rng: random.Random,
    ) -> None:
        self.fleet = fleet
        self.reservations = Reservations(MEMORY_LEASES * routing.lease_s, routing.reservations_max)
        self.lease_s = routing.lease_s
        self.ids = ids
        self.picks = 0
        self.endings: Counter[Ending] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        """Finished requests by the Progress.finish_reason that their callers reported."""
        self.ttft_check = TimeCheck()
        self.tpot_check = TimeCheck()
        self._rng = rng
        self.on_end: Callable[[Reservation], None] | None = None
        """Called with each reservation that ends; None: nothing needs to know."""

    def made(
        self,
        source: Source,
        request: Request,
        overlap: Overlap,
        now_s: float,
        *,
        computes: bool,
    ) -> Reservation:
        """Makes a reservation of a worker without opening it. overlap: of the prompt with that
        worker's cache. computes: whether the worker computes the prompt itself.
        """
        size, prompt = heartbeat_of(source).block_size, request.prompt
        tokens = prompt.token_count
        return Reservation(
            id=self.ids.next(),
            request_id=request.request_id,
            worker=source.key,
            fingerprint=request.fingerprint(size),
            prefixes=prompt.prefixes(size),
            own_blocks=prompt.own_blocks(size),
            prompt_tokens=tokens,
            predicted_tokens=overlap.by_events,
            new_tokens=tokens - overlap.usable if computes else 0,
            opened_at_s=now_s,
            lease_ends_s=now_s + self.lease_s,
            answer=b"",
            tenant=request.tenant,
            objective=request.objective,
        )

    def hold(self, reservation: Reservation, decision: Decision) -> PrefillHold:
        """The load that a reservation puts on its prefill worker, the other worker of a pair, until
        that worker has computed the prompt. Reserves nothing yet.
        """
        row = decision.order[0]
        key, overlap = decision.sources[row].key, decision.overlap(row)
        ranks = max(1, len(self.fleet.view.ranks(key.worker_id)))
        return PrefillHold(
            worker=key,
            predicted_tokens=overlap.by_events,
            new_tokens=reservation.prompt_tokens - overlap.usable,
            # SGLang finds the rank that a prompt was computed on by room % ranks.
            room=self._rng.getrandbits(ROOM_BITS) * ranks + key.dp_rank % ranks,
            open=False,
        )

    def open(self, source: Source, reservation: Reservation, output_tokens: int = 0) -> None:
        """Reserves a pick's load. output_tokens: expected length of the answer. The reservation is
        listed before anything else changes, so that it can be withdrawn.
        """
        self.picks += 1
        load, columns = self.fleet.load(source.key), self.fleet.pools.written
        about = output_tokens, self.picks, columns, source.slot
        open_reservation(self.reservations, load, reservation, *about)

    def open_prefill(self, source: Source, reservation: Reservation, now_s: float) -> None:
        """Reserves load on the prefill worker of a pair that was just opened."""
        hold = reservation.prefill
        if hold is None:
            raise AssertionError(f"{reservation.id} holds no second worker")
        load = self.fleet.load(source.key)
        load.open(reservation.prefixes, reservation.own_blocks, hold.new_tokens, now_s)
        hold.open = True
        self.picks += 1
        load.last_picked = self.picks
        self.fleet.pools.put_load(source.slot, load)
        self.note_probe(source.key, reservation.id, now_s)
        self.predict(source, reservation.prefixes, hold.predicted_tokens, now_s)

    def predict(self, source: Source, prefixes: HashArray, held_tokens: int, now_s: float) -> None:
        """Predicts that a worker will hold a prompt. held_tokens: tokens of it that the worker's
        events show already.
        """
        if size := heartbeat_of(source).block_size:
            # The index knows blocks held beyond these, too, and predicts only the rest.
            news = prefixes[held_tokens // size :] if held_tokens else prefixes
            self.fleet.view.predict(source, news, now_s)

    def remember(self, request: Request, reservation: Reservation, now_s: float) -> None:
        """Remembers which worker will have the KV cache of a request's session."""
        size = heartbeat_of(self.fleet.view.sources[reservation.worker]).block_size
        lora_name = request.prompt.lora_name
        self.fleet.sessions.put(request.session_id, reservation, size, lora_name, now_s)

    def time(self, reservation: Reservation, longest_tokens: int, now_s: float) -> None:
        """Updates what timed policies read: of a worker, work under way and working set; for a
        pair, that of the prefill worker. longest_tokens: the longest match of any worker.
        """
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
        if size := heartbeat_of(source).block_size:
            matched_blocks = longest_tokens // size
            invests = reservation.prompt_tokens - seen.new_tokens < matched_blocks * size
            self.fleet.shared_prefixes.on_pick(reservation.prefixes, matched_blocks, now_s, invests)

    def report(self, progress: Progress, now_s: float, caller: str = "") -> ProgressResult:
        """Applies a reported step to a reservation. Counts are cumulative, so a repeated step
        changes nothing.

        caller: the reporting client, if known; reports of one client alone eject no worker that
        serves others.
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
                    about = reservation.id, caller, reservation.opened_at_s, now_s
                    self.fleet.outliers.on_served(reservation.worker, *about)
                self.end(reservation, Ending.FINISHED, now_s)
                if progress.finish_reason:
                    self.finish_reasons[progress.finish_reason] += 1
                return ProgressResult.APPLIED
            case ProgressState.FAILED:
                self._failed(reservation, progress, caller, now_s)
                return ProgressResult.APPLIED
            case ProgressState.PREFILL_DONE:
                if self.prefill_done(reservation, now_s):
                    self._first_token(reservation, caller, now_s)
                    self._measure(reservation, now_s)
                    changed = True
            case ProgressState.RUNNING:
                changed |= not reservation.running
                reservation.running = True
                # Output proves that the prompt is computed, without a report.
                if progress.output_tokens and self.prefill_done(reservation, now_s):
                    self._first_token(reservation, caller, now_s)
                    changed = True
        self.reservations.renew(reservation, now_s + self.lease_s)
        return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED

    def _learn(self, reservation: Reservation, progress: Progress, now_s: float) -> bool:
        """Takes over the token counts of a reported step; returns whether any was new."""
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

    def prefill_done(self, reservation: Reservation, now_s: float) -> bool:
        """Records that a prompt is computed. Returns whether that was not known before."""
        if reservation.prefill_done:
            return False
        reservation.prefill_done = True
        self.fleet.room += self.fleet.capacities.bounds_phases
        self._end_prefill(reservation, now_s)
        load = self.fleet.load(reservation.worker)
        load.prefill_done(reservation.new_tokens)
        self.fleet.put_load(reservation.worker, load)
        self.fleet.rates.on_end(reservation.where_computed().worker, reservation.id)
        return True

    def _measure(self, reservation: Reservation, now_s: float) -> None:
        """Learns from a prompt that is reported as computed just now."""
        self.ttft_check.on_done(reservation.id, now_s - reservation.opened_at_s)
        seen, sources = reservation.where_computed(), self.fleet.view.sources
        token_times = self.fleet.token_times
        source = sources.get(seen.worker)
        if source is not None and source.heartbeat is not None:
            load = self.fleet.load(source.key)
            done = float(work(seen.new_tokens, reservation.prompt_tokens))
            token_times.on_prompt(source.key, source.heartbeat, load, done, now_s)
            self.fleet.answers.on_first(source.heartbeat, reservation, now_s)
            self.fleet.rates.on_done(
                source.key,
                source.slot,
                source.heartbeat.model,
                seen.new_tokens,
                reservation.prompt_tokens,
                reservation.opened_at_s,
                now_s,
            )
        source = sources.get(reservation.worker)
        if source is not None and source.heartbeat is not None:
            load = self.fleet.load(source.key)
            token_times.on_first(source.key, source.heartbeat, load, reservation.id, now_s)

    def _first_token(self, reservation: Reservation, caller: str, now_s: float) -> None:
        """Counts the time to the first token, at the first sign that the prompt is computed."""
        opened_s, hold = reservation.opened_at_s, reservation.prefill
        worker = reservation.worker if hold is None else hold.worker
        self.fleet.first_tokens.on_first(now_s - opened_s)
        if reservation.tenant:
            self.fleet.tenants.on_first(reservation.tenant, now_s - opened_s)
        self.fleet.outliers.on_served(worker, reservation.id, caller, opened_s, now_s)

    def _failed(
        self, reservation: Reservation, progress: Progress, caller: str, now_s: float
    ) -> None:
        """Ends a request that has failed, and counts that against the worker at fault, if any."""
        blamed = _blamed(reservation, progress.failed_worker_id)
        self.end(reservation, progress.failure, now_s, blamed)
        fault = _FAULTS.get(progress.failure)
        if fault is not None and blamed in self.fleet.view.sources:
            self.fleet.outliers.on_failed(blamed, fault, caller, reservation.opened_at_s, now_s)

    def withdraw(self, reservation: Reservation, now_s: float) -> None:
        """Ends a reservation whose answer could not be given."""
        if reservation.ended is None:
            self.end(reservation, Ending.FAILED_UNKNOWN, now_s)

    def end(
        self,
        reservation: Reservation,
        ending: Ending,
        now_s: float,
        blamed: WorkerKey | None = None,
    ) -> None:
        """Ends a reservation. blamed: for a pair that failed, the half at fault."""
        worker, hold = reservation.worker, reservation.prefill
        new_tokens = 0
        if not reservation.prefill_done:
            reservation.prefill_done = True
            new_tokens = reservation.new_tokens
            if self.fleet.rates.under_way:
                self.fleet.rates.on_end(worker if hold is None else hold.worker, reservation.id)
        self.fleet.load(worker).outputs.drop(reservation.id)
        source = self._close(worker, reservation, new_tokens, now_s)
        if hold is not None:
            self._end_prefill(reservation, now_s)
        if self.ttft_check.predicted_s:
            self.ttft_check.on_end(reservation.id)
        blocks = len(reservation.prefixes) + reservation.own_blocks
        self.reservations.end(reservation, ending, now_s)  # which may drop the prompt's hashes
        self._measure_tokens(reservation, ending, blocks, source, now_s)
        self.endings[ending] += 1
        if self.on_end is not None:
            self.on_end(reservation)
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

    def _measure_tokens(
        self,
        reservation: Reservation,
        ending: Ending,
        blocks: int,
        source: Source | None,
        now_s: float,
    ) -> None:
        """Learns from the time between the tokens of an answer that came to its end. blocks: KV
        blocks that it held. source: of its worker."""
        if ending is Ending.FINISHED:
            load = self.fleet.load_of(reservation.worker)
            about = reservation.output_tokens, blocks, now_s
            measured_s = self.fleet.token_times.on_finished(reservation.id, load, *about)
            if measured_s is not None:
                self.tpot_check.on_done(reservation.id, measured_s)
            if source is not None and source.heartbeat is not None:
                self.fleet.answers.on_finished(source.heartbeat, reservation, measured_s)
        else:
            self.fleet.token_times.on_end(reservation.id)
        self.tpot_check.on_end(reservation.id)

    def _end_prefill(self, reservation: Reservation, now_s: float) -> None:
        """Frees a pair's load on its prefill worker, once: the prompt is computed or not wanted."""
        hold = reservation.prefill
        if hold is None or not hold.open:
            return
        hold.open = False
        self._close(hold.worker, reservation, hold.new_tokens, now_s)

    def _close(
        self, worker: WorkerKey, reservation: Reservation, new_tokens: int, now_s: float
    ) -> Source | None:
        """Frees a reservation's load on a worker. new_tokens: tokens of its prompt that are not
        computed yet. Returns the worker's source, if it is still known."""
        self.fleet.room += 1
        load, source = self.fleet.load(worker), self.fleet.view.sources.get(worker)
        prefixes, own_blocks = reservation.prefixes, reservation.own_blocks
        load.close(prefixes, own_blocks, now_s, new_tokens)
        if source is not None:
            self.fleet.pools.put_load(source.slot, load)
        return source

    def note_probe(self, key: WorkerKey, reservation_id: str, now_s: float) -> None:
        if key in self.fleet.outliers.probing:
            self.fleet.outliers.on_pick(key, reservation_id, now_s)


def _workers_of(reservation: Reservation) -> list[WorkerKey]:
    """The worker of a reservation, or both of a pair."""
    if reservation.prefill is None:
        return [reservation.worker]
    return [reservation.worker, reservation.prefill.worker]


def _blamed(reservation: Reservation, failed_worker_id: str) -> WorkerKey:
    """The worker by whose fault a request failed.

    Of a pair the worker that the caller names; else the prefill worker until the prompt is
    computed, then the decode worker.
    """
    if reservation.prefill is None:
        return reservation.worker
    halves = _workers_of(reservation)
    named = [key for key in halves if key.worker_id == failed_worker_id]
    if len(named) == 1:
        return named[0]
    return reservation.worker if reservation.prefill_done else reservation.prefill.worker
