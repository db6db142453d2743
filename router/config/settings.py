"""The configuration: frozen sections, from file, environment and flags, in rising precedence.

Every scalar key has three names: `section.key` in the YAML file, `KVROUTE_SECTION_KEY` in the
environment, `--section-key` on the command line. An unknown key is refused with its name.

A preset (router/config/presets.py) lies between the defaults and these three: it sets keys of
`routing` that none of them sets.
"""

import re
import types
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta
from typing_extensions import override

from events.plane.settings import (
    BlockSize,
    EngineSettings,
    NatsSettings,
    Seconds,
    Settings,
    unusable,
)
from indexer.index import BLOCK_BYTES
from router.config.gateway_settings import GatewayProcessSettings, GatewaySettings
from router.config.presets import PRESETS, PresetName
from router.config.prompt_settings import PromptsSettings
from router.config.queue_settings import QueueSettings
from router.config.sources import KeyPath, Sources

ENVIRONMENT_PREFIX = "KVROUTE_"


FILE_BYTES_MAX = 4 << 20
"""Of a configuration file: thousands of workers."""
INTEGER_MAX = 1 << 53
"""Of any key without a bound of its own: what every part of the router can reckon with."""
TOMBSTONE_MAX_S = 86_400.0
"""Longest time that a removed worker's beats are ignored, by configuration or command."""


MEMORY_MIB_MAX = 64 << 10
"""Of the index: its entries have 32-bit places, which are too few for more than 16 bytes * 2^32."""


class ConfigError(ValueError):
    """The operator's mistake: one sentence that names the key and where it stands."""


Milliseconds = Annotated[float, Meta(ge=0.001, le=2_000_000.0)]
"""Seconds that gRPC takes as milliseconds in an int32."""


MessageKib = Annotated[int, Meta(ge=1, le=65_536)]
"""KiB of one gRPC message."""


class GrpcSettings(Settings, frozen=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="host:port; port 0 picks a free one")] = (
        "127.0.0.1:50051"
    )
    unix_socket: Annotated[str | None, Meta(description="path of a unix socket to serve too")] = (
        None
    )
    route_kib_max: Annotated[
        MessageKib | None,
        Meta(
            description="largest Route message; none: 8192, or what routing.prompt_tokens_max needs"
        ),
    ] = None
    explain_kib_max: Annotated[
        MessageKib | None, Meta(description="largest Explain message; none: as for Route")
    ] = None
    batch_kib_max: Annotated[
        MessageKib | None,
        Meta(description="largest message of a RouteStream; none: 16384, or Route's if larger"),
    ] = None
    report_kib_max: Annotated[MessageKib, Meta(description="largest Report message")] = 1024
    message_kib_max: Annotated[
        MessageKib, Meta(description="largest message of every other method")
    ] = 256
    in_flight_mib_max: Annotated[
        int,
        Meta(ge=1, le=65_536, description="bytes of messages over 64 KiB being handled at once"),
    ] = 128
    watches_max: Annotated[
        int, Meta(ge=1, le=100_000, description="WatchWorkers calls open at once")
    ] = 1000
    max_message_mib: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="deprecated: no message limit is above it, in MiB"),
    ] = None
    reflection: Annotated[bool, Meta(description="answer grpc.reflection")] = True
    max_connection_age_s: Annotated[
        Milliseconds | None,
        Meta(description="age at which a connection is ended, so that clients spread again"),
    ] = 300.0
    max_connection_age_grace_s: Annotated[
        Milliseconds,
        Meta(description="how long its calls may go on; streams end by themselves within it"),
    ] = 60.0
    keepalive_s: Annotated[
        Milliseconds, Meta(description="silence after which a client gets a keepalive ping")
    ] = 60.0

    @property
    def stream_age_s(self) -> float | None:
        """Oldest that a stream gets: less than the grace, which may begin right after its opening,
        so that no connection's end ever breaks one."""
        return None if self.max_connection_age_s is None else 0.8 * self.max_connection_age_grace_s


