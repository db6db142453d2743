"""An operator, an account and a user of NATS, as `nsc` makes them: JWTs signed by nkeys.

The format is that of github.com/nats-io/jwt, version 2: a header, claims whose `jti` is a digest of
them, and an Ed25519 signature of the issuer.
"""

import base64
import hashlib
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import nkeys


@dataclass(frozen=True)
class Accounts:
    """What a server of NATS reads, and the .creds file of its one user."""

    server: str
    credentials: str


def accounts() -> Accounts:
    """A new operator with one account, whose one user may publish and subscribe to anything."""
    operator, account, user = (
        _Key(kind)
        for kind in (
            nkeys.PREFIX_BYTE_OPERATOR,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_USER,
        )
    )
    unlimited = {"subs": -1, "data": -1, "payload": -1}
    of_account = {"conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True}
    operator_jwt = operator.signed(operator.public, "operator", {"type": "operator"})
    account_jwt = operator.signed(
        account.public, "account", {"type": "account", "limits": {**unlimited, **of_account}}
    )
    user_jwt = account.signed(
        user.public, "user", {"type": "user", "pub": {}, "sub": {}, **unlimited}
    )
    server = (
        f"operator: {operator_jwt}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_jwt} }}\n"
    )
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return Accounts(server, credentials)


class _Key:
    def __init__(self, kind: int) -> None:
        encoded = bytes(nkeys.encode_seed(os.urandom(32), kind))
        self.seed = encoded.decode()
        self._pair = nkeys.from_seed(bytearray(encoded))
        self.public = bytes(self._pair.public_key).decode()

    def signed(self, subject: str, name: str, of_kind: dict[str, Any]) -> str:
        claims = {
            "iat": int(time.time()),
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": {**of_kind, "version": 2},
        }
        digest = hashlib.sha256(json.dumps(claims).encode()).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        text = f"{_encoded(header)}.{_encoded(claims)}"
        signature = base64.urlsafe_b64encode(self._pair.sign(text.encode())).decode()
        return f"{text}.{signature.rstrip('=')}"


def _encoded(thing: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(thing).encode()).decode().rstrip("=")
