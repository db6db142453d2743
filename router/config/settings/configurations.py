"""The whole configuration of each process: frozen sections, one for each subject."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import (
    FIRST_WEEK,
    BlockSize,
    EngineSettings,
    NatsSettings,
    Seconds,
    Settings,
)
from router.config.settings.console_settings import ConsoleSettings
from router.config.settings.discovery_settings import DiscoverySettings
from router.config.settings.fleet_settings import FleetNameSettings, FleetSettings, IndexSettings
from router.config.settings.gateway_settings import GatewayProcessSettings, GatewaySettings
from router.config.settings.keys_settings import (
    DialSettings,
    EnginesSettings,
    KeysSettings,
    ProbesSettings,
    ReadEnginesSettings,
    TlsSettings,
)
from router.config.settings.picker_settings import PickerProcessSettings, PickerSettings
from router.config.settings.prompt_settings import PromptsSettings
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.request_settings import RequestSettings
from router.config.settings.routing_settings import ModelRoutingSettings, RoutingSettings
from router.config.settings.serving_settings import (
    DecisionLogSettings,
    GrpcSettings,
    HttpSettings,
    LogSettings,
    MetricsSettings,
)
from router.config.settings.tracing_settings import TracingSettings


class ModelSettings(Settings, frozen=True):
    """Settings of a model, which clients may name before any worker serves it."""

    name: Annotated[str, Meta(description="name of the model, as its engines give it")]
    aliases: Annotated[
        tuple[str, ...], Meta(description="other names that clients may use for the model")
    ] = ()
    block_size: Annotated[
        BlockSize | None,
        Meta(
            description="tokens of a block in the KV events that this router's own relays publish"
            " for the model"
        ),
    ] = None
    routing: Annotated[
        ModelRoutingSettings | None,
        Meta(description="settings of picks for this model; none: those of `routing`"),
    ] = None
    prompts: Annotated[
        PromptsSettings | None,
        Meta(
            description="how prompts of this model that come as text get their tokens; none: from"
            " the /tokenize of engines"
        ),
    ] = None


class ServeConfig(Settings, frozen=True):
    """Configuration of `kvroute serve`."""

    fleet: FleetSettings = FleetSettings()
    grpc: GrpcSettings = GrpcSettings()
    tls: TlsSettings = TlsSettings()
    keys: KeysSettings = KeysSettings()
    engines: ReadEnginesSettings = ReadEnginesSettings()
    probes: ProbesSettings = ProbesSettings()
    http: HttpSettings = HttpSettings()
    metrics: MetricsSettings = MetricsSettings()
    console: ConsoleSettings = ConsoleSettings()
    gateway: GatewaySettings = GatewaySettings()
    picker: PickerSettings = PickerSettings()
    requests: RequestSettings = RequestSettings()
    nats: NatsSettings = NatsSettings()
    log: LogSettings = LogSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    routing: RoutingSettings = RoutingSettings()
    queue: QueueSettings = QueueSettings()
    index: IndexSettings = IndexSettings()
    decision_log: DecisionLogSettings = DecisionLogSettings()
    tracing: TracingSettings = TracingSettings()
    ready_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds after its start at which the router reports ready even if the"
            " blocks of some workers are not known for sure"
        ),
    ] = 30.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="seconds that open gRPC calls may go on after SIGTERM")
    ] = 30.0
    models: Annotated[
        tuple[ModelSettings, ...],
        Meta(
            description="settings of single models, a list with an entry for each such model",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ()
    workers: Annotated[
        tuple[EngineSettings, ...],
        Meta(
            description="engines whose relays this router runs, in a child process",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ()


class RelayConfig(Settings, frozen=True):
    """Configuration of `kvroute relay`."""

    fleet: FleetNameSettings = FleetNameSettings()
    nats: NatsSettings = NatsSettings()
    metrics: MetricsSettings = MetricsSettings(listen="127.0.0.1:9465")
    http: HttpSettings = HttpSettings()
    tls: TlsSettings = TlsSettings()
    engines: ReadEnginesSettings = ReadEnginesSettings()
    log: LogSettings = LogSettings()
    state_dir: Annotated[
        str | None,
        Meta(
            description="folder where the relay saves which blocks its engines hold, to read them"
            " again after its restart; none: nothing is saved"
        ),
    ] = None
    workers: Annotated[
        tuple[EngineSettings, ...], Meta(description="engines that the relay reads and publishes")
    ] = ()


class GatewayConfig(Settings, frozen=True):
    """Configuration of `kvroute gateway`."""

    router: Annotated[
        str,
        Meta(
            min_length=1, description="the routers' gRPC addresses, host:port, with commas between"
        ),
    ] = "127.0.0.1:50051"
    to_router: DialSettings = DialSettings()
    gateway: GatewayProcessSettings = GatewayProcessSettings()
    requests: RequestSettings = RequestSettings()
    engines: EnginesSettings = EnginesSettings()
    http: HttpSettings = HttpSettings()
    tls: TlsSettings = TlsSettings()
    keys: KeysSettings = KeysSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()


class PickerConfig(Settings, frozen=True):
    """Configuration of `kvroute picker`."""

    router: Annotated[
        str,
        Meta(
            min_length=1, description="the routers' gRPC addresses, host:port, with commas between"
        ),
    ] = "127.0.0.1:50051"
    to_router: DialSettings = DialSettings()
    picker: PickerProcessSettings = PickerProcessSettings()
    requests: RequestSettings = RequestSettings()
    tls: TlsSettings = TlsSettings()
    probes: ProbesSettings = ProbesSettings()
    metrics: MetricsSettings = MetricsSettings(listen="127.0.0.1:9090")
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
