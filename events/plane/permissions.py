"""NATS permissions: the rights that relays and routers need, and a test for further ones. Pure.

Law: the credentials of a relay publish for its own workers only. Routers believe what comes on a
worker's subjects and on the control subject: only these permissions protect them.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from events.plane import subjects
from events.plane.subjects import PLANES, Side

PROBE_ID = "kvroute-probe"
"""A worker id that no relay has, for tests of what credentials allow."""


class Rights(NamedTuple):
    """NATS subjects, with wildcards, that a user may use; replies to requests are allowed, too."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class Attempt(NamedTuple):
    """A test of credentials, which should refuse it: an empty message, or a subscription."""

    publishes: bool
    subject: str
    allows: str
    """What a relay could do if its credentials allow the attempt."""


def of_relay(fleet: str, worker_ids: Sequence[str]) -> Rights:
    """The NATS rights of a relay of these workers."""
    tokens = [f"{subjects.escape(worker_id)}.*" for worker_id in worker_ids]
    return _rights(fleet, "relay", tokens)


def of_router(fleet: str) -> Rights:
    """The NATS rights of every router of a fleet."""
    publish, subscribe = _rights(fleet, "router", ["*.*"])
    return Rights(publish, (*subscribe, "_INBOX.>"))


def _rights(fleet: str, side: Side, workers: Sequence[str]) -> Rights:
    """The NATS rights of relays or routers. workers: the last tokens of their subjects."""
    last = {"replica": "*", "fleet": ""}
    of_workers = [(plane, each) for each in workers for plane in PLANES if plane.whose == "worker"]
    others = [(plane, last[plane.whose]) for plane in PLANES if plane.whose != "worker"]
    every = [*of_workers, *others]
    return Rights(
        tuple(_subject(fleet, plane.name, end) for plane, end in every if plane.publisher == side),
        tuple(
            _subject(fleet, plane.name, end) for plane, end in every if side in plane.subscribers
        ),
    )


def beyond_relay(fleet: str) -> tuple[Attempt, ...]:
    """Attempts that a relay's credentials should refuse. Their messages are empty: a router that
    receives an empty message drops and counts it."""
    return tuple(
        Attempt(
            "router" in plane.subscribers,
            _subject(fleet, plane.name, f"{PROBE_ID}.0" if plane.whose == "worker" else ""),
            plane.trespass,
        )
        for plane in PLANES
        if plane.trespass
    )


def _subject(fleet: str, plane: str, last: str) -> str:
    return ".".join(filter(None, ("kvroute.v1", fleet, plane, last)))


_REFUSED = re.compile(
    r'permissions violation for (publish|subscription) to "([^"\s]+)', re.IGNORECASE
)


def refused(error: str) -> tuple[bool, str] | None:
    """(whether publishing was refused, or else subscribing; the subject), from a NATS server's
    error; None: the error is no refusal."""
    match = _REFUSED.search(error)
    return None if match is None else (match[1].lower() == "publish", match[2])


def server_config(fleet: str, users: dict[str, Rights]) -> str:
    """A nats-server configuration with these users (name -> rights), whose passwords it reads from
    environment variables."""
    lines = []
    for name, rights in users.items():
        lines += [
            f"{_variable(name)} = {{",
            f"  publish = [{_quoted(rights.publish)}]",
            f"  subscribe = [{_quoted(rights.subscribe)}]",
            "  allow_responses = true",
            "}",
        ]
    entries = [
        f"    {{ user: {_quoted((name,))}, password: ${_variable(name)}_PASSWORD,"
        f" permissions: ${_variable(name)} }}"
        for name in users
    ]
    passwords = ", ".join(f"{_variable(name)}_PASSWORD" for name in users)
    return "\n".join(
        [
            f"# kvroute's fleet {fleet!r}: relays publish for their own workers only.",
            f"# nats-server reads the passwords from its environment: {passwords};",
            "# set each to a bcrypt hash (`nats server passwd`), so that no password is there.",
            *lines,
            "authorization = {",
            "  users = [",
            *entries,
            "  ]",
            "}",
            "",
        ]
    )


def nsc_commands(account: str, users: dict[str, Rights]) -> str:
    """Shell commands of nsc that make these users (name -> rights), each with its JWT and key."""
    lines = []
    for name, rights in users.items():
        lines += [
            f"nsc add user --account {account} --name {name} --allow-pub-response \\",
            f'  --allow-pub "{",".join(rights.publish)}" \\',
            f'  --allow-sub "{",".join(rights.subscribe)}"',
            f"nsc generate creds --account {account} --name {name} > {name}.creds",
        ]
    return "\n".join([*lines, ""])


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _variable(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()