class MetricsSettings(Settings, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[str, Meta(description="host:port; port 0 picks a free one, empty: none")] = (
        "127.0.0.1:9464"
    )


class LogSettings(Settings, frozen=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["auto", "plain", "json"], Meta(description="auto: plain on a terminal, else json")
    ] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least")] = (
        "info"
    )


class HotPrefixSettings(Settings, frozen=True):
    """Copies of prefixes that many ask for, to workers that have time."""

    enabled: Annotated[bool, Meta(description="copy hot prefixes")] = False
    score: Annotated[
        float, Meta(gt=0, description="hits / sqrt(age in s) from which on a prefix is hot")
    ] = 4.0
    queue: Annotated[
        int,
        Meta(ge=0, description="a worker with more requests, and more than the mean, is busy"),
    ] = 10
    copies_per_minute: Annotated[
        float, Meta(gt=0, le=600, description="that one router begins")
    ] = 60.0
    memory_mib: Annotated[int, Meta(ge=1, description="for hot prefixes' tokens and hashes")] = 64


class OutlierSettings(Settings, frozen=True):
    """Workers at which requests fail get none for a while."""

    enabled: Annotated[bool, Meta(description="eject workers at which requests fail")] = True
    failures: Annotated[
        int, Meta(ge=1, description="failures in a row that eject; one refused connection does")
    ] = 5
    failure_percent: Annotated[
        int, Meta(ge=1, le=100, description="of a worker's last requests, whose failure ejects it")
    ] = 30
    requests_min: Annotated[
        int, Meta(ge=1, le=1024, description="requests from which on that share counts")
    ] = 10
    window_s: Annotated[
        Seconds, Meta(description="how far back that share, and what callers saw, counts")
    ] = 10.0
    pool_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="of the workers of one model and role, that errors alone keep out at most",
        ),
    ] = 50
    ejection_s: Annotated[
        Seconds, Meta(description="first ejection; each further one is twice as long")
    ] = 1.0
    ejection_max_s: Annotated[Seconds, Meta(description="longest ejection")] = 20.0
    calm_s: Annotated[
        Seconds, Meta(description="without a failure, after which ejections begin short again")
    ] = 60.0
    probes: Annotated[
        int, Meta(ge=1, le=100, description="requests that must be served after an ejection")
    ] = 3
    alone_s: Annotated[
        Seconds,
        Meta(description="how long one caller's word waits for what others see"),
    ] = 1.0
    refused_alone_s: Annotated[
        Seconds,
        Meta(
            description="how long one caller's refused connection waits for what others see; an"
            " engine that is gone refuses all of them"
        ),
    ] = 0.3
    grace_s: Annotated[
        Seconds,
        Meta(
            description="after a failure, within which a success may have been before it: two"
            " callers' reports come in any order"
        ),
    ] = 0.1
    sample_after_s: Annotated[
        Seconds,
        Meta(
            description="by how much an engine's answer to its relay must be later than a refused"
            " connection to count as later: two hosts' clocks differ"
        ),
    ] = 0.5
    hang_s: Annotated[
        Seconds, Meta(description="without a first token, beyond what was predicted, that ejects")
    ] = 1.0
    hang_factor: Annotated[
        float, Meta(ge=1, le=1000, description="multiple of the predicted time to allow before it")
    ] = 3.0
    hang_requests: Annotated[
        int, Meta(ge=1, description="requests that must wait for their first tokens there")
    ] = 3


