"""Credentials with which a process calls routers: TLS, its own certificate, its token."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from events.engines.access import read_token
from router.config.keys import ConfigError
from router.config.settings.keys_settings import DialSettings
from router.net.keys.followed import FOLLOW_S, reason_of

log = logging.getLogger("kvroute.keys")


def dial_options(settings: DialSettings, clock: Callable[[], float]) -> dict[str, Any]:
    """Arguments of KvRouteClient; raises ConfigError. clock: monotonic seconds."""
    options: dict[str, Any] = {}
    try:
        if settings.tls or settings.ca_file or settings.certificate_file:
            options["credentials"] = CredentialFiles(settings, clock)
        if settings.token_file is not None:
            options["token"] = TokenFile(settings.token_file, clock)
    except (OSError, ValueError) as error:
        raise ConfigError(reason_of(error)) from error
    if settings.name is not None:
        options["channel_options"] = (("grpc.ssl_target_name_override", settings.name),)
    return options


class TokenFile:
    """A bearer token in a file, which is read again when it changes."""

    def __init__(self, file: str, clock: Callable[[], float]) -> None:
        """Raises OSError or ValueError."""
        self._file = file
        self._clock = clock
        self._token = read_token(file)
        self._read_s = clock()

    def __call__(self) -> str:
        """The token; while the file can't be read, the last one read."""
        if self._clock() - self._read_s >= FOLLOW_S:
            self._read_s = self._clock()
            try:
                self._token = read_token(self._file)
            except (OSError, ValueError):
                return self._token  # a router refuses it once it counts no more
        return self._token


class CredentialFiles:
    """TLS credentials in files, which are read again when they change."""

    def __init__(self, settings: DialSettings, clock: Callable[[], float]) -> None:
        """Raises OSError or ValueError."""
        if (settings.certificate_file is None) != (settings.key_file is None):
            raise ValueError("a certificate needs its key, and a key its certificate")
        self._files = settings.ca_file, settings.key_file, settings.certificate_file
        self._clock = clock
        self._content = self._read()
        self._credentials = grpc.ssl_channel_credentials(*self._content)
        self._read_s = clock()

    def __call__(self) -> grpc.ChannelCredentials:
        """The credentials; while the files can't be used, the last ones read."""
        if self._clock() - self._read_s >= FOLLOW_S:
            self._read_s = self._clock()
            try:
                self._renew(self._read())
            except (OSError, ValueError) as error:
                log.warning("credentials to routers not read again: %s", reason_of(error))
        return self._credentials

    def _renew(self, content: tuple[bytes | None, ...]) -> None:
        if content != self._content:
            self._content = content
            self._credentials = grpc.ssl_channel_credentials(*content)
            log.info("credentials to routers read again")

    def _read(self) -> tuple[bytes | None, ...]:
        """Raises OSError or ValueError: a certificate and a key that don't fit together are a
        rotation that is not whole yet."""
        _, key, certificate = self._files
        if key is not None and certificate is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key)
            except ssl.SSLError as error:
                raise ValueError(f"{certificate} and {key} don't fit: {error.reason}") from error
        return tuple(map(_content, self._files))


def _content(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()
