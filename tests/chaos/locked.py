"""TLS and tokens of a run: the files of its routers, and the credentials of its clients."""

import ssl
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from tests.stage.certificates import Authority, written
from tests.stage.keys import identity, write_keys

CLIENTS, HOSTILE = "clients", "hostile"
"""Identities; the token of each is in `NAME.token`."""
_CA = "routers-ca.pem"


def write_locks(folder: Path) -> dict[str, Any]:
    """Writes the files; the routers' configuration of them."""
    authority = Authority()
    settings = written(folder, authority.issue("router"))
    (folder / _CA).write_bytes(authority.pem)
    for name in (CLIENTS, HOSTILE):
        (folder / f"{name}.token").write_text(f"{name}-token")
    rights = ("route", "report", "observe")
    keys = write_keys(folder, identity(CLIENTS, rights=rights), identity(HOSTILE))
    tls = {"certificate_file": settings.certificate_file, "key_file": settings.key_file}
    return {"tls": tls, "keys": {"file": keys}}


class Lock(NamedTuple):
    """How a process of a run calls routers."""

    credentials: grpc.ChannelCredentials | None
    """None: in plain text."""
    token: str | None
    context: ssl.SSLContext | None = None
    """Of HTTPS."""

    @classmethod
    def of(cls, folder: Path | None, name: str) -> "Lock":
        """folder: of write_locks; None: there are no locks."""
        if folder is None:
            return cls(None, None)
        credentials = grpc.ssl_channel_credentials((folder / _CA).read_bytes())
        context = ssl.create_default_context(cafile=folder / _CA)
        return cls(credentials, (folder / f"{name}.token").read_text(), context)

    def channel(self, target: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """Every call on it brings the token."""
        if self.credentials is None or self.token is None:
            return grpc.aio.insecure_channel(target, options=options)
        token = grpc.access_token_call_credentials(self.token)
        both = grpc.composite_channel_credentials(self.credentials, token)
        return grpc.aio.secure_channel(target, both, options=options)