class CapacitySettings(Settings, frozen=True):
    """Learning of how much workers can take. A worker over its capacity gets requests only
    while no worker of its pool has room."""

    estimate_slots: Annotated[
        bool,
        Meta(
            description="estimate how many requests a worker runs at once, where neither its engine"
            " nor the configuration names slots, from requests that ran while others waited"
        ),
    ] = True
    slots_block_percent_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="percentage of a worker's KV blocks in use from which on waiting requests"
            " may wait for blocks, so that the running ones don't count for the estimate of slots",
        ),
    ] = 90
    count_preemptions: Annotated[
        bool,
        Meta(
            description="let preemptions lower the share of a worker's KV blocks that picks promise"
        ),
    ] = True
    preemption_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="percentage of a worker's KV blocks by which each preempted request lowers"
            " the share that picks promise",
        ),
    ] = 5.0
    served_percent: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="percentage of a worker's KV blocks by which each request that is served to"
            " its end raises that share again",
        ),
    ] = 1.0
    prefill_budget_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="a worker has no room while it has so many times its engine's token budget"
            " of prompt tokens to compute, where the engine says its budget; 0: no such bound",
        ),
    ] = 0.0
    prefill_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while it has so many prompt tokens to compute, of all"
            " routers' requests; 0: no such bound",
        ),
    ] = 0
    prefill_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while so many requests of this router have their"
            " prompts computed there; 0: no such bound",
        ),
    ] = 0
    decode_requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker has no room while so many requests of this router, whose prompts"
            " are computed, run there; 0: no such bound",
        ),
    ] = 0
    block_percent_min: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="percentage of a worker's KV blocks that picks promise at least, however"
            " many requests it preempts",
        ),
    ] = 50


class GuardSettings(Settings, frozen=True):
    """A pick moves on while its worker's queue costs more than its cache saves."""

    enabled: Annotated[
        bool, Meta(description="guard the picks of the policies in routing.guard.policies")
    ] = True
    policies: Annotated[
        tuple[str, ...],
        Meta(description="policies whose picks the guard may move; picks of others stay"),
    ] = ("dynamo-adaptive", "ttft")
    request_tokens: Annotated[
        float,
        Meta(
            ge=0,
            description="prompt tokens that each active request of a worker adds to the wait that"
            " the guard expects there",
        ),
    ] = 300.0
    margin: Annotated[
        float,
        Meta(
            ge=0,
            description="share of the prompt's tokens by which a worker's wait may exceed the"
            " shortest one before the guard moves the pick",
        ),
    ] = 0.05

    def looks_at(self, policy: str) -> bool:
        """Whether a policy's picks may be moved."""
        return self.enabled and policy in self.policies


class AffinitySettings(Settings, frozen=True):
    """Sessions go on where their last requests went: as a term of the cost, or before it."""

    bonus: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="by policy: taken off the cost of the worker that the session's last"
            " request went to, in the unit of the policy's cost"
        ),
    ] = msgspec.field(default_factory=dict)
    hard: Annotated[
        bool,
        Meta(
            description="no other worker gets a session's request while that one may take it and"
            " has room; then the next by cost does, and the session goes on there"
        ),
    ] = False

    def looks_at(self, policy: str) -> bool:
        """Whether picks of a policy go by sessions, beyond what the policy does itself."""
        return self.hard or policy in self.bonus


