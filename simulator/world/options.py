"""The options of a virtual run: fleet, router, network, and faults.

Names have units; RunOptions checks bounds, so that no run starts with a meaningless number.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from events.feed.fleet_view import PREDICTED_TTL_S
from router.config.own_functions import is_own
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import RoutingSettings
from router.decide.policies.configured import configured
from router.decide.policies.policy import Policy
from router.request.request import Role
from simulator.engines.cost_model import Distance, NoLink, SlowedCost
from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers import SCHEDULERS

WORKERS_MAX = 4096
REPLICAS_MAX = 64
SHADOWS_MAX = 16

SCHEDULER = SchedulerConfig(block_count=16_384, block_size=64, joined_steps_max=10_000)

EventForm = Literal["facts", "engine", "none"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine dies, with all its requests and its cache, and starts again empty."""

    at_s: float
    worker: int
    """Index of the engine."""
    down_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RelayRestart:
    """An engine's relay ends and starts again; the engine keeps running."""

    at_s: float
    worker: int
    down_s: float = 5.0
    keeps_map: bool = False
    """Whether the new relay has the engine's blocks; else its stream is partial."""


@dataclass(frozen=True, slots=True)
class RouterRestart:
    """A router ends, with all its state, and a new process takes its place at once."""

    at_s: float
    router: int = 0
    """Index of the replica."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Disaggregated prefill: the first engines compute prompts, the others fetch a prompt's KV
    cache and decode."""

    prefill_workers: int
    picks: Literal["pair", "each"] = "pair"
    """pair: one request to the router, for both workers. each: another request, for the decode
    worker, when the prompt is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run. Raises ValueError for options that can't be run."""

    policy: str = "dynamo-adaptive"
    seed: int = 0

    workers: int = 8
    """Engines."""
    ranks: int = 1
    """Ranks of each engine; every rank is a worker."""
    engine: str = "vllm"
    """A name of simulator.schedulers.SCHEDULERS."""
    scheduler: SchedulerConfig = SCHEDULER
    models: tuple[str, ...] = ()
    """Models that every engine serves beside its own. A run adds the models of its trace, and the
    trace's LoRAs to the scheduler's."""
    models_apart: bool = False
    """Whether each engine serves only one of `models`, in turn."""
    slow_workers: int = 0
    """Number of engines, the first, that need `slow_factor` times as long for each step."""
    slow_factor: float = 2.0

    disaggregation: Disaggregation | None = None
    engines_per_host: int = 1
    hosts_per_rack: int = 8
    """Hosts in a rack; all racks are in one cluster."""

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    """Routing settings; `policy` replaces their policy."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    """Settings of a router's queue, for requests that wait for a worker with room."""
    replicas: int = 1
    """Routers, each with a view of its own."""
    spread: Literal["round_robin", "random"] = "round_robin"
    """The replica of each request: in turn, or random."""
    hot_prefixes: bool = False
    """Whether hot prefixes are copied between engines."""
    inflight: bool = True
    """Whether replicas send each other their reserved load."""
    output_hint: bool = False
    """Whether requests have expected_output_tokens."""
    shadows: tuple[str, ...] = ()
    """Shadow policies, which only score the same requests."""

    events: EventForm = "facts"
    """How engines' events reach the relays. facts: as facts. engine: as vLLM's bytes, read by the
    real relay's code, with token ids; slow, for tests. none: workers publish no events."""
    event_delay_s: float = 0.005
    """Seconds from a step's end to the router's index, on average."""
    event_jitter_s: float = 0.0
    """The delay of a message is uniform in event_delay_s +- event_jitter_s; a worker's messages
    stay in order."""
    event_loss: float = 0.0
    """Share of the relays' messages that a replica never gets."""
    predicted_ttl_s: float = PREDICTED_TTL_S
    """Seconds for which the blocks of a pick count as cached before events confirm them; 0: not at
    all, as at Dynamo's router."""
    approximate_workers: int = 0
    """Number of engines, the first, that publish no events."""
    tells_capacity: bool = True
    """Whether heartbeats have total_blocks and total_slots. No policy picks a full worker; a worker
    of unknown capacity never counts as full."""

    tells_slots: bool = True
    """Whether heartbeats with total_blocks have total_slots, too; those of vLLM's relays have
    not."""

    failures: tuple[Failure, ...] = ()
    relay_restarts: tuple[RelayRestart, ...] = ()
    router_restarts: tuple[RouterRestart, ...] = ()
    past_router_share: float = 0.0
    """Share of the requests that go to a random worker, past the router."""

    patience_s: float = 60.0
    """Seconds for which a refused client tries again."""
    resends_max: int = 3
    """Times that a request is sent again after its worker died."""

    check: bool = False
    """Whether the laws of conservation are checked during the run: slow."""

    def policies(self) -> dict[str, Policy]:
        """The policies that the run can use, by name, with its options' own functions
        (module:function). Raises ConfigError."""
        own = filter(is_own, (*self.routing.own_policies, self.policy, *self.shadows))
        return configured(msgspec.structs.replace(self.routing, own_policies=tuple(own)))

    def __post_init__(self) -> None:
        known = self.policies()
        for name in (self.policy, *self.shadows):
            if name not in known:
                raise ValueError(f"unknown policy {name!r}; there are {', '.join(known)}")
        if self.engine not in SCHEDULERS:
            raise ValueError(f"unknown engine {self.engine!r}; there are {', '.join(SCHEDULERS)}")
        _between("workers", self.workers, 1, WORKERS_MAX)
        _between("ranks", self.ranks, 1, 64)
        if self.disaggregation is not None:
            prefill = self.disaggregation.prefill_workers
            _between("Disaggregation.prefill_workers", prefill, 1, self.workers - 1)
        _between("engines_per_host", self.engines_per_host, 1, WORKERS_MAX)
        _between("hosts_per_rack", self.hosts_per_rack, 1, WORKERS_MAX)
        _between("slow_workers", self.slow_workers, 0, self.workers)
        _between("slow_factor", self.slow_factor, 0.01, 100.0)
        _between("replicas", self.replicas, 1, REPLICAS_MAX)
        _between("shadows", len(self.shadows), 0, SHADOWS_MAX)
        _between("event_delay_s", self.event_delay_s, 0.0, 60.0)
        _between("event_jitter_s", self.event_jitter_s, 0.0, self.event_delay_s)
        _between("event_loss", self.event_loss, 0.0, 0.9)
        _between("approximate_workers", self.approximate_workers, 0, self.workers)
        _between("past_router_share", self.past_router_share, 0.0, 1.0)
        _between("patience_s", self.patience_s, 0.0, 3600.0)
        _between("resends_max", self.resends_max, 0, 100)
        if self.hot_prefixes and self.events == "engine":
            raise ValueError(
                "hot_prefixes and events 'engine' exclude each other: copies have no token ids"
            )
        if self.hot_prefixes or self.disaggregation is not None:
            self._check_links()
        if self.events == "engine" and (self.failures or self.relay_restarts or self.ranks > 1):
            raise ValueError("events 'engine' need one rank, and no failures and relay_restarts")
        troubles: tuple[Failure | RelayRestart, ...] = (*self.failures, *self.relay_restarts)
        for trouble in troubles:
            name = type(trouble).__name__
            _between(f"{name}.worker", trouble.worker, 0, self.workers - 1)
            _between(f"{name}.at_s", trouble.at_s, 0.0, 1e9)
            _between(f"{name}.down_s", trouble.down_s, 0.0, 1e9)
        for restart in self.router_restarts:
            _between("RouterRestart.router", restart.router, 0, self.replicas - 1)
            _between("RouterRestart.at_s", restart.at_s, 0.0, 1e9)

    @property
    def cache_blocks(self) -> int:
        """KV blocks of all engines that compute prompts, host caches left out."""
        apart = self.disaggregation
        engines = self.workers if apart is None else apart.prefill_workers
        return engines * self.ranks * self.scheduler.block_count

    def role_of(self, engine: int) -> Role:
        """The role of an engine."""
        if self.disaggregation is None:
            return Role.BOTH
        return Role.PREFILL if engine < self.disaggregation.prefill_workers else Role.DECODE

    def scheduler_of(self, engine: int) -> SchedulerConfig:
        """The configuration of an engine's scheduler, slowed for one of the slow_workers."""
        if engine >= self.slow_workers:
            return self.scheduler
        cost = SlowedCost(self.scheduler.cost, self.slow_factor)
        return replace(self.scheduler, cost=cost)

    def models_of(self, engine: int) -> tuple[str, ...]:
        """Models that an engine serves beside its own."""
        if not self.models_apart or not self.models:
            return self.models
        return (self.models[engine % len(self.models)],)

    def _check_links(self) -> None:
        """Raises ValueError unless the cost model has links between all engines."""
        try:
            for distance in Distance:
                self.scheduler.cost.transfer_s(1, distance)
        except NoLink as error:
            raise ValueError(f"KV cache that engines send to others: {error}") from None


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least:g} and {most:g}, got {value:g}")
