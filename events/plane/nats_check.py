"""Checks NATS settings: those that can never connect raise an error that says why."""

import re
from itertools import pairwise
from pathlib import Path
from ssl import SSLContext, create_default_context
from urllib.parse import urlsplit

import nkeys

from events.plane.settings import NatsSettings

SCHEMES = ("nats", "tls", "ws", "wss")
_PORT_MAX = 65_535
_TITLED = b"-----BEGIN"
"""Beginning of the line above each part of a .creds file; a bare NKey seed has no such line."""


def check_connection(settings: NatsSettings, url: str) -> bool:
    """Checks the settings, with clearer errors than nats-py's at connecting.

    Returns True for a connection without TLS to another host, which nats.allow_plaintext permits.
    Raises OSError or ValueError for credentials, certificates or a URL that can't be used.
    """
    check_url(url)
    if file := settings.credentials_file:
        check_credentials(Path(file).read_bytes(), file)
    tls_context(settings)
    if settings.encrypts(url) or on_loopback(url):
        return False
    if not settings.allow_plaintext:
        raise ValueError(
            f"{without_secret(url)!r} is not loopback, and the connection has no TLS: set"
            " nats.tls_ca_file or a URL with tls://, or nats.allow_plaintext to let the network"
            " read credentials, commands and prompts"
        )
    return True


def tls_context(settings: NatsSettings) -> SSLContext | None:
    """The TLS context of a NATS connection; None: nats-py's default, or no TLS. Raises OSError."""
    if not settings.tls_ca_file and not settings.tls_certificate_file:
        return None
    context = create_default_context(cafile=settings.tls_ca_file)
    if settings.tls_certificate_file:
        context.load_cert_chain(settings.tls_certificate_file, settings.tls_key_file)
    return context


def check_url(url: str) -> None:
    """Raises ValueError for a URL to which no connection can be made; the password is left out."""
    shown = repr(without_secret(url))
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"{shown} is no NATS URL, which begins with nats:// or tls://")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(
            f"{shown} is no NATS URL: its host has a bracket without an IPv6 address"
        ) from None
    host = parts.netloc.rpartition("@")[2]
    if "," in host:
        raise ValueError(f"{shown} names several servers: give one, or a DNS name of them all")
    if re.search(r"\s", url):
        raise ValueError(f"{shown} is no NATS URL: there is a space in it")
    if not parts.hostname or parts.hostname == "none":  # nats-py takes "none" for no host
        raise ValueError(f"{shown} is no NATS URL: it names no host")
    try:
        usable = parts.port is None or 0 < parts.port <= _PORT_MAX
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{shown} is no NATS URL: its port is no number from 1 to {_PORT_MAX}")


def on_loopback(url: str) -> bool:
    """Whether a server's URL, which `check_url` takes, names this machine itself."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    host = parts.hostname or ""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def files_of(settings: NatsSettings) -> tuple[str | None, str | None]:
    """(.creds file, file with an NKey seed), as nats-py takes them; at least one is None.

    Raises OSError.
    """
    file = settings.credentials_file
    if file is None or _TITLED in Path(file).read_bytes():
        return file, None
    return None, file


def check_credentials(content: bytes, name: str) -> None:
    """Raises ValueError for a .creds file without a JWT and a key, and for any other file that is
    no NKey seed. content: the file's; name: its name, for the error.
    """
    if _TITLED in content:
        user_jwt(content, name)
        content = _line_after(b"BEGIN USER NKEY SEED", content, name)
    check_seed(content, name)


def check_seed(seed: bytes, name: str) -> None:
    """Raises ValueError, without these bytes, for bytes that are no NKey seed. name: their file."""
    try:
        nkeys.from_seed(bytearray(seed.strip())).wipe()
    except (nkeys.NkeysError, ValueError):
        raise ValueError(
            f"{name} holds neither NATS credentials nor an NKey seed (a line that begins with S)"
        ) from None


def user_jwt(content: bytes, name: str) -> bytes:
    """The JWT in a .creds file; raises ValueError when there is none."""
    return _line_after(b"BEGIN NATS USER JWT", content, name)


def without_secret(url: str) -> str:
    """A URL without its user and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url.rpartition("@")[2]


def _line_after(title: bytes, content: bytes, name: str) -> bytes:
    lines = content.splitlines()
    for line, following in pairwise(lines):
        if title in line and following.strip():
            return following.strip()
    raise ValueError(f"{name} is no NATS credentials file: no line follows {title.decode()!r}")
