"""Settings of certificates, keys and the plain port of probes: frozen, with bounds."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Settings


class TlsSettings(Settings, frozen=True):
    """The certificate that servers of this process show. Changed files are read again by
    themselves."""

    certificate_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the server's certificate and its chain; none: plain text",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Meta(description="PEM file of the certificate's key", extra_json_schema=FIRST_WEEK),
    ] = None
    client_ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of callers' certificates; gRPC then takes only callers"
            " with such a certificate",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None


class KeysSettings(Settings, frozen=True):
    """Keys of callers: bearer tokens, certificates, accounts of issuers, with their rights."""

    file: Annotated[
        str | None,
        Meta(
            description="YAML file of identities and their rights, read again when it changes;"
            " none: callers need no keys, or certificates alone",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None


class EnginesSettings(Settings, frozen=True):
    """How this process reaches engines over HTTP, whatever it requests. Changed files are read
    again by themselves."""

    api_key: Annotated[
        str | None,
        Meta(
            description="API key of the engines (vLLM's and SGLang's --api-key), sent as a bearer"
            " token; none: that of api_key_file",
            extra_json_schema={"secret": True},
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file with the API key of the engines; none: engines need none",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(description="PEM file of the CAs of engines' certificates; none: the system's"),
    ] = None


class DialSettings(Settings, frozen=True):
    """How a process proves itself to the routers that it calls, and they to it."""

    tls: Annotated[
        bool, Meta(description="call over TLS, by the system's CAs unless ca_file is set")
    ] = False
    ca_file: Annotated[
        str | None, Meta(description="PEM file of the CAs of routers' certificates; turns TLS on")
    ] = None
    certificate_file: Annotated[
        str | None, Meta(description="PEM file of the caller's own certificate; turns TLS on")
    ] = None
    key_file: Annotated[str | None, Meta(description="PEM file of that certificate's key")] = None
    name: Annotated[
        str | None,
        Meta(description="name in routers' certificates, where it is not that of the address"),
    ] = None
    token_file: Annotated[
        str | None, Meta(description="file with the bearer token, read again when it changes")
    ] = None


class ProbesSettings(Settings, frozen=True):
    """Liveness and readiness over plain HTTP, for probes that bring no certificate and no key."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of /livez and /readyz, which say only serving or not;"
            " empty: none",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
