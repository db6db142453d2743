"""Settings of the broker and of engines: the parts of the configuration that the relay and the
router share. router/config/reading.py reads them from file, environment and flags."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from events.engines.bootstrap import MOONCAKE, bootstrap_url, host_of
from events.engines.endpoints import (
    address_error,
    http_error,
    masked,
    rank_endpoint,
    same_place,
    zmq_error,
)
from events.engines.engine import HandOver
from events.engines.table import READINGS, EngineName, engine_of
from events.plane.mistakes import of_value

Seconds = Annotated[float, Meta(gt=0)]
BlockSize = Annotated[int, Meta(ge=1, le=65536)]
Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
"""A positive count, with the same bound as in heartbeats (events/plane/facts.py)."""
Port = Annotated[int, Meta(ge=1, le=65535)]
Subject = Annotated[str, Meta(pattern=r"^\S+$")]
Endpoint = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(max_length=1024)]
"""A text, with the same bound in characters as in heartbeats (events/plane/facts.py)."""


FIRST_WEEK = {"first_week": True}
"""Mark of a key that most operators set before anything else (router/config/keys.py)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration: frozen, and strict about its keys."""


class NatsSettings(Settings, frozen=True):
    """The connection to the NATS server."""

    url: Annotated[
        str | None,
        Meta(
            description="URL of the NATS server; default: `kvroute serve` runs its own on loopback",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    credentials_file: Annotated[
        str | None,
        Meta(
            description="file to connect to NATS with: .creds (JWT and key), or an NKey seed",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    user: Annotated[str | None, Meta(description="user name at the NATS server")] = None
    password: Annotated[
        str | None,
        Meta(
            description="password of nats.user at the NATS server",
            extra_json_schema={"secret": True},
        ),
    ] = None
    tls_ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of the NATS server's certificate; setting it turns"
            " TLS on",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    tls_certificate_file: Annotated[
        str | None, Meta(description="PEM file of the certificate to show to the NATS server")
    ] = None
    tls_key_file: Annotated[
        str | None, Meta(description="PEM file of the key of nats.tls_certificate_file")
    ] = None
    allow_plaintext: Annotated[
        bool,
        Meta(
            description="connect without TLS to NATS servers that are not on loopback, too: the"
            " network can read all messages and credentials"
        ),
    ] = False

    def encrypts(self, url: str) -> bool:
        """Whether a connection to this URL uses TLS, or is refused by a server without TLS."""
        scheme, _, _ = url.partition("://")
        if scheme in ("ws", "wss"):
            return scheme == "wss"
        return scheme == "tls" or bool(self.tls_ca_file or self.tls_certificate_file)


class EngineSettings(Settings, frozen=True):
    """An engine that gets a relay. An entry of `workers:`, the flags of `kvroute relay` and
    `kvroute register`, and a RegisterWorkerRequest have the same keys."""

    id: Annotated[
        str, Meta(min_length=1, max_length=256, description="worker id, unique in the fleet")
    ]
    engine: Annotated[EngineName, Meta(description="serving software of the engine")]
    address: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="HTTP base where clients send their requests, such as"
            " http://10.0.0.11:8000",
        ),
    ]
    events: Annotated[
        Endpoint | None,
        Meta(
            description="ZMQ endpoint of the engine's event publisher, tcp://HOST:PORT; rank r"
            " is at port + r; default: none, so that routers predict its blocks from their"
            " own picks"
        ),
    ] = None
    events_bind: Annotated[
        bool,
        Meta(
            description="the relay binds the events endpoint and the engine's publisher connects"
            " to it; false: the relay connects"
        ),
    ] = False
    replay: Annotated[
        str | None,
        Meta(
            description="ZMQ endpoint of the engine's replay socket, tcp://HOST:PORT; rank r is at"
            " port + r; default: the engine has none"
        ),
    ] = None
    topic: Annotated[
        str, Meta(description="ZMQ topic prefix of the engine's events; default: every topic")
    ] = ""
    metrics: Annotated[
        str | None,
        Meta(
            description="HTTP base of the engine's metrics, load and model pages; default: the"
            " address"
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file with the engine's API key, read again when it changes; default:"
            " engines.api_key_file"
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of the engine's certificate; default: engines.ca_file"
        ),
    ] = None
    load: Annotated[
        str | None,
        Meta(
            description="ZMQ endpoint of SGLang's LoadStat feed, tcp://HOST:PORT; default: the load"
            " is polled over HTTP"
        ),
    ] = None
    ranks: Annotated[
        int, Meta(ge=1, le=1024, description="number of the engine's data-parallel ranks")
    ] = 1
    first_rank: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="the engine's number of its first rank: vLLM's"
            " --data-parallel-start-rank on each node of a hybrid load-balanced group;"
            " clients' requests number its ranks from 0 all the same",
        ),
    ] = 0
    model: Annotated[
        Name | None, Meta(description="name of the model; default: the name that the engine gives")
    ] = None
    model_aliases: Annotated[
        tuple[Name, ...],
        Meta(max_length=256, description="other names that clients may use for the model"),
    ] = ()
    block_size: Annotated[
        BlockSize | None,
        Meta(
            description="tokens of a block in the index, into which the engine's blocks are split"
            " or merged; default: block_size of the model in the router's `models:`, or the"
            " engine's own, at least 16"
        ),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        Meta(
            description="part of a request that the engine serves: its prompt (prefill), its"
            " answer (decode) or both; default: the role that SGLang gives, or both"
        ),
    ] = None
    kv_connector: Annotated[
        Name,
        Meta(
            description="connector by which vLLM hands KV caches over, as in its"
            " --kv-transfer-config; default: none"
        ),
    ] = ""
    kv_engine_id: Annotated[
        Name,
        Meta(
            description="the engine_id in vLLM's --kv-transfer-config; default: the engine_id that"
            " Mooncake's bootstrap server returns"
        ),
    ] = ""
    bootstrap_host: Annotated[
        Name,
        Meta(
            description="host where decode engines reach the engine's bootstrap server; default:"
            " the host of the HTTP base"
        ),
    ] = ""
    bootstrap_port: Annotated[
        Port | None,
        Meta(
            description="port of the engine's bootstrap server; default: the port that SGLang"
            " reports, or the connector's usual port"
        ),
    ] = None
    labels: Annotated[
        dict[Name, Name],
        Meta(
            max_length=256,
            description="labels of the worker, name to value; requests may require labels",
        ),
    ] = {}
    priority_scheduling: Annotated[
        bool,
        Meta(
            description="the engine schedules requests by priority, so routers' answers carry a"
            " priority for it"
        ),
    ] = False
    warm: Annotated[
        bool,
        Meta(
            description="let routers send hot prefixes to the engine, which computes them for its"
            " cache (routing.hot_prefixes)"
        ),
    ] = False
    slots: Annotated[
        Count | None,
        Meta(
            description="requests that a rank runs at once; default: the engine's own figure, or an"
            " estimate"
        ),
    ] = None
    total_blocks: Annotated[
        Count | None,
        Meta(
            description="KV blocks of a rank, counted in blocks of the engine; default: the"
            " engine's own figure. Without either, the share of blocks in use counts as 0"
        ),
    ] = None
    loads_loras: Annotated[
        bool,
        Meta(
            description="the engine loads a LoRA that it doesn't list when a request names it: vLLM"
            " with a LoRA resolver plugin, SGLang for LoRAs that it has evicted"
        ),
    ] = False

    @property
    def http(self) -> str | None:
        """The engine's HTTP base URL; None: it has none."""
        base = self.metrics or self.address
        return base if base.startswith(("http://", "https://")) else None

    @property
    def mooncake(self) -> str | None:
        """URL of the engine's Mooncake bootstrap server, which returns its engine_id; None: it has
        none."""
        in_turn = engine_of(self.engine).hand_over is HandOver.IN_TURN
        if not in_turn or self.kv_connector != MOONCAKE:
            return None
        host = self.bootstrap_host or host_of(self.http or self.address)
        return bootstrap_url(host, self.bootstrap_port or 0)

    def __post_init__(self) -> None:
        if self.warm and self.http is None and "://" in self.address:  # else `unusable` says more
            raise ValueError(
                "warm: the engine has no HTTP base for requests that compute prefixes; set"
                " `metrics` to it"
            )
        if self.events is None:
            for name in ("replay", "topic", "events_bind"):
                if getattr(self, name):
                    raise ValueError(f"{name}: needs an `events` endpoint beside it; set `events`")


