"""Addresses that stand-in engines listen on, and their ports. Pure."""

from collections.abc import Iterable
from itertools import count, repeat
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_EVERY = frozenset(("0.0.0.0", "::"))


class Ports(NamedTuple):
    """Ports of one engine; 0: any free port."""

    http: int = 0
    events: int = 0
    replay: int = 0
    bootstrap: int = 0
    """Port of a prefill engine's bootstrap server."""


FREE = Ports()


def ports_of(are_prefill: Iterable[bool], first: int = 0, events_first: int = 0) -> list[Ports]:
    """Consecutive ports for several engines: HTTP, events and replay of the first engine, then
    those of the next. A prefill engine has a fourth port, of its bootstrap server.

    are_prefill: for each engine, whether it is a prefill engine. first: HTTP port of the first
    engine; 0: any free ports. events_first: first port of a row of their own for events and
    replays; 0: they have no such row.
    """
    numbers = count(first) if first else repeat(0)
    events = count(events_first) if events_first else numbers
    return [
        Ports(next(numbers), next(events), next(events), next(numbers) if is_prefill else 0)
        for is_prefill in are_prefill
    ]


def authority(host: str, port: int | str) -> str:
    """host:port by which programs of this machine reach a port; loopback for every address."""
    host = LOOPBACK if host in _EVERY else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint(host: str, port: int) -> str:
    """A ZMQ endpoint to bind; port 0: any free port."""
    if host == "::":
        return f"tcp://*:{port or '*'}"
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
