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
from collections.abc import Callable
from math import nan

import numpy as np
import numpy.typing as npt

from events.facts import Heartbeat
from events.stream import StreamState
from events.view import FleetView, Source, schedulable
from indexer.identity import WorkerKey
from router.candidates import Candidates
from router.config import ModelSettings, RoutingSettings
from router.decision import (
    CacheReport,
    Decision,
    Overlap,
    Pick,
    Progress,
    ProgressResult,
    ProgressState,
    Repeated,
    Request,
    Role,
)
from router.load import WorkerLoad
from router.policies import POLICIES
from router.policies.policy import Policy, Scores
from router.prompt import Prompt
from router.refusals import Reason, Refusal
from router.reservations import Ending, Reservation, Reservations
from router.self_check import SelfCheck
from router.warnings import FleetWatch, WorkerWarning

MODELS_MAX = 10_000
"""Model names remembered after their last worker went."""
DRAINED_MAX = 10_000
OUTPUT_TOKENS_MAX = 4096
"""What a request is believed when it says how much output it expects."""
FULL_RETRY_S = 0.5
"""What RetryInfo says when all are full: about the time until something ends."""
_RECOVERING_TRUST = 0.5
"""Share of a recovering stream's overlap that counts: it was right until the gap."""
_DRAINED = "drained"
_TOO_LONG = "prompt too long"
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
        self.reservations = Reservations(routing.memory_window_s, routing.reservations_max)
        self.endings: Counter[Ending] = Counter()
        self.cache_reports: dict[WorkerKey, CacheReport] = {}
        self.self_check = SelfCheck(view)
        self.ready = True
        """False: part of the fleet may not have been heard yet, so that no model is unknown."""
        self.drained: dict[str, None] = {}
        """Worker ids that get nothing new."""
        self._names = {
            name: (one.name, *one.aliases) for one in models for name in (one.name, *one.aliases)
        }
        """Name of a configured model -> all its names, the canonical one first."""
        self._model_memory_s = model_memory_s
        self._tombstone_s = tombstone_s
        self._models_seen: dict[str, float] = {}
        self._rng = rng
        self._picks = 0
        self._ids = 0
        self._watch = FleetWatch(view, self.self_check, self._canonical)

    def route(
        self, request: Request, now_s: float, mark: Callable[[str], None] = _no_mark
    ) -> Pick | Repeated:
        """Picks and reserves; raises Refusal. mark is called with the name of each stage's end."""
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
                f"{len(self.reservations)} requests are in flight, the most this router keeps"
                " (routing.reservations_max)",
                FULL_RETRY_S,
            )
        decision = self.decide(request, now_s, mark)
        if not decision.order:
            raise self.refuse(decision)
        return Pick(self._reserve(request, decision, now_s), decision)

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
        pool = self._pool(request)
        not_live: list[tuple[Source, str]] = []
        live: list[Source] = []
        for source in pool:
            if reason := schedulable(source, self.view.mass_silence):
                not_live.append((source, reason))
            else:
                live.append(source)
        for size in {heartbeat_of(source).block_size for source in live}:
            request.prompt.prefixes(size)
        mark("hash")
        overlaps = self._overlaps(request.prompt, live)
        mark("match")
        rows = self._rows(request, live, overlaps)
        scores = policy.score(rows) if live else Scores(np.zeros(0))
        excluded = list(rows.excluded)
        for row in np.flatnonzero(rows.full()).tolist():
            excluded[row] = excluded[row] or _FULL
        for row in np.flatnonzero(~np.isfinite(scores.costs)).tolist():
            excluded[row] = excluded[row] or "cost is not a number"
        order, tied = self._order(scores.costs, excluded)
        mark("cost")
        return Decision(
            request, policy, rows, live, overlaps, scores, excluded, order, tied, not_live, now_s
        )

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
                changed |= self._prefill_done(reservation)
            case ProgressState.RUNNING:
                changed |= not reservation.running
                reservation.running = True
                if progress.output_tokens:  # so its prompt is computed, though nobody told
                    changed |= self._prefill_done(reservation)
        self.reservations.renew(reservation, now_s + self.routing.lease_s)
        return ProgressResult.APPLIED if changed else ProgressResult.UNCHANGED

    def on_heartbeat(self, key: WorkerKey, now_s: float) -> None:
        """A worker's heartbeat is in the view."""
        source = self.view.sources[key]
        heartbeat = heartbeat_of(source)
        for name in (heartbeat.model, *heartbeat.model_aliases, *heartbeat.lora_names):
            if name and (name in self._models_seen or len(self._models_seen) < MODELS_MAX):
                self._models_seen[name] = now_s
        if heartbeat.sampled_at_s is not None:
            # The age is by the relay's clock alone, so that a skew between hosts does no harm.
            age_s = max(0.0, heartbeat.sent_at_s - heartbeat.sampled_at_s)
            load = self._load(key)
            load.sample(heartbeat.running, heartbeat.waiting, heartbeat.used_blocks, now_s - age_s)

    def on_forgotten(self, workers: list[WorkerKey], now_s: float) -> None:
        """Workers that the view knows no more: what they had reserved ends."""
        for reservation in self.reservations.on_workers(workers):
            self._end(reservation, Ending.WORKER_LOST, now_s)
        for worker in workers:
            self.loads.pop(worker, None)
            self.cache_reports.pop(worker, None)
        self.self_check.on_forgotten(workers)

    def drain(self, worker_id: str) -> int:
        """No new picks of a worker. Returns its ranks."""
        if worker_id not in self.drained and len(self.drained) >= DRAINED_MAX:
            here = {key.worker_id for key in self.view.sources}
            away = (drained for drained in self.drained if drained not in here)
            del self.drained[next(away, next(iter(self.drained)))]
        self.drained[worker_id] = None
        return len(self.view.ranks(worker_id))

    def undrain(self, worker_id: str) -> int:
        """Takes a worker back in. Returns its ranks."""
        self.drained.pop(worker_id, None)
        return len(self.view.ranks(worker_id))

    def remove(self, worker_id: str, tombstone_s: float, now_s: float) -> int:
        """Forgets a worker, ignores it for a while (0: the configured time). Returns its ranks."""
        removed = self.view.remove(worker_id, now_s + (tombstone_s or self._tombstone_s))
        self.on_forgotten(removed, now_s)
        return len(removed)

    def tick(self, now_s: float) -> int:
        """Time went by. Returns the reservations that expired."""
        expired = self.reservations.expired(now_s)
        for reservation in expired:
            self._end(reservation, Ending.EXPIRED, now_s)
        self.reservations.forget_old(now_s)
        self._models_seen = {
            name: seen_s
            for name, seen_s in self._models_seen.items()
            if now_s - seen_s < self._model_memory_s
        }
        self._watch.on_tick(self.loads, now_s)
        return len(expired)

    def lora_of(self, model: str) -> str:
        """The LoRA that a request means by its model's name; empty when that is a whole model."""
        names = self._names.get(model, (model,))
        for source in self.view.sources.values():
            if source.heartbeat is not None and (loras := source.heartbeat.lora_names):
                for name in names:
                    if name in loras:
                        return name
        return ""

    def serves(self, source: Source, model: str) -> bool:
        """Whether a worker serves a model, by any of its names."""
        names = self._names.get(model, (model,))
        return source.heartbeat is not None and _serves(source.heartbeat, names)

    def warnings(self, source: Source, now_s: float) -> list[WorkerWarning]:
        """What an operator should mend about a worker."""
        return self._watch.warnings(source, now_s)

    def load_of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load; an idle one for a worker that nothing is known of."""
        return self.loads.get(key) or WorkerLoad()

    def excluded(self, source: Source) -> str:
        """Why a worker gets no requests at all; empty when it may."""
        if source.key.worker_id in self.drained:
            return _DRAINED
        return schedulable(source, self.view.mass_silence)

    def _policy(self, request: Request) -> Policy:
        name = request.policy or self.routing.policy
        if name != self.routing.policy and not self.routing.policy_per_request:
            raise Refusal(
                Reason.POLICY_NOT_ALLOWED,
                "requests may not choose a policy here (routing.policy_per_request)",
            )
        if (policy := POLICIES.get(name)) is None:
            raise Refusal(
                Reason.UNKNOWN_POLICY, f"unknown policy {name!r}; there are {', '.join(POLICIES)}"
            )
        return policy

    def _pool(self, request: Request) -> list[Source]:
        """Workers that serve the request's model, live or not; raises Refusal if there is none."""
        known = [one for one in self.view.sources.values() if one.heartbeat is not None]
        if not request.model:
            # One that has not told its model yet may serve any: it counts only if all are such.
            told = [source for source in known if heartbeat_of(source).model]
            models = set(map(self._canonical, {heartbeat_of(source).model for source in told}))
            if len(models) > 1:
                raise Refusal(
                    Reason.MODEL_REQUIRED,
                    f"this fleet serves {len(models)} models, so the request must name one:"
                    f" {', '.join(sorted(models)[:10])}",
                )
            pool = told or known
        else:
            names = self._names.get(request.model, (request.model,))
            pool = [source for source in known if _serves(heartbeat_of(source), names)]
        if pool:
            return pool
        if not self.view.sources and not self._models_seen:
            raise Refusal(Reason.NO_WORKER, "no worker has been heard of yet")
        if request.model in self._names or request.model in self._models_seen:
            raise Refusal(Reason.NO_WORKER, f"no worker serves {request.model!r} at the moment")
        if not known:
            raise Refusal(Reason.NO_WORKER, "no worker that is there has said what it serves yet")
        if not self.ready:
            raise Refusal(
                Reason.NO_WORKER,
                f"no worker that was heard so far serves {request.model!r}; the router has just"
                " started",
            )
        served = sorted({heartbeat_of(source).model for source in known})
        raise Refusal(
            Reason.UNKNOWN_MODEL,
            f"unknown model {request.model!r}; served here: {', '.join(served[:10]) or 'none'}",
        )

    def _canonical(self, model: str) -> str:
        return self._names.get(model, (model,))[0]

    def _overlaps(self, prompt: Prompt, live: list[Source]) -> list[Overlap]:
        """What each worker holds of the prompt; one match for each distinct block size."""
        sizes = [heartbeat_of(source).block_size for source in live]
        slots = np.array([source.slot for source in live], np.intp)
        columns = np.zeros((len(live), len(Overlap._fields)), np.int64)
        for size in set(sizes) - {0}:  # 0: a worker that has not told its size yet
            hashes = prompt.prefixes(size)
            # The engine recomputes the last block of a fully cached prompt.
            cap = (prompt.token_count - 1) // size
            whole = capped = self.view.index.match(hashes)
            raw = whole.run()
            if cap < len(hashes) and raw.any() and int(raw.max()) > cap:
                capped = self.view.index.match(hashes[:cap])
            rows = np.flatnonzero(np.array(sizes) == size)
            columns[rows, 0] = raw[slots[rows]] * size
            columns[rows, 2:] = capped.blocks.T[slots[rows]] * size
        columns[:, 1] = columns[:, 2:].sum(axis=1)
        return list(map(Overlap._make, columns.tolist()))

    def _rows(self, request: Request, live: list[Source], overlaps: list[Overlap]) -> Candidates:
        prompt_tokens = request.prompt.token_count
        heartbeats = [heartbeat_of(source) for source in live]
        loads = [self._load(source.key) for source in live]
        trust = _column([self._trust(source) for source in live])
        overlap = trust * _column([one.usable for one in overlaps])
        return Candidates(
            workers=tuple([source.key for source in live]),
            prompt_tokens=prompt_tokens,
            block_size=_column([one.block_size for one in heartbeats]),
            overlap_tokens=overlap,
            trust=trust,
            new_tokens=prompt_tokens - overlap,
            active_blocks=_column([load.active_blocks() for load in loads]),
            total_blocks=_column([one.total_blocks or nan for one in heartbeats]),
            running=_column([load.running for load in loads]),
            waiting=_column([load.waiting for load in loads]),
            reserved=_column([load.reserved() for load in loads]),
            total_slots=_column([one.total_slots or nan for one in heartbeats]),
            prefill_tokens_active=_column([load.prefill_tokens for load in loads]),
            last_picked=_column([load.last_picked for load in loads]),
            excluded=tuple([self._ineligible(request, source) for source in live]),
        )

    def _trust(self, source: Source) -> float:
        """Share of a worker's overlap that counts."""
        match source.stream.state:
            case StreamState.LIVE:
                return 1.0
            case StreamState.RECOVERING:
                return _RECOVERING_TRUST
            case StreamState.SUSPECT | StreamState.SILENT:
                return 0.0

    def _ineligible(self, request: Request, source: Source) -> str:
        """Why this request can't go to a live worker; empty when it can."""
        heartbeat = heartbeat_of(source)
        worker_id = source.key.worker_id
        prompt = request.prompt
        if worker_id in self.drained:
            return _DRAINED
        if worker_id in request.excluded_workers:
            return "excluded by the request"
        if request.allowed_workers and worker_id not in request.allowed_workers:
            return "not among the allowed"
        if heartbeat.role not in (request.role, Role.BOTH):
            return f"role is {heartbeat.role}"
        for name, value in request.required_labels.items():
            if heartbeat.labels.get(name) != value:
                return "labels differ"
        loras = heartbeat.lora_names  # an engine that lists none may load them as they come
        if prompt.lora_name and loras and prompt.lora_name not in loras:
            return "LoRA not loaded"
        if self._too_long(request, heartbeat):
            return _TOO_LONG
        if prompt.hashes_block_size and prompt.hashes_block_size != heartbeat.block_size:
            return "block size differs"
        return ""

    def _too_long(self, request: Request, heartbeat: Heartbeat) -> bool:
        """Whether prompt and expected output go beyond what the engine takes."""
        if not heartbeat.max_model_len:
            return False
        output_tokens = request.expected_output_tokens
        if output_tokens is None:
            output_tokens = self.routing.expected_output_tokens
        output_tokens = min(output_tokens, OUTPUT_TOKENS_MAX)
        return request.prompt.token_count + output_tokens > heartbeat.max_model_len

    def _order(self, costs: npt.NDArray[np.float64], excluded: list[str]) -> tuple[list[int], int]:
        """The pick and the rows next to it, cheapest first; and how many tie for the pick.

        Rows that tie take turns from a random one on, so that no second choice is everybody's.
        """
        rows = np.flatnonzero(np.array([not reason for reason in excluded], np.bool_))
        if not len(rows):
            return [], 0
        open_costs = costs[rows]
        tied = rows[open_costs == open_costs.min()].tolist()
        wanted = 1 + max(1, self.routing.alternatives)  # a receipt names the runner-up
        first = self._rng.randrange(len(tied)) if len(tied) > 1 else 0
        order = [*tied[first:], *tied[:first]][:wanted]
        if len(order) < wanted:
            cheapest = rows[np.argsort(open_costs, kind="stable")[:wanted]].tolist()
            order += cheapest[len(tied) :]
        return order, len(tied)

    def refuse(self, decision: Decision) -> Refusal:
        """Why nobody in a pool can be picked."""
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
            if reason == _TOO_LONG:
                too_short.append(heartbeat_of(source).max_model_len)
            elif reason == _DRAINED:
                may_come_back.append(source)
        if too_short and all(
            self._too_long(decision.request, heartbeat_of(one)) for one in may_come_back
        ):
            return Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {decision.rows.prompt_tokens} tokens and fits no worker with what"
                f" it is expected to bring out; the longest takes {max(too_short)}",
            )
        return Refusal(Reason.NO_ELIGIBLE_WORKER, f"no worker may take this request: {told}")

    def withdraw(self, reservation: Reservation, now_s: float) -> None:
        """Ends a reservation whose answer could not be given."""
        if reservation.ended is None:
            self._end(reservation, Ending.FAILED_UNKNOWN, now_s)

    def _reserve(self, request: Request, decision: Decision, now_s: float) -> Reservation:
        row = decision.order[0]
        source = decision.sources[row]
        overlap = decision.overlaps[row]
        prompt = request.prompt
        size = heartbeat_of(source).block_size
        prefixes = prompt.prefixes(size)
        self._ids += 1
        self._picks += 1
        reservation = Reservation(
            id=f"{self.replica}-{self._ids}",
            request_id=request.request_id,
            worker=source.key,
            fingerprint=request.fingerprint(),
            prefixes=prefixes,
            has_tail=not size or prompt.token_count % size > 0,
            prompt_tokens=prompt.token_count,
            predicted_tokens=overlap.told,
            new_tokens=prompt.token_count - overlap.usable,
            opened_at_s=now_s,
            lease_ends_s=now_s + self.routing.lease_s,
            answer=None,
        )
        load = self._load(source.key)
        load.open(prefixes, reservation.has_tail, reservation.new_tokens, now_s)
        load.last_picked = self._picks
        if size:
            # What it holds on from there, too: the index knows, and predicts only the rest.
            self.view.predict(source, prefixes[overlap.told // size :], now_s)
        self.reservations.add(reservation)
        return reservation

    def _learn(self, reservation: Reservation, progress: Progress, now_s: float) -> bool:
        """Takes over what a step tells of counts, once."""
        changed = progress.output_tokens > reservation.output_tokens
        if changed:
            reservation.output_tokens = progress.output_tokens
        if progress.cached_tokens is not None and reservation.cached_tokens is None:
            reservation.cached_tokens = min(progress.cached_tokens, reservation.prompt_tokens)
            changed = True
            if reservation.worker in self.view.sources:
                known = self.cache_reports.setdefault(reservation.worker, CacheReport())
                known.predicted += reservation.predicted_tokens
                known.reported += reservation.cached_tokens
                self.self_check.on_report(reservation, reservation.cached_tokens, now_s)
        return changed

    def _prefill_done(self, reservation: Reservation) -> bool:
        if reservation.prefill_done:
            return False
        reservation.prefill_done = True
        self._load(reservation.worker).prefill_done(reservation.new_tokens)
        return True

    def _end(self, reservation: Reservation, ending: Ending, now_s: float) -> None:
        self._prefill_done(reservation)
        load = self._load(reservation.worker)
        load.close(reservation.prefixes, reservation.has_tail, now_s)
        self.reservations.end(reservation, ending, now_s)
        self.endings[ending] += 1

    def _load(self, key: WorkerKey) -> WorkerLoad:
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = WorkerLoad()
        return load


def heartbeat_of(source: Source) -> Heartbeat:
    """The heartbeat of a source that is known to have one."""
    if source.heartbeat is None:
        raise AssertionError(f"{source.key} has no heartbeat")
    return source.heartbeat


def _serves(heartbeat: Heartbeat, names: tuple[str, ...]) -> bool:
    return heartbeat.model in names or any(
        name in heartbeat.model_aliases or name in heartbeat.lora_names for name in names
    )


def _column(values: list[float]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)