LOCAL_KEYS = ("api_key_file", "ca_file")
"""Keys of EngineSettings that name files of the relay's host. Callers of RegisterWorker and pods'
annotations can't set them: else a relay could be made to send any file to an engine as its key."""


class UnusableEngine(ValueError):
    """A relay can't read an engine with these settings.

    key: of EngineSettings, empty where no single key is wrong. sentence: the reason.
    """

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(f"{key}: {sentence}" if key else sentence)
        self.key = key
        self.sentence = sentence


def read_engine(fields: dict[str, object]) -> EngineSettings:
    """The settings of an engine from a request or from flags; raises UnusableEngine."""
    try:
        settings = msgspec.convert(fields, EngineSettings)
    except msgspec.ValidationError as error:
        sentence, _, where = of_value(error, EngineSettings).partition(" - at `$")
        key = where.strip(".`").partition("[")[0]
        named, _, rest = sentence.partition(": ")
        if not key and named in EngineSettings.__struct_fields__:  # by __post_init__
            key, sentence = named, rest
        raise UnusableEngine(key, sentence) from error
    if reason := unusable(settings):
        key, _, sentence = reason.partition(": ")
        raise UnusableEngine(key, sentence)
    return settings


def unusable(settings: EngineSettings) -> str:
    """Why a relay can never read an engine as it is configured: "key: sentence"; empty: it can.

    Checks the form of endpoints only. Passwords are masked.
    """
    last = settings.first_rank + settings.ranks
    errors = {
        "id": not settings.id.isprintable() and "has control characters",
        "events": settings.events is not None
        and zmq_error(settings.events, ranks=last, bind=settings.events_bind),
        "replay": settings.replay is not None and zmq_error(settings.replay, ranks=last),
        "load": settings.load is not None and _feed_error(settings, settings.load),
        "metrics": settings.metrics is not None and http_error(settings.metrics),
        "address": address_error(settings.address, pages=settings.metrics is not None),
        "bootstrap_host": settings.mooncake is not None and http_error(settings.mooncake),
    }
    return next((f"{key}: {error}" for key, error in errors.items() if error), "")


