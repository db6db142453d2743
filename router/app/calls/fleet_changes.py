"""Fleet commands of an operator: one call to a router, and one line that describes its effect."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from kvroute.client import KvRouteClient
from router.app.calls.dialing import dial
from router.config.printable import shown

_COMMANDS = {
    "drain": (
        KvRouteClient.drain_worker,
        "drained; it gets no new requests, and those that run there go on",
    ),
    "undrain": (KvRouteClient.undrain_worker, "back; it may get new requests"),
    "remove": (
        KvRouteClient.remove_worker,
        "removed; its heartbeats are ignored until the removal ends",
    ),
    "resync": (
        KvRouteClient.resync_worker,
        "resynced; its blocks are forgotten and read again from its relay",
    ),
}
"""The client's method and the effect in words, by command."""


async def change_worker(
    action: str, worker_id: str, *, target: str, timeout_s: float, as_json: bool, **about: Any
) -> None:
    """Sends one of _COMMANDS, and prints its effect. about: further arguments of the call."""
    call, done = _COMMANDS[action]
    async with dial(target) as client:
        ranks = await call(client, worker_id, timeout_s=timeout_s, **about)
    here = "none of its ranks is known here now" if not ranks else _ranks(ranks)
    effect = f"{done} ({here}). All replicas were sent the command."
    _print(action, worker_id, ranks, effect, as_json)


async def register_worker(
    worker_id: str, engine: Mapping[str, Any], *, target: str, timeout_s: float, as_json: bool
) -> None:
    """Registers an engine, given as keys of EngineSettings."""
    async with dial(target) as client:
        ranks = await client.register_worker(worker_id, timeout_s=timeout_s, **engine)
    followed = f" ({_ranks(ranks)})" if ranks else ""
    effect = f"registered; this router runs its relay{followed} until the router stops."
    _print("register", worker_id, ranks, effect, as_json)


def _print(action: str, worker_id: str, ranks: int, effect: str, as_json: bool) -> None:
    if as_json:
        result = {"action": action, "worker_id": worker_id, "ranks": ranks}
        click.echo(msgspec.json.encode(result).decode())
    else:
        click.echo(shown(f"worker {worker_id} is {effect}"))


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"
