"""The state of the fleet as one replica knows it: workers, loads, models, rates, sessions. Pure.

`Fleet` owns these tables and answers questions about them; RouterCore (router/decide/core/core.py)
is the one that changes them. Other modules only read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from events.feed.fleet_view import FleetView, Source
from events.feed.replicas import Replicas
from indexer.identity import WorkerKey
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import RoutingSettings
from router.fleet.answers import Answers
from router.fleet.eligibility import DRAINED
from router.fleet.health.capacity import Capacities
from router.fleet.health.first_tokens import FirstTokens
from router.fleet.health.outliers import Outliers
from router.fleet.health.self_check import SelfCheck
from router.fleet.health.warnings import FleetWatch, WarningCode, WorkerWarning
from router.fleet.models import Models
from router.fleet.observed import Observed
from router.fleet.on_demand import Further
from router.fleet.pools import Pool, Pools, heartbeat_of
from router.fleet.rates import PRIOR_RATE, PrefillRates
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.reservations import Ending
from router.fleet.reservations.sessions import Sessions
from router.fleet.shared_prefixes import SharedPrefixes
from router.fleet.tenants import Tenants
from router.fleet.token_times import TokenTimes
from router.fleet.working_set import WorkingSets
from router.request.refusal import Refusal
from router.request.request import Role

Trouble = Callable[[Source, str], str]
"""Function of a worker and the first name of its model (empty: not known yet) that returns what is
wrong with the worker, as a sentence; empty: nothing is."""
Troubles = Mapping[WarningCode, Trouble]
OBSERVED_S = 60.0
"""Seconds after an observed request for which newly stored blocks are remembered for the next."""
IGNORED_MAX = 64
"""Models for which a worker that ignores priorities is remembered; further ones have no warning."""
_NO_OUTCOMES: Mapping[Ending, int] = MappingProxyType({})


@dataclass(slots=True)
class CacheReport:
    """Sums of predicted and of reported cached tokens of one worker."""

    prompt: int = 0
    """Prompt tokens of the requests that were reported."""
    predicted: int = 0
    reported: int = 0


class Fleet:
    """Everything that one replica knows of its workers."""

    def __init__(
        self,
        view: FleetView,
        routing: RoutingSettings,
        *,
        models: tuple[ModelSettings, ...] = (),
        replica: str = "",
        troubles: Troubles | None = None,
        prefill_rate: float = PRIOR_RATE,
    ) -> None:
        """troubles: code of a warning -> its function, for warnings besides the fleet's own.
        prefill_rate: tokens a second of workers before any was measured.
        """
        self.view = view
        self.loads: dict[WorkerKey, WorkerLoad] = {}
        self.room = 0
        """Number of changes that may have given a worker room, or let it take other requests: a
        waiting request that was tried is tried again only when the number has grown."""
        self.loads_changed = 0
        """Number of times that a worker came into `loads` or left it."""
        self.replicas = Replicas(replica)
        """The load that other replicas have reserved."""
        self.outcomes: dict[WorkerKey, Counter[Ending]] = {}
        """Worker -> number of requests by their ending. A request that a pair served counts for
        both halves, one that failed for the half that failed."""
        self.outliers = Outliers(
            routing.outliers.enabled,
            group=self._group_of,
            sampled_at_s=self._answered_at_s,
            on_change=lambda key: self.pools.on_ejected(key),
        )
        self.first_tokens = FirstTokens()
        self.tenants = Tenants()
        self.answers = Answers()
        self.observed = Observed()
        """Requests that another router serves."""
        self.cache_reports: dict[WorkerKey, CacheReport] = {}
        self.self_check = SelfCheck(view)
        self.ignored_priorities: dict[str, WorkerKey] = {}
        """Model -> the first worker that got a request with a priority, though its engine schedules
        by none. That may be intended, so this worker alone has a warning."""
        self.ready = True
        """False: some workers' heartbeats may not have come yet, so no model counts as unknown."""
        self.drained: dict[str, None] = {}
        """Ids of the workers that get no new requests."""
        self.drains = 0
        """Number of changes of `drained`."""
        self.models = Models(models)
        self.capacities = Capacities(routing.capacity, lambda: self.pools.on_capacities())
        self.token_times = TokenTimes()
        self.pools = Pools(
            view,
            self.models,
            self.load_of,
            self.capacities,
            self.token_times,
            self.outliers.reason,
            self._on_moved,
        )
        self.rates = PrefillRates(prefill_rate)
        self.sessions = Sessions(routing.session_ttl_s)
        self.working_sets = WorkingSets()
        self.shared_prefixes = SharedPrefixes()
        self.further = Further(
            self.loads, self.rates, self.sessions, self.working_sets, self.shared_prefixes
        )
        self._troubles = troubles or {}
        self._watch = FleetWatch(view, self.self_check, lambda name: self.models.names(name)[0])

    def put_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Writes a worker's load into the pools' columns, if the worker is still known."""
        if (source := self.view.sources.get(key)) is not None:
            self.pools.put_load(source.slot, load)

    def reconfigure(self, routing: RoutingSettings) -> None:
        """Puts other settings of outlier detection and capacity in force."""
        self.outliers.reconfigure(routing.outliers.enabled)
        self.capacities.reconfigure(routing.capacity)
        self.pools.on_capacities()

    def _on_moved(self, key: WorkerKey, slot: int) -> None:
        """Called when a worker has another slot in the index: its columns move there."""
        self.rates.on_moved(key, slot)
        self.working_sets.on_moved(key, slot)

    def forget(self, workers: list[WorkerKey]) -> None:
        """Forgets all that is known of workers which left the fleet view."""
        for worker in workers:
            self.loads_changed += self.loads.pop(worker, None) is not None
            self.cache_reports.pop(worker, None)
            self.outcomes.pop(worker, None)
            self.outliers.forget(worker)
            self.first_tokens.forget(worker)
        self.capacities.on_forgotten(workers)
        self.self_check.on_forgotten(workers)
        for model, worker in list(self.ignored_priorities.items()):
            if worker in workers:
                del self.ignored_priorities[model]
        self.rates.on_forgotten(workers)
        self.observed.forget(workers)
        self.token_times.on_forgotten(workers)
        self.working_sets.on_forgotten(workers)

    def tick(self, now_s: float) -> None:
        """Does what is due by time: forgets what is old, and checks every worker."""
        self._look_for_hangs(now_s)
        self.outliers.tick(now_s)
        self.rates.tick()
        self.token_times.tick(self.load_of, now_s)
        self.working_sets.tick(now_s)
        if now_s - self.observed.at_s > OBSERVED_S:
            self.view.newest = None
        self.pools.refresh()
        self._watch.on_tick(self.loads, now_s)

    def _look_for_hangs(self, now_s: float) -> None:
        """Reports workers whose first tokens are far later than predicted to `outliers`."""
        outliers, bounds = self.outliers, self.outliers.bounds
        if not outliers.enabled or not self.first_tokens.may_judge():
            return
        for key, load in self.loads.items():
            standing = outliers.standing(key)
            if standing is None:
                owes = load.prefills >= bounds.hang_requests
                last_s = outliers.served_s(key)
                owed_s = self.first_tokens.owed_for_s(key, owes, last_s, now_s)
            else:  # old requests may hang there for ever; only its probes count now
                self.first_tokens.forget(key)
                owed_s = now_s - min(standing.probes.values(), default=now_s)
            if owed_s <= bounds.hang_s or (source := self.view.sources.get(key)) is None:
                continue
            rate = self.rates.rate(key, heartbeat_of(source).model)
            predicted_s = max(self.first_tokens.mean_s, load.prefill_tokens_active / rate)
            if owed_s > bounds.hang_s + bounds.hang_factor * predicted_s:
                outliers.on_overdue(key, now_s)

    def lora_of(self, model: str) -> str:
        """LoRA that a request means by its model's name; empty when that is the name of a model."""
        self.pools.refresh()
        return self.pools.lora_of(model)

    def block_sizes(self, model: str) -> Collection[int]:
        """Block sizes of a model's workers, in tokens; raises Refusal if no worker serves it."""
        self.pools.refresh()
        pool, _ = self.pools.live(model, self.ready)
        return pool.block_sizes

    def pool(self, model: str) -> Pool | None:
        """The workers of a model that are up; None: no worker serves it."""
        self.pools.refresh()
        try:
            return self.pools.live(model, self.ready)[0]
        except Refusal:
            return None

    def base_model(self, model: str) -> str:
        """First name of the model that all workers with a name, such as a LoRA's, serve; the name
        itself where they serve several models, or where no worker serves it."""
        pool = self.pool(model)
        if pool is None or pool.only_model is None:
            return model
        return self.models.names(pool.only_model)[0]

    def has_room(self, model: str) -> bool:
        """Whether any worker of a model has room; True, too, where no worker serves it, so that a
        decision refuses the request."""
        pool = self.pool(model)
        return pool is None or self.pools.has_room(pool)

    def may_serve(self, model: str) -> bool:
        """Whether any worker of a model has room, or is full only by what was learned of its
        capacity; True, too, where no worker serves it."""
        pool = self.pool(model)
        return pool is None or self.pools.has_room(pool) or self.pools.has_over_estimate(pool)

    def free(self, model: str, role: Role) -> int:
        """Requests that a model's workers of a role have room for (Pools.free); of a pair, the
        smaller number of its halves."""
        pool = self.pool(model)
        if pool is None:
            return 0
        if pool.roles <= {Role.BOTH}:
            return self.pools.free(pool, None)
        halves = (Role.PREFILL, Role.DECODE) if role is Role.PAIR else (role,)
        return min(
            self.pools.free(pool, np.isin(pool.role_names, (half, Role.BOTH))) for half in halves
        )

    def fill(self, model: str) -> float:
        """The share of a model's slots, or of its KV blocks if that is more, that is taken: 0 to 1
        and beyond. Only workers count whose totals are known, or estimated."""
        pool = self.pool(model)
        return 0.0 if pool is None else self.pools.fill(pool)

    def serves(self, source: Source, model: str) -> bool:
        """Whether a worker serves a model, by any of its names."""
        return source.heartbeat is not None and self.models.serves(source.heartbeat, model)

    def warnings(self, source: Source, now_s: float) -> list[WorkerWarning]:
        """A worker's faults that an operator should mend."""
        warnings = self._watch.warnings(source, now_s)
        model = self._model_of(source)
        for code, trouble_of in self._troubles.items():
            if trouble := trouble_of(source, model):
                warnings.append(WorkerWarning(code, trouble))
        if trouble := self._priority_trouble(source):
            warnings.append(WorkerWarning(WarningCode.PRIORITY_IGNORED, trouble))
        return warnings

    def _model_of(self, source: Source) -> str:
        """The first name of a worker's model; empty: it is not known yet."""
        return "" if source.heartbeat is None else self.models.names(source.heartbeat.model)[0]

    def note_priority(self, source: Source) -> None:
        """Records that a worker got a request with a priority, which its engine may ignore."""
        heartbeat = heartbeat_of(source)
        if not heartbeat.priority_scheduling and len(self.ignored_priorities) < IGNORED_MAX:
            model = self.models.names(heartbeat.model)[0]
            self.ignored_priorities.setdefault(model, source.key)

    def _priority_trouble(self, source: Source) -> str:
        """Sentence of a warning for the worker that `ignored_priorities` has for its model; empty
        for all others."""
        heartbeat = source.heartbeat
        if heartbeat is None or heartbeat.priority_scheduling:
            return ""
        model = self.models.names(heartbeat.model)[0]
        if self.ignored_priorities.get(model) != source.key:
            return ""
        return (
            f"requests for {model!r} have a priority, but its engine schedules by none: the"
            " priority counts in this router's queue alone. If it should count in the engine, too:"
            " vLLM --scheduling-policy priority and priority_scheduling: true of the worker, or"
            " SGLang --enable-priority-scheduling"
        )

    def load_of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load, to read; that of an idle worker where nothing is known."""
        return self.loads.get(key) or WorkerLoad()

    def outcomes_of(self, key: WorkerKey) -> Mapping[Ending, int]:
        """How requests that this router sent to a worker ended: their numbers, by ending."""
        return self.outcomes.get(key, _NO_OUTCOMES)

    def cache_report_of(self, key: WorkerKey) -> CacheReport:
        """Predicted and reported cached tokens of a worker; zeros before the first report."""
        return self.cache_reports.get(key) or CacheReport()

    def excluded(self, source: Source) -> str:
        """Why a worker gets no requests; empty when it may get some.

        A worker of the last resort gets requests once no other of its model and role answers.
        """
        if source.key.worker_id in self.drained:
            return DRAINED
        reason = self.pools.kept_out(source)
        if reason and self.pools.may_be_last(source) and self._no_other(source):
            return ""
        return reason

    def last_resort(self, source: Source) -> bool:
        """Whether a worker is a last resort, picked only where no other worker may be."""
        return bool(self.pools.kept_out(source)) and self.pools.may_be_last(source)

    def _no_other(self, source: Source) -> bool:
        """Whether no worker of the same model and role is up and not drained."""
        self.pools.refresh()
        up = self.pools.up(source)
        return all(key.worker_id in self.drained for key in up) if self.drained else not up

    def load(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load, which the caller may change."""
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = WorkerLoad()
            self.loads_changed += 1
        return load

    def _answered_at_s(self, key: WorkerKey) -> float | None:
        """When an engine last answered its relay, by our clock; None: its relay took no sample.

        The delay of a heartbeat, as in a flood of messages, does not make this time later: else a
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

    def count(self, key: WorkerKey, ending: Ending) -> None:
        """Counts how a request ended at a worker, if the worker is still known."""
        counts = self.outcomes.get(key)
        if counts is None:
            if key not in self.view.sources:
                return
            counts = self.outcomes[key] = Counter()
        counts[ending] += 1
