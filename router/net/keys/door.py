"""Finds the identity of a caller from its key, its certificate or a unix socket.

    bearer token     -> the identity that has its hash, or the account of its issuer
    certificate      -> the identity that has one of its names; without a key file: its own name
    unix socket      -> all rights: the permissions of its file let the caller in

Laws:
- a caller that brings a token is that token's identity or nobody, whatever else it brings;
- a fault of this check lets no caller in: the caller is refused like one without a valid key.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path

from router.config.keys import ConfigError
from router.config.settings.keys_settings import KeysSettings
from router.config.yaml_text import parse_yaml
from router.net.keys.certificates import Certificates
from router.net.keys.followed import Followed, reason_of
from router.net.keys.identity import UNIX, Identity, unauthenticated
from router.net.keys.issuers import Issuers, UnknownKeyError
from router.net.keys.key_ring import KeyFile, KeyRing, digest
from router.net.keys.usage import Usage
from router.request.refusal import Refusal

FILE_BYTES_MAX = 16 << 20
IDENTITIES_SHOWN = 64
"""Identities that metrics of refusals name, at most; the others are counted as `other`."""
_CERTIFIED_MAX = 4096
"""Most identities by certificate that are kept where there is no key file; one more drops all."""

log = logging.getLogger("kvroute.keys")

CURRENT: ContextVar[Usage | None] = ContextVar("kvroute_caller", default=None)
"""Usage of the caller whose call the running task handles; None: the listener needs no keys."""


class Door:
    """Checks the keys of one process's callers."""

    def __init__(
        self,
        file: str | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """file: the key file; None: callers need certificates alone, and have all rights. clock:
        Unix time that never goes back. Raises ConfigError.
        """
        self._file = None if file is None else Path(file)
        self._clock = clock
        self._content = b""
        self._ring = KeyRing(KeyFile(identities=()))
        self.issuers = Issuers((), clock)
        self._usages: dict[str, Usage] = {}
        self._unix = Usage(UNIX, clock)
        self.faults = 0
        """Calls that were refused for a fault of the check itself."""
        if self._file is not None:
            try:
                self.reload()
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self._file}: {reason_of(error)} - at `$.keys.file`") from error

    @classmethod
    def of(
        cls,
        settings: KeysSettings,
        certificates: Certificates | None,
        *,
        clock: Callable[[], float],
    ) -> "Door | None":
        """The door that the settings describe; None: callers need no keys. Raises ConfigError."""
        asks = certificates is not None and certificates.asks_callers
        if settings.file is None and not asks:
            return None
        return cls(settings.file, clock=clock)

    @property
    def takes_tokens(self) -> bool:
        """Whether there is a key file, so that callers may have a key instead of a certificate."""
        return self._file is not None

    def refused(self) -> dict[tuple[str, str], int]:
        """Calls and items refused past limits: (identity, limit) -> number since the identity was
        listed. The IDENTITIES_SHOWN identities with most are named; the others count as `other`."""
        hit = [use for use in self._usages.values() if use.refused]
        hit.sort(key=lambda use: -use.refused.total())
        counts: Counter[tuple[str, str]] = Counter()
        for place, use in enumerate(hit):
            name = use.identity.name if place < IDENTITIES_SHOWN else "other"
            for limit, count in use.refused.items():
                counts[name, limit] += count
        return counts

    def reload(self) -> bool:
        """Reads the key file again; returns whether it changed. Raises OSError or ValueError, and
        changes nothing, for an invalid file. A key that was removed lets no new call in."""
        if self._file is None:
            return False
        with self._file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"the key file has more than {FILE_BYTES_MAX >> 20} MiB")
        if content == self._content:
            return False
        ring = KeyRing.of(parse_yaml(content.decode(), ""))
        if ring.issuers != self._ring.issuers:
            self.issuers = Issuers(ring.issuers, self._clock)
        self._content, self._ring = content, ring
        self._usages = {name: use for name, use in self._usages.items() if name in ring.names}
        return True

    def enter(
        self, token: str | None, names: Callable[[], Iterable[str]], *, is_unix: bool
    ) -> Usage:
        """The usage of a caller. Raises Refusal for a caller without a valid key, UnknownKeyError
        where the keys of its token's issuer have to be fetched first (`enter_after`).

        names: of its verified certificate, if it has one: see KeyRing.of_certificate.
        """
        try:
            return self._entered(token, names, is_unix=is_unix)
        except (Refusal, UnknownKeyError):
            raise
        except Exception as fault:
            raise self._fault(fault) from None

    def _fault(self, fault: Exception) -> Refusal:
        self.faults += 1
        # The kind of the error alone: its text may have the token.
        log.error("a caller's key could not be checked: %s", type(fault).__name__)
        return unauthenticated()

    def _entered(
        self, token: str | None, names: Callable[[], Iterable[str]], *, is_unix: bool
    ) -> Usage:
        if token is not None:
            identity = self._ring.of_token(digest(token))
            if identity is None and (account := self.issuers.verify(token)) is not None:
                identity = self._ring.of_account(*account)
        elif self._file is None:
            identity = self._certified(names())
        else:
            identity = self._ring.of_certificate(names()) if self._ring.has_certificates else None
        if identity is not None:
            return self._usage(identity)
        if is_unix and token is None:
            return self._unix
        raise unauthenticated()

    async def enter_after(
        self, error: UnknownKeyError, token: str, names: Callable[[], Iterable[str]]
    ) -> Usage:
        """Fetches the keys of the token's issuer, then enters as `enter` does; raises Refusal."""
        try:
            # In a task of its own: the first step of a call may have none, which HTTP clients need.
            await asyncio.create_task(self.issuers.fetch(str(error)))
            return self.enter(token, names, is_unix=False)
        except UnknownKeyError:
            raise unauthenticated() from None
        except Refusal:
            raise
        except Exception as fault:
            raise self._fault(fault) from None

    def follow(self, followed: Followed) -> None:
        """Has the key file read again when it changes."""
        if self._file is not None:
            followed.add("keys", self)

    async def run(self) -> None:
        """Fetches the keys of issuers repeatedly, until it is cancelled."""
        while True:
            issuers = self.issuers
            await issuers.refresh()
            await asyncio.sleep(1.0)

    def _certified(self, names: Iterable[str]) -> Identity | None:
        name = next(iter(names), None)
        return None if name is None else Identity(name[:256])

    def _usage(self, identity: Identity) -> Usage:
        usage = self._usages.get(identity.name)
        if usage is None:
            if len(self._usages) >= _CERTIFIED_MAX and self._file is None:
                self._usages.clear()  # they have no limits, so nothing is lost
            usage = self._usages[identity.name] = Usage(identity, self._clock)
        elif usage.identity != identity:
            usage.follow(identity)
        return usage
