"""Settings of the gRPC server, the metrics, the log and the decision log."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import Seconds, Settings

MessageKib = Annotated[int, Meta(ge=1, le=65_536)]
"""KiB of one gRPC message."""


class GrpcSettings(Settings, frozen=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="host:port; port 0 picks a free one")] = (
        "127.0.0.1:50051"
    )
    unix_socket: Annotated[
        str | None, Meta(description="path of a unix socket to listen on too")
    ] = None
    unix_socket_mode: Annotated[
        str,
        Meta(
            pattern="^0[0-7]{3}$",
            description="file permissions of the unix socket, octal: they alone say which users"
            " may call",
        ),
    ] = "0600"
    any_address: Annotated[
        bool,
        Meta(
            description="serve callers without keys on an address that is not loopback: all that"
            " reach it may call every method, fleet commands among them"
        ),
    ] = False
    route_kib_max: Annotated[
        MessageKib | None,
        Meta(
            description="largest Route message; none: 8192, or more if routing.prompt_tokens_max"
            " needs more"
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
        Meta(
            ge=1,
            le=65_536,
            description="MiB of messages over 64 KiB that are handled at once; more are refused",
        ),
    ] = 128
    watches_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="open WatchWorkers calls, and as many WatchDecisions calls;"
            " more are refused",
        ),
    ] = 1000
    max_message_mib: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="deprecated: MiB that no other limit of a message exceeds"),
    ] = None
    streams_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="open calls of one connection; others wait there"),
    ] = 8192
    connections_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="open connections; the next one is closed at once"),
    ] = 10_000
    address_connections_max: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(
            description="open connections of one client address, or one IPv6 /64; none: seven"
            " times as many as the port has free places, which bounds them in any case"
        ),
    ] = None
    metadata_kib_max: Annotated[
        int, Meta(ge=1, le=1024, description="KiB of a call's metadata; more is refused")
    ] = 16
    handshake_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds that a new connection has for TLS and HTTP/2's first bytes"),
    ] = 20.0
    read_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds in which a client must take a message of a stream's results"),
    ] = 20.0
    reflection: Annotated[bool, Meta(description="serve the grpc.reflection services")] = True
    max_connection_age_s: Annotated[
        Seconds | None,
        Meta(
            description="age in seconds at which a connection is closed, so that clients spread"
            " over replicas again; none: never"
        ),
    ] = 300.0
    max_connection_age_grace_s: Annotated[
        Seconds,
        Meta(
            description="seconds that calls on a closed connection may go on; streams end by"
            " themselves within them"
        ),
    ] = 60.0
    keepalive_s: Annotated[
        Seconds,
        Meta(description="seconds of silence after which a client gets a keepalive ping"),
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
    tls: Annotated[
        Literal["off", "server", "mutual"],
        Meta(
            description="server: HTTPS with the certificate of `tls`; mutual: and only for scrapers"
            " with a certificate of tls.client_ca_file"
        ),
    ] = "off"


class HttpSettings(Settings, frozen=True):
    """Bounds on the connections of each HTTP port: those of gateway, picker, metrics and probes."""

    connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="open connections of an HTTP port; the next one takes the place of one that"
            " is idle or has sent no request yet, or is closed at once",
        ),
    ] = 10_000
    address_connections_max: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(
            description="open connections of one client address, or one IPv6 /64; none: seven"
            " times as many as the port has free places, which bounds them in any case"
        ),
    ] = None
    head_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds that a connection has for TLS and its first request's line and"
            " headers, or HTTP/2's first bytes, and then for each later request's"
        ),
    ] = 20.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="seconds for which a connection may stay without a request")
    ] = 300.0
    linger_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which the rest of a body is read after its request's answer,"
            " before the connection is closed"
        ),
    ] = 2.0


class LogSettings(Settings, frozen=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["auto", "plain", "json"], Meta(description="auto: plain on a terminal, else json")
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged"),
    ] = "info"


class DecisionLogSettings(Settings, frozen=True):
    """Decisions and refusals with all their numbers, as lines of JSON for `kvroute replay-log`."""

    file: Annotated[
        str | None,
        Meta(description="file that decisions are written to; none: they are not written"),
    ] = None
    share: Annotated[
        float, Meta(gt=0, le=1, description="share of the requests whose decisions are written")
    ] = 0.01
    file_mib: Annotated[int, Meta(ge=1, description="MiB at which the next file begins")] = 64
    files: Annotated[
        int, Meta(ge=1, le=1000, description="files that are kept, the current file included")
    ] = 4
    hashes: Annotated[
        bool,
        Meta(description="write hashes of prompts and sessions, too; their text is never written"),
    ] = False