def _feed_error(settings: EngineSettings, endpoint: str) -> str:
    if READINGS[settings.engine].read_load_feed is None:
        return (
            f"{engine_of(settings.engine).title} has no ZMQ feed of loads; leave `load` out, and"
            " the relay polls the engine's pages"
        )
    return zmq_error(endpoint, ranks=settings.ranks)


def shared_socket(workers: Iterable[EngineSettings]) -> tuple[int, str] | None:
    """The first worker that has a socket of an earlier worker: (its place in `workers`, "key:
    sentence"); None: no two share one.

    Law: two workers share no socket. An engine that is two workers counts twice, and gets twice its
    share of the requests.
    """
    seen: dict[str, tuple[int, str, str]] = {}
    for i, worker in enumerate(workers):
        for key, endpoint in _sockets(worker):
            before, id, other_key = seen.setdefault(same_place(endpoint), (i, worker.id, key))
            if before != i:
                return i, (
                    f"{key}: {masked(endpoint)!r} is the worker {id!r}'s {other_key}, too: each"
                    " engine is one worker, with endpoints of its own"
                )
    return None


def _sockets(settings: EngineSettings) -> Iterator[tuple[str, str]]:
    """(key, endpoint) of each socket of an engine; no two engines share one."""
    yield "address", settings.address
    if settings.metrics is not None:
        yield "metrics", settings.metrics
    for key in ("events", "replay", "load"):
        endpoint = getattr(settings, key)
        if endpoint is not None:
            first = 0 if key == "load" else settings.first_rank
            for rank in range(settings.ranks if endpoint.startswith("tcp://") else 1):
                yield key, rank_endpoint(endpoint, first + rank)


