"""Settings of certificates, keys and the plain port of probes: frozen, with bounds."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class TlsSettings(Settings, frozen=True):
    """The certificate that servers of this process show. Changed files are read again by
    themselves."""

    certificate_file: Annotated[
        str | None,
        Meta(description="PEM file of the server's certificate and its chain; none: plain text"),
    ] = None
    key_file: Annotated[str | None, Meta(description="PEM file of the certificate's key")] = None
    client_ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of callers' certificates; gRPC then takes only callers"
            " with such a certificate"
        ),
    ] = None


class ProbesSettings(Settings, frozen=True):
    """Liveness and readiness over plain HTTP, for probes that bring no certificate and no key."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of /livez and /readyz, which say no more than serving or not;"
            " empty: none"
        ),
    ] = ""
