"""Credentials for engines' HTTP servers, used by relays, the gateway and tokenization requests.

Laws:
- every HTTP request to an engine is made with its EngineAccess;
- an API key is in no log, metric, fact or error.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE_S = 2.0
"""Seconds: longest wait for one of an engine's pages."""
KEY_HEADERS = frozenset(("authorization", "x-api-key"))
"""Headers in which clients show keys. The second is that of Anthropic's clients."""
NEEDS_KEY = (
    "the engine needs its API key: set engines.api_key_file, or api_key_file of this worker"
    " (--api-key-file of its relay)"
)


class Credentials:
    """The API key of engines, and the CAs of their certificates, read from files that may
    change.
    """

    def __init__(self, key_file: str | None = None, ca_file: str | None = None) -> None:
        """Raises OSError or ValueError for a file that can't be used."""
        self._key_file = key_file
        self._ca_file = ca_file
        self._ca = b""
        self.api_key = ""
        """API key that engines get; empty: none."""
        self.tls: ssl.SSLContext | bool = True
        """TLS as aiohttp takes it: a context; True: the system's CAs."""
        self.reload()

    def reload(self) -> bool:
        """Reads the files again; returns whether they changed. Raises OSError or ValueError, and
        changes nothing, for files that can't be used."""
        api_key = "" if self._key_file is None else read_token(self._key_file)
        ca, tls = self._ca, self.tls
        if self._ca_file is not None:
            # Never empty: an empty text would stand for the system's CAs.
            ca = Path(self._ca_file).read_bytes() + b"\n"
        if ca != self._ca:
            try:
                tls = ssl.create_default_context(cadata=ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(f"{self._ca_file} holds no certificates: {error}") from None
        changed = (api_key, ca) != (self.api_key, self._ca)
        self.api_key, self._ca, self.tls = api_key, ca, tls
        return changed


NO_CREDENTIALS = Credentials()


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """Credentials and time limit for one engine's HTTP server."""

    base: str
    """URL before the paths of the engine's pages: http://HOST:PORT, and a further path if any."""
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = PAGE_S
    """Time limit of a request for a page, seconds."""

    def url(self, path: str) -> str:
        return self.base.rstrip("/") + path

    @property
    def tls(self) -> ssl.SSLContext | bool:
        """The TLS context for aiohttp's `ssl`; True: the system's CAs."""
        return self.credentials.tls

    def headers(self, others: Mapping[str, str] | None = None) -> dict[str, str]:
        """Headers of a request: `others`, with the engine's API key instead of a client's if the
        engine has a key.
        """
        key = self.credentials.api_key
        if not key:
            return dict(others or {})
        kept = {
            name: value for name, value in (others or {}).items() if name.lower() not in KEY_HEADERS
        }
        return kept | {"Authorization": f"Bearer {key}"}


def refused_key(status: int) -> str:
    """Sentence for a status that means a missing or wrong API key; empty for any other status."""
    return f"status {status}: {NEEDS_KEY}" if status in (401, 403) else ""


def read_token(file: str) -> str:
    """A bearer token from its file; raises OSError or ValueError."""
    token = Path(file).read_text(encoding="ascii").strip()
    if not token or not token.isprintable():
        raise ValueError(f"the token file {file} is empty, or its token has unprintable characters")
    return token
