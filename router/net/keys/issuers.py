"""Tokens of OpenID Connect issuers, such as Kubernetes' service account tokens.

Laws:
- keys come from the https:// or file:// URLs of the key file, never from a token;
- a token counts until its `exp`, and only with the signature, `iss` and `aud` of an issuer;
- a token with an unknown key has the keys fetched again, once in FETCH_S at most.
"""

import asyncio
import json
import logging
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import aiohttp

from events.engines.access import read_token
from router.config.keys import ConfigError
from router.net.keys.followed import reason_of
from router.net.keys.key_ring import Issuer

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
"""Accepted algorithms of signatures, by public keys only: with a shared secret a router could make
tokens itself."""
FETCH_S = 10.0
"""Least seconds between two fetches for tokens with unknown keys."""
REFRESH_S = 300.0
"""Seconds after which keys are fetched again in any case: an issuer revokes a key by leaving it out
of its key set."""
TIMEOUT_S = 5.0
BYTES_MAX = 1 << 20
TOKEN_MAX = 16_384
"""Most characters of a token."""
CACHED_MAX = 4096
LEEWAY_S = 30
"""Seconds by which the clocks of issuer and router may differ."""

log = logging.getLogger("kvroute.keys")


class UnknownKeyError(Exception):
    """A token of a known issuer, which the message names, has a key that was not fetched yet."""