class RoutingSettings(Settings, frozen=True):
    """How picks are made and kept."""

    preset: Annotated[
        PresetName,
        Meta(
            description="set of routing settings with a name: see `kvroute policies --presets`; a"
            " key that the file, the environment or a flag sets wins over the preset's"
        ),
    ] = "balanced"
    policy: Annotated[
        str, Meta(description="see `kvroute policies`; or module:function, one of your own")
    ] = "dynamo-adaptive"
    own_policies: Annotated[
        tuple[str, ...],
        Meta(description="more functions that requests may name, each module:function"),
    ] = ()
    prefill_policy: Annotated[
        str,
        Meta(
            description="of pairs: policy that picks the prefill worker, if the request names none"
        ),
    ] = "prefill-queue"
    decode_policy: Annotated[
        str, Meta(description="of pairs: policy that picks the decode worker")
    ] = "decode-room"
    local_prefill_tokens: Annotated[
        int, Meta(ge=0, description="of pairs: a prompt with so few new tokens stays together")
    ] = 256
    local_prefill_percent: Annotated[
        int, Meta(ge=0, le=100, description="and one of which no larger part is new")
    ] = 5
    policy_per_request: Annotated[bool, Meta(description="let requests name a policy")] = True
    expected_output_tokens: Annotated[
        int, Meta(ge=0, le=4096, description="room for output, if the request names none")
    ] = 1
    prompt_tokens_max: Annotated[int, Meta(ge=1, description="longest prompt taken")] = 1 << 20
    alternatives: Annotated[int, Meta(ge=0, le=16, description="next best workers in answers")] = 2
    lease_s: Annotated[Seconds, Meta(description="life of a reservation without a Report")] = 120.0
    memory_window_s: Annotated[
        Seconds, Meta(description="how long a request id is remembered after its end")
    ] = 60.0
    session_ttl_s: Annotated[
        Seconds, Meta(description="how long it is known where a session's KV cache was sent")
    ] = 900.0
    sessions_max: Annotated[
        int, Meta(ge=0, description="sessions known at once; 0: they are not remembered")
    ] = 65_536
    reservations_max: Annotated[
        int, Meta(ge=1, description="open and remembered reservations; over it requests are shed")
    ] = 200_000
    seed: Annotated[int | None, Meta(description="of the tie-breaking; default: random")] = None
    predicted_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a pick's blocks count without its worker's events; 0: never",
        ),
    ] = 5.0
    approximate_ttl_s: Annotated[
        float,
        Meta(ge=0, description="the same for workers without events, or with only a part of them"),
    ] = 120.0
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(description="numbers of policies, by policy and name: see `kvroute policies`"),
    ] = msgspec.field(default_factory=dict)
    prefill_rate: Annotated[
        Seconds, Meta(description="prompt tokens a second, of workers that were not measured yet")
    ] = 20_000.0
    shadow_policy: Annotated[
        str | None, Meta(description="policy that scores the same requests and never acts")
    ] = None
    shadow_share: Annotated[
        float, Meta(gt=0, le=1, description="of the requests, those that it scores")
    ] = 0.01
    hot_prefixes: HotPrefixSettings = HotPrefixSettings()
    outliers: OutlierSettings = OutlierSettings()
    capacity: CapacitySettings = CapacitySettings()
    guard: GuardSettings = GuardSettings()
    affinity: AffinitySettings = AffinitySettings()
    host_label: Annotated[str, Meta(description="label that names a worker's host")] = "host"
    rack_label: Annotated[str, Meta(description="label that names its rack")] = "rack"
    cluster_label: Annotated[str, Meta(description="label that names its cluster")] = "cluster"


class DecisionLogSettings(Settings, frozen=True):
    """Decisions and refusals with all their numbers, as lines of JSON for `kvroute replay-log`."""

    file: Annotated[str | None, Meta(description="where they are written; none: nowhere")] = None
    share: Annotated[
        float, Meta(gt=0, le=1, description="of the requests, those that are written")
    ] = 0.01
    file_mib: Annotated[int, Meta(ge=1, description="size at which the next file begins")] = 64
    files: Annotated[int, Meta(ge=1, le=1000, description="that are kept, the current one too")] = 4
    hashes: Annotated[
        bool, Meta(description="write hashes of prompts and sessions, too; never their text")
    ] = False


class IndexSettings(Settings, frozen=True):
    """The overlap index."""

    memory_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=MEMORY_MIB_MAX,
            description="over it, blocks that no prompt asks for are forgotten; 64 GiB at most",
        ),
    ] = 4096
    worker_percent: Annotated[
        int, Meta(ge=1, le=100, description="of the memory that one worker's blocks may take")
    ] = 25

    def bytes_max(self) -> int:
        return self.memory_mib << 20

    def blocks_max(self) -> int:
        """Of one worker."""
        return self.bytes_max() * self.worker_percent // 100 // BLOCK_BYTES


