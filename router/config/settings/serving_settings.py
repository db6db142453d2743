"""Settings of the gRPC server, the metrics, the log and the decision log."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings


class GrpcSettings(Settings, frozen=True):
    """The gRPC server."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of the gRPC server; port 0 picks a free one",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "127.0.0.1:50051"
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
    reflection: Annotated[bool, Meta(description="serve the grpc.reflection services")] = True
    max_connection_age_s: Annotated[
        Seconds | None,
        Meta(
            description="age in seconds at which a connection is closed, so that clients spread"
            " over replicas again; none: never"
        ),
    ] = 300.0


class MetricsSettings(Settings, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of /metrics and the console; port 0 picks a free one,"
            " empty: none",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "127.0.0.1:9464"
    tls: Annotated[
        Literal["off", "server", "mutual"],
        Meta(
            description="server: HTTPS with the certificate of `tls`; mutual: and only for scrapers"
            " with a certificate of tls.client_ca_file"
        ),
    ] = "off"


class HttpSettings(Settings, frozen=True):
    """Connections of each port: those of gRPC, gateway, picker, metrics and probes."""

    connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="open connections of a port; the next one takes the place of one that is"
            " idle or has sent no request yet, or is closed at once",
        ),
    ] = 10_000
    address_connections_max: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(
            description="open connections of one client address, or one IPv6 /64; none: seven"
            " times as many as the port has free places, which bounds them in any case"
        ),
    ] = None
    idle_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds for which a connection may stay without a request; HTTP/1 alone"),
    ] = 300.0


class LogSettings(Settings, frozen=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["auto", "plain", "json"], Meta(description="auto: plain on a terminal, else json")
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged", extra_json_schema=FIRST_WEEK),
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
