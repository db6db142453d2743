"""A server's certificate, its key and the CAs of its callers, as their files hold them now.

Laws:
- what the files hold takes effect for new connections only; open ones go on;
- files that don't fit together change nothing: a rotation in two steps is read when it is whole;
- the oldest protocol version is TLS 1.2, with the suites that HTTP/2 allows (RFC 9113, appendix A)
  and no others, on every port: AEAD, with keys by ECDHE.
"""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from router.config.keys import ConfigError
from router.config.settings.keys_settings import TlsSettings
from router.config.settings.serving_settings import MetricsSettings
from router.net.keys.followed import reason_of

SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2: AEAD, with keys by ECDHE. All suites of TLS 1.3 are AEAD."""


class Pem(NamedTuple):
    """The contents of the certificate, key and CA files."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


class Contexts:
    """The TLS contexts of one server, one after the other. A new connection gets `now`, the context
    made of the files as last read, so that a removed CA counts for no new connection; sessions of
    one context can't be resumed with the next.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext]) -> None:
        """make: makes a context of the files as they are."""
        self.make = make
        self.now = make()


class Certificates:
    """The certificate of one process, which all its TLS servers show."""

    def __init__(self, settings: TlsSettings) -> None:
        """Raises ConfigError for files that can't be read or don't fit together."""
        if settings.certificate_file is None or settings.key_file is None:
            raise ConfigError(
                "a certificate needs its key, and a key its certificate"
                " - at `$.tls.certificate_file`, `$.tls.key_file`"
            )
        self._certificate = settings.certificate_file
        self._key = settings.key_file
        self._client_ca = settings.client_ca_file
        self._contexts: list[Contexts] = []
        try:
            self.pem = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{reason_of(error)} - at `$.tls`") from error

    @classmethod
    def of(cls, settings: TlsSettings) -> "Certificates | None":
        """The configured certificate; None: no TLS. Raises ConfigError."""
        if settings.certificate_file is None and settings.key_file is None:
            if settings.client_ca_file is not None:
                raise ConfigError(
                    "CAs of callers need a certificate of the server: set tls.certificate_file and"
                    " tls.key_file - at `$.tls.client_ca_file`"
                )
            return None
        return cls(settings)

    @property
    def asks_callers(self) -> bool:
        """Whether callers' certificates are checked."""
        return self._client_ca is not None

    def reload(self) -> bool:
        """Reads the files again; returns whether they changed. Raises OSError or ValueError, and
        changes nothing, for files that can't be used."""
        pem = self._read()
        if pem == self.pem:
            return False
        made = [contexts.make() for contexts in self._contexts]
        for contexts, context in zip(self._contexts, made, strict=True):
            contexts.now = context
        self.pem = pem
        return True

    def contexts(
        self, verify: ssl.VerifyMode = ssl.CERT_NONE, protocols: Sequence[str] = ()
    ) -> Contexts:
        """TLS contexts of a server; `reload` keeps them up to date. verify: whether callers need
        certificates. protocols: the names that ALPN offers."""

        def make() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers(SUITES)
            context.verify_mode = verify
            if protocols:
                context.set_alpn_protocols(protocols)
            self._load(context)
            return context

        contexts = Contexts(make)
        self._contexts.append(contexts)
        return contexts

    def _read(self) -> Pem:
        """Reads the files, and checks that they fit together. Raises OSError or ValueError."""
        before = self._content()
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except ssl.SSLError as error:
            raise ValueError(
                f"the certificate, its key or the CAs can't be used: {error.reason or error}"
            ) from error
        if self._content() != before:
            raise ValueError("the certificate, key or CA files changed while they were read")
        return before

    def _content(self) -> Pem:
        ca = None if self._client_ca is None else Path(self._client_ca).read_bytes()
        return Pem(Path(self._certificate).read_bytes(), Path(self._key).read_bytes(), ca)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key, password=_no_password)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)


def metrics_tls(settings: MetricsSettings, certificates: Certificates | None) -> Contexts | None:
    """TLS contexts of the metrics port; None: no TLS. Raises ConfigError."""
    if settings.tls == "off":
        return None
    if certificates is None:
        raise ConfigError("HTTPS needs tls.certificate_file - at `$.metrics.tls`")
    if settings.tls == "server":
        return certificates.contexts()
    if not certificates.asks_callers:
        raise ConfigError("mutual TLS needs tls.client_ca_file - at `$.metrics.tls`")
    return certificates.contexts(ssl.CERT_REQUIRED)


def _no_password() -> str:
    raise ValueError("tls.key_file is encrypted; the server can't ask for its password")