class DynamoSettings(Settings, frozen=True):
    """A fleet under NVIDIA Dynamo, whose workers' KV events on NATS a relay follows.

    Dynamo's events have no address, model or block size, so these are configured here.
    """

    subject: Annotated[
        Subject,
        Meta(description="NATS subject of the KV events of Dynamo's workers; wildcards allowed"),
    ]
    address: Annotated[
        str,
        Meta(
            min_length=1,
            description="URL to which clients send the requests of a worker, such as"
            " http://worker-{worker_id}:8000; {worker_id} stands for the worker's number in"
            " Dynamo",
        ),
    ]
    model: Annotated[
        str, Meta(min_length=1, description="name of the model that the workers serve")
    ]
    block_size: Annotated[
        BlockSize, Meta(description="tokens of a KV block, as Dynamo's workers are configured")
    ]
    id: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="name of this Dynamo fleet in metrics and logs",
        ),
    ] = "dynamo"
    worker_id: Annotated[
        str,
        Meta(
            max_length=200,
            description="ids that the workers get in kvroute; {worker_id} stands for Dynamo's"
            " number of the worker, and must occur",
        ),
    ] = "{worker_id}"
    load_subject: Annotated[
        Subject | None,
        Meta(
            description="NATS subject of the workers' kv_metrics (their load); default: `subject`"
            " with kv_metrics in the place of its last token, kv-events"
        ),
    ] = None
    nats_url: Annotated[
        str | None,
        Meta(
            description="URL of the NATS server that Dynamo's workers publish on; default:"
            " nats.url, that of the routers"
        ),
    ] = None
    nats_credentials_file: Annotated[
        str | None, Meta(description="NATS .creds file to connect to nats_url with")
    ] = None
    model_aliases: Annotated[
        tuple[str, ...], Meta(description="other names that clients may use for the model")
    ] = ()
    lora_names: Annotated[
        tuple[str, ...], Meta(description="names of the LoRAs that the workers serve")
    ] = ()
    max_model_len: Annotated[
        Count | None,
        Meta(description="most tokens of a request's prompt and output together; default: unknown"),
    ] = None
    total_blocks: Annotated[Count | None, Meta(description="KV blocks of a rank")] = None
    slots: Annotated[Count | None, Meta(description="requests that a rank runs at once")] = None
    role: Literal["both", "prefill", "decode"] = "both"
    labels: Annotated[
        dict[str, str],
        Meta(description="labels of the worker, name to value; requests may require labels"),
    ] = {}
    worker_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds without a message after which a Dynamo worker counts as gone"),
    ] = 300.0
    workers_max: Annotated[
        Count,
        Meta(
            description="most workers, each of their ranks counted, that the relay follows at once"
        ),
    ] = 1024
    blocks_max: Annotated[
        Count, Meta(description="most KV blocks that the relay keeps for each worker")
    ] = 1 << 22
    message_bytes_max: Annotated[
        Count,
        Meta(
            description="bytes of the largest message from a Dynamo worker that is read; larger"
            " ones are refused"
        ),
    ] = 8 << 20
    hashes_max: Annotated[
        Count,
        Meta(description="most block hashes that are read from one message of a Dynamo worker"),
    ] = 1 << 16

    def __post_init__(self) -> None:
        if "{worker_id}" not in self.worker_id:
            raise ValueError(
                f"worker_id {self.worker_id!r}: without {{worker_id}} all workers have the same id"
            )
