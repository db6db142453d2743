"""Settings of certificates, keys and the plain port of probes: frozen, with bounds."""

from typing import Annotated

from msgspec import Meta

from events.engines.numbers import OWN_MAX, own_fault
from events.plane.settings import FIRST_WEEK, Settings


class TlsSettings(Settings, frozen=True):
    """The certificate of this process's servers. Changed files are read again without a restart."""

    certificate_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the server's certificate and its chain; none: no TLS",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the key of tls.certificate_file", extra_json_schema=FIRST_WEEK
        ),
    ] = None
    client_ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs that sign clients' certificates; the gRPC port then"
            " takes only clients with such a certificate",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None


class KeysSettings(Settings, frozen=True):
    """Keys and rights of callers: bearer tokens, certificates, accounts at token issuers."""

    file: Annotated[
        str | None,
        Meta(
            description="YAML file of clients' identities, keys and rights, read again when it"
            " changes; none: clients need no keys, at most certificates",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None


class EnginesSettings(Settings, frozen=True):
    """Credentials for HTTP requests to engines. Changed files are read again without a restart."""

    api_key_file: Annotated[
        str | None,
        Meta(
            description="file with the API key of the engines (vLLM's and SGLang's --api-key), sent"
            " as a bearer token; none: engines need no key",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of engines' certificates; none: the CAs of the system"
        ),
    ] = None


class ReadEnginesSettings(EnginesSettings, frozen=True):
    """Credentials for HTTP requests to engines, and metrics of engines' pages that relays read for
    the operator."""

    numbers: Annotated[
        dict[str, str],
        Meta(
            max_length=OWN_MAX,
            description="numbers of your own for policies, receipts and kvroute_worker_number, at"
            " most 8: the name of each, to the metric on engines' pages that it is read from",
        ),
    ] = {}  # noqa: RUF012  (msgspec copies it)

    def __post_init__(self) -> None:
        if fault := own_fault(self.numbers):
            raise ValueError(f"numbers: {fault}")


class DialSettings(Settings, frozen=True):
    """Credentials for calls to routers, and how routers' certificates are checked."""

    tls: Annotated[
        bool,
        Meta(
            description="call routers over TLS; their certificates are checked by the system's"
            " CAs unless ca_file is set"
        ),
    ] = False
    ca_file: Annotated[
        str | None, Meta(description="PEM file of the CAs of routers' certificates; turns TLS on")
    ] = None
    certificate_file: Annotated[
        str | None,
        Meta(description="PEM file of the certificate that is shown to routers; turns TLS on"),
    ] = None
    key_file: Annotated[str | None, Meta(description="PEM file of the key of certificate_file")] = (
        None
    )
    name: Annotated[
        str | None,
        Meta(
            description="host name in routers' certificates, where it differs from the host in"
            " their address"
        ),
    ] = None
    token_file: Annotated[
        str | None,
        Meta(
            description="file with the bearer token that is sent to routers, read again when it"
            " changes"
        ),
    ] = None


class ProbesSettings(Settings, frozen=True):
    """Liveness and readiness over plain HTTP, for probes that bring no certificate and no key."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of the pages /livez and /readyz, which say only whether the"
            " process serves; empty: no such port",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