class FleetSettings(Settings, frozen=True):
    """When workers count as there."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="the workers one router serves"),
    ] = "default"
    beat_timeout_s: Annotated[
        Seconds, Meta(description="silence after which a worker gets no requests")
    ] = 3.0
    forget_s: Annotated[Seconds, Meta(description="silence after which it is forgotten")] = 30.0
    model_memory_s: Annotated[
        Seconds, Meta(description="how long a model without workers is UNAVAILABLE, not NOT_FOUND")
    ] = 300.0
    tombstone_s: Annotated[
        float,
        Meta(
            gt=0,
            le=TOMBSTONE_MAX_S,
            description="how long a removed worker's beats are ignored, a day at most",
        ),
    ] = 60.0
    workers_max: Annotated[int, Meta(ge=1, description="workers known at once")] = 4096
    state_file: Annotated[
        str | None,
        Meta(
            description="file that keeps the drains and removals in force for restarts of this"
            " router, another file for each replica; none: only other replicas tell them"
        ),
    ] = None
    inflight: Annotated[
        bool,
        Meta(description="tell other replicas what is reserved here, and count what they tell"),
    ] = True


class ModelRoutingSettings(Settings, frozen=True):
    """How requests for one model are decided, where that differs from `routing`."""

    policy: Annotated[
        str | None,
        Meta(description="of requests for this model that name none; none: routing.policy"),
    ] = None
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(
            description="numbers of policies for this model's requests, by policy and name, over"
            " those of routing.parameters"
        ),
    ] = msgspec.field(default_factory=dict)
    guard: Annotated[
        GuardSettings | None,
        Meta(description="of this model's picks; a key that it leaves out is as in routing.guard"),
    ] = None


class ModelSettings(Settings, frozen=True):
    """A model that clients may ask for before any worker serves it."""

    name: str
    aliases: tuple[str, ...] = ()
    block_size: Annotated[
        BlockSize | None,
        Meta(description="canonical block size that embedded relays publish in"),
    ] = None
    routing: Annotated[
        ModelRoutingSettings | None,
        Meta(description="how requests for this model are decided; none: by `routing`"),
    ] = None
    prompts: Annotated[
        PromptsSettings | None,
        Meta(description="tokens of prompts that come without tokens; none: engines give them"),
    ] = None


class ServeConfig(Settings, frozen=True):
    """Configuration of `kvroute serve`."""

    fleet: FleetSettings = FleetSettings()
    grpc: GrpcSettings = GrpcSettings()
    metrics: MetricsSettings = MetricsSettings()
    gateway: GatewaySettings = GatewaySettings()
    nats: NatsSettings = NatsSettings()
    log: LogSettings = LogSettings()
    routing: RoutingSettings = RoutingSettings()
    queue: QueueSettings = QueueSettings()
    index: IndexSettings = IndexSettings()
    decision_log: DecisionLogSettings = DecisionLogSettings()
    ready_timeout_s: Annotated[
        Seconds, Meta(description="ready after this even when some stream is not trusted yet")
    ] = 30.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for calls in flight at SIGTERM")
    ] = 30.0
    models: Annotated[tuple[ModelSettings, ...], Meta(description="models known in advance")] = ()
    workers: Annotated[
        tuple[EngineSettings, ...], Meta(description="engines to run relays for, in this process")
    ] = ()


class RelayConfig(Settings, frozen=True):
    """Configuration of `kvroute relay`."""

    fleet: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="the routers' fleet.name")
    ] = "default"
    nats: NatsSettings = NatsSettings()
    metrics: MetricsSettings = MetricsSettings(listen="127.0.0.1:9465")
    log: LogSettings = LogSettings()
    state_dir: Annotated[
        str | None,
        Meta(description="folder that keeps what engines hold, for the relay's own restarts"),
    ] = None
    workers: Annotated[tuple[EngineSettings, ...], Meta(description="engines to relay")] = ()


class GatewayConfig(Settings, frozen=True):
    """What `kvroute gateway` reads."""

    router: Annotated[
        str,
        Meta(
            min_length=1, description="the routers' gRPC addresses, host:port, with commas between"
        ),
    ] = "127.0.0.1:50051"
    gateway: GatewayProcessSettings = GatewayProcessSettings()
    log: LogSettings = LogSettings()


Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True)
class Key:
    """A scalar key of a configuration."""

    path: tuple[str, ...]
    type: Any
    default: object
    description: str
    secret: bool

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        return _flag(self.path)


def _flag(path: tuple[str, ...]) -> str:
    return "--" + "-".join(path).replace("_", "-")


def keys(config: type[Settings], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """All keys of a configuration but those of its lists, in order."""
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        meta = Meta()
        while get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Meta) and (extra.description or extra.extra_json_schema):
                    meta = extra
        if isinstance(hint, type) and issubclass(hint, Settings):
            yield from keys(hint, (*prefix, field.name))
            continue
        secret = bool((meta.extra_json_schema or {}).get("secret"))
        path = (*prefix, field.name)
        yield Key(path, hint, field.default, meta.description or "", secret)


def load(
    config: type[Config],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], object],
) -> Config:
    """The configuration of all three sources; raises ConfigError.

    flags maps a key's path to its value. Variables with the prefix must name a key too.
    """
    return load_with_sources(config, file, environment, flags)[0]


def load_with_sources(
    config: type[Config],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], object],
) -> tuple[Config, Sources]:
    """The configuration of `load`, and the origin of each value; raises ConfigError."""
    tree = _read(file) if file else {}
    where = f"{file}: " if file else ""
    _convert(tree, config, where)  # blames the file for what the file says
    known = {key.variable: key for key in keys(config)}
    variables: dict[KeyPath, str] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = known.get(variable)
        if key is None:
            if _is_no_key(variable, text):
                continue
            raise ConfigError(f"environment: {variable} names no key of the configuration")
        _put(tree, key.path, _read_variable(key, text))
        variables[key.path] = variable
        _convert(tree, config, f"environment: {variable}: ")
    for path, value in flags.items():
        _put(tree, path, value)
    where = "flags: " if flags else where
    read = _convert(tree, config, where)
    preset = read.routing.preset if isinstance(read, ServeConfig) else None
    sets = {"routing": PRESETS[preset].sets} if preset else {}
    flag_names: dict[KeyPath, str] = {path: _flag(path) for path in flags}
    sources = Sources(str(file or ""), tree, variables, flag_names, f"preset {preset}", sets)
    return _convert(_with_guards(_laid_over(sets, tree)), config, where), sources


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees in one, key by key: where both have a value, the one above."""
    tree = {**below, **above}
    for name in below.keys() & above.keys():
        lower, upper = below[name], above[name]
        if isinstance(lower, Mapping) and isinstance(upper, Mapping):
            tree[name] = _laid_over(lower, upper)
    return tree


