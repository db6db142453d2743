"""Credentials with which a process calls routers: TLS, its own certificate, its token."""

import logging
import ssl
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from events.engines.access import read_token
from router.config.keys import ConfigError
from router.config.settings.keys_settings import DialSettings
from router.net.keys.followed import FOLLOW_S, reason_of

log = logging.getLogger("kvroute.keys")

_Value = TypeVar("_Value")


def dial_options(settings: DialSettings, clock: Callable[[], float]) -> dict[str, Any]:
    """Arguments of KvRouteClient; raises ConfigError for files that can't be used. clock: monotonic
    seconds."""
    options: dict[str, Any] = {}
    try:
        if settings.tls or settings.ca_file or settings.certificate_file:
            options["credentials"] = credential_files(settings, clock)
        if settings.token_file is not None:
            options["token"] = token_file(settings.token_file, clock)
    except (OSError, ValueError) as error:
        raise ConfigError(reason_of(error)) from error
    if settings.name is not None:
        options["channel_options"] = (("grpc.ssl_target_name_override", settings.name),)
    return options


class ReadAgain(Generic[_Value]):
    """A value read from files; a call returns it, and reads the files again after FOLLOW_S."""

    def __init__(self, read: Callable[[], _Value], clock: Callable[[], float]) -> None:
        """read: reads the files. Its OSError or ValueError, for unusable files, is raised."""
        self._read = read
        self._clock = clock
        self._value = read()
        self._read_s = clock()

    def __call__(self) -> _Value:
        """The value in the files; while they can't be used, which is logged, the value before."""
        if self._clock() - self._read_s >= FOLLOW_S:
            self._read_s = self._clock()
            before = self._value
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                log.warning("credentials to routers not read again: %s", reason_of(error))
            if self._value != before:
                log.info("credentials to routers read again")
        return self._value


def token_file(file: str, clock: Callable[[], float]) -> ReadAgain[str]:
    """A bearer token in a file. Raises OSError or ValueError."""
    return ReadAgain(partial(read_token, file), clock)


def credential_files(
    settings: DialSettings, clock: Callable[[], float]
) -> ReadAgain[grpc.ChannelCredentials]:
    """TLS credentials in files, the same object until they change. Raises OSError or ValueError."""
    if (settings.certificate_file is None) != (settings.key_file is None):
        raise ValueError("a certificate needs its key, and a key its certificate")
    credentials_of = lru_cache(maxsize=1)(grpc.ssl_channel_credentials)
    return ReadAgain(lambda: credentials_of(*_contents(settings)), clock)


def _contents(settings: DialSettings) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Contents of the CA, key and certificate files. Raises OSError, or ValueError for a
    certificate and a key that don't fit together: a rotation that is not complete yet."""
    key, certificate = settings.key_file, settings.certificate_file
    if key is not None and certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise ValueError(f"{certificate} and {key} don't fit: {error.reason}") from error
    return _content(settings.ca_file), _content(key), _content(certificate)


def _content(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()