class Issuers:
    """Verifies the tokens of the configured issuers."""

    def __init__(self, issuers: tuple[Issuer, ...], clock: Callable[[], float]) -> None:
        """clock: Unix time. Raises ConfigError where the library is missing, or a file of keys
        can't be read."""
        self._clock = clock
        self._issuers = {issuer.issuer: issuer for issuer in issuers}
        self._keys: dict[str, dict[str, Any]] = {name: {} for name in self._issuers}
        self._contents: dict[str, bytes] = {}
        """Issuer -> its key set as it was last fetched."""
        self._fetched_s = dict.fromkeys(self._issuers, float("-inf"))
        self._verified: OrderedDict[str, tuple[float, str, str]] = OrderedDict()
        """Verified token -> Unix time until which that holds, its issuer, its subject."""
        self._fetching: asyncio.Lock = asyncio.Lock()
        self.fetches: Counter[str] = Counter(ok=0, failed=0)
        if issuers:
            try:
                import jwt
            except ImportError:
                raise ConfigError(
                    "issuers need a package that is not installed: pip install 'kvroute[oidc]'"
                    " - at `$.issuers`"
                ) from None
            self._jwt: Any = jwt
        for issuer in issuers:
            if urlsplit(issuer.jwks).scheme == "file":
                try:
                    self._take(issuer, _file(issuer).read_bytes())
                except (OSError, ValueError) as error:
                    raise ConfigError(f"{reason_of(error)} - at `$.issuers`") from error

    def __len__(self) -> int:
        return len(self._issuers)

    def verify(self, token: str) -> tuple[str, str] | None:
        """Issuer and subject of a token; None: it is invalid, or of no configured issuer. Raises
        UnknownKeyError.
        """
        if not self._issuers or len(token) > TOKEN_MAX or token.count(".") != 2:
            return None
        now_s = self._clock()
        if (known := self._verified.get(token)) is not None:
            if now_s < known[0]:
                return known[1:]
            del self._verified[token]
        jwt = self._jwt
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(token, options={"verify_signature": False})
            issuer = self._issuers.get(claims.get("iss"))
            if issuer is None or header.get("alg") not in ALGORITHMS:
                return None
            key = self._keys[issuer.issuer].get(str(header.get("kid", "")))
            if key is None:
                raise UnknownKeyError(issuer.issuer)
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=issuer.audience,
                issuer=issuer.issuer,
                leeway=LEEWAY_S,
                options={
                    "require": ["exp", "iss", "sub", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.PyJWTError, TypeError, ValueError, RecursionError):
            return None
        return self._checked(token, claims, now_s)

    async def fetch(self, issuer: str) -> None:
        """Fetches the keys of an issuer again, once in FETCH_S at most."""
        async with self._fetching:
            if self._clock() - self._fetched_s[issuer] >= FETCH_S:
                await self._fetch(self._issuers[issuer])

    async def refresh(self) -> None:
        """Fetches keys that are older than REFRESH_S, or, where there are none, FETCH_S."""
        for name, issuer in self._issuers.items():
            age_s = self._clock() - self._fetched_s[name]
            if age_s >= (REFRESH_S if self._keys[name] else FETCH_S):
                async with self._fetching:
                    await self._fetch(issuer)

    def _checked(self, token: str, claims: dict[str, Any], now_s: float) -> tuple[str, str] | None:
        """Issuer and subject of a token with a valid signature; None: it has no readable times, or
        is not valid at now_s. Tests set now_s; otherwise it is this process's clock.
        """
        try:
            ends_s = float(claims["exp"]) + LEEWAY_S
            begins_s = float(claims.get("nbf", 0)) - LEEWAY_S
        except (TypeError, ValueError):
            return None
        if not begins_s <= now_s < ends_s:
            return None
        result = str(claims["iss"]), str(claims["sub"])
        self._verified[token] = (min(ends_s, now_s + REFRESH_S), *result)
        if len(self._verified) > CACHED_MAX:
            self._verified.popitem(last=False)
        return result

    async def _fetch(self, issuer: Issuer) -> None:
        self._fetched_s[issuer.issuer] = self._clock()
        try:
            if urlsplit(issuer.jwks).scheme == "file":
                content = _file(issuer).read_bytes()
            else:
                content = await _get(issuer)
            self._take(issuer, content)
        except (OSError, ValueError, TimeoutError, aiohttp.ClientError) as error:
            self.fetches["failed"] += 1
            reason = reason_of(error) or type(error).__name__
            log.error(
                "keys of issuer %s not fetched, the old ones stay in force: %s",
                issuer.issuer,
                reason,
            )
        else:
            self.fetches["ok"] += 1

    def _take(self, issuer: Issuer, content: bytes) -> None:
        """Uses the keys of a JSON Web Key Set, but for those of kinds that are not supported (RFC
        7517, 5); raises ValueError, and changes nothing, for content that is none."""
        try:
            listed = json.loads(content)["keys"]
            keys: dict[str, Any] = {}
            for key in listed:
                if key.get("use", "sig") == "sig" and key.get("kty") != "oct":
                    kid = str(key.get("kid", ""))
                    try:
                        keys[kid] = self._jwt.PyJWK(key)
                    except self._jwt.PyJWTError as error:
                        about = issuer.issuer, kid[:64], type(error).__name__
                        log.info("issuer %s: the key %r can't be used: %s", *about)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the issuer's `jwks` has no JSON Web Key Set: {type(error).__name__}"
            ) from error
        if content != self._contents.get(issuer.issuer):
            self._verified.clear()  # tokens of a revoked key must not count any more
        self._keys[issuer.issuer], self._contents[issuer.issuer] = keys, content


def _certificates(file: str | None) -> str | None:
    """Text of a PEM file, never empty, which would stand for the system's CAs; None: no file.
    Raises OSError with the file's name, which OpenSSL's own error does not have."""
    return None if file is None else Path(file).read_text(encoding="ascii", errors="ignore") + "\n"


async def _get(issuer: Issuer) -> bytes:
    """Fetches an issuer's key set over HTTPS. Raises OSError, TimeoutError, ValueError or
    ClientError."""
    context = ssl.create_default_context(cadata=_certificates(issuer.ca_file))
    headers = {}
    if issuer.token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(issuer.token_file)}"
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(issuer.jwks, ssl=context, headers=headers, allow_redirects=False) as answer,
    ):
        if answer.status != 200:
            raise ValueError(f"the issuer's `jwks` answers with HTTP status {answer.status}")
        content = await answer.content.read(BYTES_MAX + 1)
        while len(content) <= BYTES_MAX and (more := await answer.content.read(BYTES_MAX)):
            content += more
    if len(content) > BYTES_MAX:
        raise ValueError(f"the key set has more than {BYTES_MAX} bytes")
    return content


def _file(issuer: Issuer) -> Path:
    return Path(url2pathname(urlsplit(issuer.jwks).path))