def _with_guards(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree in which the guards of `models` have the keys of routing.guard, but for their own."""
    models, fleets = tree.get("models"), _get(tree, ("routing", "guard"))
    if not models or not isinstance(fleets, dict):
        return tree
    return {**tree, "models": [_with_guard(model, fleets) for model in models]}


def _with_guard(model: dict[str, Any], fleets: dict[str, Any]) -> dict[str, Any]:
    own = _get(model, ("routing", "guard"))
    if not isinstance(own, dict):
        return model
    return {**model, "routing": {**model["routing"], "guard": {**fleets, **own}}}


def render(config: Settings) -> str:
    """The configuration as YAML, secrets masked; what `serve` prints at its start."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        if key.secret and _get(tree, key.path) is not None:
            _put(tree, key.path, "***")
    url = _get(tree, ("nats", "url"))
    if isinstance(url, str) and "://" not in url:  # NATS takes it without a scheme
        _put(tree, ("nats", "url"), re.sub(r"^.*@", "***@", url))
    return yaml.safe_dump(_masked(tree), sort_keys=False, default_flow_style=False)


_USER_INFO = re.compile(r"(?<=://)\S*@")


def _masked(tree: Any) -> Any:
    """A tree whose URLs have no user and no password."""
    match tree:
        case str():
            return _USER_INFO.sub("***@", tree)
        case dict():
            return {name: _masked(value) for name, value in tree.items()}
        case list() | tuple():
            return [_masked(value) for value in tree]
        case _:
            return tree


_OTHER_VARIABLES = frozenset({"KVROUTE_CONFIG", "KVROUTE_TARGET"})
"""Variables of the command line that are no keys of a configuration."""


_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")


def _is_no_key(variable: str, text: str) -> bool:
    """Whether a variable belongs to the command line, or is set by Kubernetes for a Service.

    A Service called `kvroute` gives every pod beside it KVROUTE_PORT=tcp://... and its like.
    """
    if variable in _OTHER_VARIABLES:
        return True
    link = _SERVICE_LINK.search(variable)
    return link is not None and (link[0] != "_PORT" or "://" in text)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # a path with a zero byte
        raise ConfigError(f"{str(file)!r}: {error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: more than {FILE_BYTES_MAX >> 20} MiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    tree = _parsed(text, f"{file}: ")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of sections, not {type(tree).__name__}")
    return tree


def _read_variable(key: Key, text: str) -> object:
    """Value of a variable of the environment; raises ConfigError."""
    if _takes_text(key.type):
        may_be_absent = types.NoneType in get_args(key.type)
        return None if may_be_absent and not text else text
    return _parsed(text, f"environment: {key.variable}: ")


def _parsed(text: str, where: str) -> Any:
    """Tree of a YAML text; raises ConfigError for any error of the parser.

    Beside YAMLError that is RecursionError for deep nesting, and ValueError, KeyError, IndexError,
    AttributeError or OverflowError for tags such as !!int that don't fit their text.
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # the text is at fault, and never more than this reading
        raise ConfigError(f"{where}{_told(error)}") from error


def _told(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    return f"a value that is none: {type(error).__name__} {error}"


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, of which YAML's own takes the last."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name.value!r} is there twice", name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def _convert(tree: dict[str, Any], config: type[Config], where: str) -> Config:
    try:
        value = msgspec.convert(tree, config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}nested too deep") from error
    _check(value, where)
    return value


def _check(config: Settings, where: str) -> None:
    """Rules between keys, beyond types; raises ConfigError."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        value = _get(tree, key.path)
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{where}expected a number of seconds - at `$.{key.dotted}`")
        if isinstance(value, int) and value > INTEGER_MAX and key.path[-1] != "seed":
            raise ConfigError(f"{where}expected at most {INTEGER_MAX} - at `$.{key.dotted}`")
    workers = getattr(config, "workers", ())
    seen: set[str] = set()
    for i, worker in enumerate(workers):
        if worker.id in seen:
            raise ConfigError(f"{where}the id {worker.id!r} is used twice - at `$.workers[{i}].id`")
        seen.add(worker.id)
        if error := unusable(worker):
            name, _, sentence = error.partition(": ")
            raise ConfigError(f"{where}{sentence} - at `$.workers[{i}].{name}`")
    if isinstance(config, ServeConfig):
        if config.fleet.forget_s < config.fleet.beat_timeout_s:
            raise ConfigError(
                f"{where}a worker can't be forgotten before it counts as silent"
                " - at `$.fleet.forget_s`"
            )
        names: set[str] = set()
        for i, model in enumerate(config.models):
            for name in (model.name, *model.aliases):
                if name in names:
                    raise ConfigError(
                        f"{where}the name {name!r} is used twice - at `$.models[{i}]`"
                    )
                names.add(name)


def _takes_text(hint: Any) -> bool:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return str in options or any(get_origin(option) is Literal for option in options)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: Any, path: tuple[str, ...]) -> object:
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree
