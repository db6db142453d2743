"""The key file: identities by their tokens, certificates and OpenID Connect accounts. Pure.

Laws:
- a token is stored as its SHA-256, so that a stolen file opens nothing;
- a key belongs to one identity.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from events.plane.mistakes import of_value
from events.plane.settings import Settings
from router.config.keys import ConfigError
from router.net.keys.identity import EVERYTHING, NO_LIMITS, TENANT_MAX, Allowance, Identity
from router.net.keys.rights import Right

IDENTITIES_MAX = 10_000
KEYS_MAX = 64
"""Tokens, certificates or accounts of one identity: more than a rotation needs."""
TOKEN_BYTES = 32
PREFIX = "sha256:"

Hash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Meta(min_length=1, max_length=2048)]


class Issuer(Settings, frozen=True):
    """An OpenID Connect issuer of tokens, such as a Kubernetes cluster."""

    issuer: Text
    """The claim `iss` of its tokens."""
    audience: Text
    """The claim `aud` that its tokens must have."""
    jwks: Text
    """https:// or file:// URL of its public keys."""
    ca_file: str | None = None
    """PEM file with the CAs of the `jwks` server; None: those of the system."""
    token_file: str | None = None
    """File with a bearer token for the `jwks` server, read at each fetch; None: no token."""


class Account(Settings, frozen=True):
    """An account of an issuer."""

    issuer: Text
    subject: Text
    """The claim `sub`, such as system:serviceaccount:NAMESPACE:NAME."""


class Entry(Settings, frozen=True):
    """One identity of the key file: its keys, rights and limits."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    rights: tuple[Right, ...]
    tokens: Annotated[tuple[Hash, ...], Meta(max_length=KEYS_MAX)] = ()
    certificates: Annotated[tuple[Text, ...], Meta(max_length=KEYS_MAX)] = ()
    """URIs (spiffe://...) and host names of certificates, or cn:NAME."""
    accounts: Annotated[tuple[Account, ...], Meta(max_length=KEYS_MAX)] = ()
    tenant: Annotated[str, Meta(max_length=TENANT_MAX)] = ""
    models: tuple[Text, ...] = EVERYTHING
    workers: tuple[Text, ...] = EVERYTHING
    limits: Allowance = NO_LIMITS


class KeyFile(Settings, frozen=True):
    """The content of the key file."""

    identities: Annotated[tuple[Entry, ...], Meta(max_length=IDENTITIES_MAX)]
    issuers: Annotated[tuple[Issuer, ...], Meta(max_length=16)] = ()


class KeyRing:
    """Finds the identity of a token, a certificate or an account."""

    def __init__(self, file: KeyFile) -> None:
        """Raises ConfigError for a key of two identities, and for invalid entries."""
        self.issuers = file.issuers
        self.names: set[str] = set()
        self._tokens: dict[bytes, Identity] = {}
        self._certificates: dict[str, Identity] = {}
        self._accounts: dict[tuple[str, str], Identity] = {}
        _check_issuers(file)
        for i, entry in enumerate(file.identities):
            about = entry.tenant, entry.models, entry.workers, entry.limits
            identity = Identity(entry.name, frozenset(entry.rights), *about)
            if entry.name in self.names:
                raise ConfigError(f"the name {entry.name!r} is used twice - at `$.identities[{i}]`")
            self.names.add(entry.name)
            try:
                _put(self._tokens, map(_digest_of, entry.tokens), identity)
                _put(self._certificates, entry.certificates, identity)
                accounts = ((account.issuer, account.subject) for account in entry.accounts)
                _put(self._accounts, accounts, identity)
            except _Taken as error:
                raise ConfigError(
                    f"identities {error} and {entry.name!r} have the same key"
                    f" - at `$.identities[{i}]`"
                ) from None

    @classmethod
    def of(cls, tree: object) -> "KeyRing":
        """Makes the key ring from a parsed YAML file. Raises ConfigError for an invalid key
        file.
        """
        try:
            return cls(msgspec.convert(tree, KeyFile))
        except msgspec.ValidationError as error:
            raise ConfigError(of_value(error, KeyFile)) from error
        except RecursionError as error:
            raise ConfigError("the key file is nested too deep") from error

    @property
    def has_certificates(self) -> bool:
        return bool(self._certificates)

    def of_token(self, digest: bytes) -> Identity | None:
        """The identity of a token, by its SHA-256; None: none has it."""
        return self._tokens.get(digest)

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """The identity of a verified certificate, by its alternative names, or cn: with its common
        name; None: none has it.
        """
        for name in names:
            if (identity := self._certificates.get(name)) is not None:
                return identity
        return None

    def of_account(self, issuer: str, subject: str) -> Identity | None:
        """The identity of a verified token's issuer and subject; None: none has them."""
        return self._accounts.get((issuer, subject))


def digest(token: str) -> bytes:
    """SHA-256 of a token, also of one that is not valid UTF-8."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def new_token() -> tuple[str, str]:
    """A new random token, and its hash as the key file has it."""
    token = "kvr_" + secrets.token_urlsafe(TOKEN_BYTES)
    return token, PREFIX + digest(token).hex()


_Key = TypeVar("_Key")


class _Taken(Exception):
    """A key has an identity already."""


def _put(keys: dict[_Key, Identity], new: Iterable[_Key], identity: Identity) -> None:
    for key in new:
        if (other := keys.setdefault(key, identity)) is not identity:
            raise _Taken(repr(other.name))


def _digest_of(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix(PREFIX))


def _check_issuers(file: KeyFile) -> None:
    """Raises ConfigError for issuers listed twice, invalid URLs, and accounts of no issuer."""
    names: Collection[str] = [issuer.issuer for issuer in file.issuers]
    if len(set(names)) != len(names):
        raise ConfigError("an issuer is listed twice - at `$.issuers`")
    for i, issuer in enumerate(file.issuers):
        url = urlsplit(issuer.jwks)
        if url.scheme not in ("https", "file") or (url.scheme == "https" and not url.hostname):
            raise ConfigError(f"expected an https:// or file:// URL - at `$.issuers[{i}].jwks`")
    for i, entry in enumerate(file.identities):
        if any(account.issuer not in names for account in entry.accounts):
            raise ConfigError(
                f"an account's issuer is not listed in `issuers` - at `$.identities[{i}]`"
            )


def names_of(certificate: Mapping[str, Any] | None) -> Iterator[str]:
    """Names of a client's verified certificate, in the form that KeyRing takes: SPIFFE ids first.

    certificate: as ssl.SSLSocket.getpeercert gives it; None or empty: there is none.
    """
    if not certificate:
        return
    names = certificate.get("subjectAltName", ())
    uris = [name for kind, name in names if kind == "URI"]
    yield from sorted(uris, key=lambda uri: not uri.startswith("spiffe://"))
    yield from (name for kind, name in names if kind in ("DNS", "IP Address"))
    for part in certificate.get("subject", ()):
        for field, value in part:
            if field == "commonName":
                yield f"cn:{value}"
