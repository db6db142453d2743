"""Settings of the gRPC server, the metrics, the log and the decision log."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Settings


class GrpcSettings(Settings, frozen=True):
    """The gRPC server."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of the gRPC server; port 0 picks a free port",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "127.0.0.1:50051"
    unix_socket: Annotated[
        str | None, Meta(description="path of a unix socket that the gRPC server listens on, too")
    ] = None
    unix_socket_mode: Annotated[
        str,
        Meta(
            pattern="^0[0-7]{3}$",
            description="file permissions of the unix socket, in octal; they alone decide which"
            " users may call",
        ),
    ] = "0600"
    any_address: Annotated[
        bool,
        Meta(
            description="serve clients without keys on an address that is not loopback: each"
            " may call every RPC, fleet commands among them"
        ),
    ] = False


class MetricsSettings(Settings, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of /metrics and the console; port 0 picks a free port, empty:"
            " no such port",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "127.0.0.1:9464"
    tls: Annotated[
        Literal["off", "server", "mutual"],
        Meta(
            description="off: /metrics without TLS; server: over TLS, with the certificate of"
            " `tls`; mutual: over TLS, and only for clients with a certificate signed by a CA of"
            " tls.client_ca_file"
        ),
    ] = "off"


class HttpSettings(Settings, frozen=True):
    """Connections of each port: those of gRPC, gateway, picker, metrics and probes."""

    connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="most open connections of a port; beyond them a new one takes the place of"
            " a connection that is idle or has sent no request, or else is closed",
        ),
    ] = 10_000


class LogSettings(Settings, frozen=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["auto", "plain", "json"],
        Meta(description="form of log lines; auto: plain on a terminal, else json"),
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged", extra_json_schema=FIRST_WEEK),
    ] = "info"


class DecisionLogSettings(Settings, frozen=True):
    """Decisions and refusals with all their numbers, as lines of JSON for `kvroute replay-log`."""

    file: Annotated[
        str | None,
        Meta(
            description="file that each decision is written to, a line of JSON each; none:"
            " decisions are not written"
        ),
    ] = None
    share: Annotated[
        float,
        Meta(gt=0, le=1, description="share (0 to 1) of the requests whose decisions are written"),
    ] = 0.01
    max_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="MiB of disk that the decision log may take, in four files; a full one"
            " takes the place of the oldest",
        ),
    ] = 256
    hashes: Annotated[
        bool,
        Meta(
            description="write hashes of prompts and sessions to the decision log, too; their"
            " text is never written"
        ),
    ] = False
