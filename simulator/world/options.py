"""What a virtual run is asked for: fleet, router, traffic's way to it, and what goes wrong.

Every field has a unit and a check, so that a run never starts with a number that means nothing.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from router.config.queue_settings import QueueSettings
from router.config.settings import RoutingSettings
from router.policies.configured import configured
from router.request.request import Role
from simulator.engines.cost_model import Distance, NoLink, SlowedCost
from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers import SCHEDULERS

WORKERS_MAX = 4096
REPLICAS_MAX = 64
SHADOWS_MAX = 16

EventForm = Literal["facts", "engine", "none"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine dies at once, with all its requests and its cache, and comes back empty."""

    at_s: float
    worker: int
    """Index of the engine."""
    down_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RelayRestart:
    """An engine's relay ends and starts again; the engine goes on."""

    at_s: float
    worker: int
    down_s: float = 5.0
    keeps_map: bool = False
    """Whether the new life knows what the engine holds; else its stream is partial."""


@dataclass(frozen=True, slots=True)
class RouterRestart:
    """A router ends, with all it knows, and another takes its place at once."""

    at_s: float
    router: int = 0
    """Index of the replica."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill and decode apart: the first engines compute prompts, the others fetch the KV cache of
    a prompt and bring out the answer."""

    prefill_workers: int
    picks: Literal["pair", "each"] = "pair"
    """pair: a router is asked once, for both. each: for who decodes when the prompt is computed."""


def default_scheduler() -> SchedulerConfig:
    """16,384 blocks of 64 tokens."""
    return SchedulerConfig(block_count=16_384, block_size=64, joined_steps_max=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One run. Raises ValueError for what can't be run."""

    policy: str = "dynamo-adaptive"
    order: str = "fcfs"
    """Of the router's queue; "fcfs" is also what having none amounts to."""
    seed: int = 0

    workers: int = 8
    """Engines."""
    ranks: int = 1
    """Of each engine; every one is a worker of its own."""
    engine: str = "vllm"
    """A name of simulator.schedulers.SCHEDULERS."""
    scheduler: SchedulerConfig = field(default_factory=default_scheduler)
    models: tuple[str, ...] = ()
    """Names that every engine serves beside its own. A run adds those that its trace names, as it
    adds the trace's LoRAs to the scheduler's."""
    models_apart: bool = False
    """Each engine serves only one of `models`, by turns."""
    slow_workers: int = 0
    """The first so many engines need `slow_factor` times as long for each step."""
    slow_factor: float = 2.0

    disaggregation: Disaggregation | None = None
    engines_per_host: int = 1
    hosts_per_rack: int = 8
    """Racks are of one cluster."""

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    """Its policy is `policy`."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    """Of requests that wait at a router for a worker with room."""
    replicas: int = 1
    """Routers, each with a view of its own."""
    spread: Literal["round_robin", "random"] = "round_robin"
    """How requests choose a replica."""
    hot_prefixes: bool = False
    """Whether prefixes that many ask for are copied from engine to engine; the numbers are those of
    routing.hot_prefixes."""
    inflight: bool = True
    """Whether replicas tell one another what they have reserved."""
    output_hint: bool = False
    """Whether requests tell the router how much output they will bring."""
    shadows: tuple[str, ...] = ()
    """Policies that score the same requests and never act."""

    events: EventForm = "facts"
    """facts: what a relay would tell, directly. engine: the engine's own bytes through the relay's
    code, token ids and all; slow, for tests. none: workers that publish nothing."""
    event_delay_s: float = 0.005
    """From a step's end to the router's index, on average."""
    event_jitter_s: float = 0.0
    """The delay is uniform in delay +- jitter; one worker's messages stay in order."""
    event_loss: float = 0.0
    """Share of the relays' messages that a replica never gets."""
    approximate_workers: int = 0
    """The first so many engines publish no events."""
    tells_capacity: bool = True
    """Whether heartbeats say how many blocks and slots there are. A router takes no worker that is
    full, by any policy; one of unknown capacity never counts as full."""

    tells_slots: bool = True
    """Whether heartbeats say how many slots there are, as vLLM's own don't; only where they say how
    many blocks."""

    failures: tuple[Failure, ...] = ()
    relay_restarts: tuple[RelayRestart, ...] = ()
    router_restarts: tuple[RouterRestart, ...] = ()
    past_router_share: float = 0.0
    """Share of the requests that go to a random worker without asking the router."""

    patience_s: float = 60.0
    """A client that is refused tries again for so long."""
    resends_max: int = 3
    """How often a request that died with its worker is sent again."""

    check: bool = False
    """Whether the laws of conservation are checked, all the time: slow."""

    def __post_init__(self) -> None:
        known = configured(self.routing)
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
            raise ValueError("copies of hot prefixes carry names of blocks, and no token ids")
        if self.hot_prefixes:
            self._check_links()
        if self.events == "engine" and (self.failures or self.relay_restarts or self.ranks > 1):
            raise ValueError("events in the engine's own bytes: one rank, and no restarts")
        troubles: tuple[Failure | RelayRestart, ...] = (*self.failures, *self.relay_restarts)
        for trouble in troubles:
            name = type(trouble).__name__
            _between(f"{name}.worker", trouble.worker, 0, self.workers - 1)
            _between(f"{name}.at_s", trouble.at_s, 0.0, 1e9)
            _between(f"{name}.down_s", trouble.down_s, 0.0, 1e9)
        for restart in self.router_restarts:
            _between("RouterRestart.router", restart.router, 0, self.replicas - 1)
            _between("RouterRestart.at_s", restart.at_s, 0.0, 1e9)

    def role_of(self, engine: int) -> Role:
        """What an engine is for."""
        if self.disaggregation is None:
            return Role.BOTH
        return Role.PREFILL if engine < self.disaggregation.prefill_workers else Role.DECODE

    def scheduler_of(self, engine: int) -> SchedulerConfig:
        """What an engine is made with."""
        if engine >= self.slow_workers:
            return self.scheduler
        cost = SlowedCost(self.scheduler.cost, self.slow_factor)
        return replace(self.scheduler, cost=cost)

    def models_of(self, engine: int) -> tuple[str, ...]:
        """What an engine serves beside its own model."""
        if not self.models_apart or not self.models:
            return self.models
        return (self.models[engine % len(self.models)],)

    def _check_links(self) -> None:
        """Copies go from any engine to any other."""
        try:
            for distance in Distance:
                self.scheduler.cost.transfer_s(1, distance)
        except NoLink as error:
            raise ValueError(f"copies of hot prefixes: {error}") from None


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least:g} and {most:g}, got {value:g}")
