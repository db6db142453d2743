"""Fleet commands of an operator: one call to a router, and one line that says its effect."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from kvroute.client import KvRouteError
from kvroute.v1 import RegisterWorkerRequest
from router.app.calls.dialing import complain, dial
from router.app.cli.engine_flags import flag_of
from router.config.printable import shown

_EFFECTS = {
    "drain": "drained; it gets no new requests, and those that run there go on",
    "undrain": "back; it may get new requests",
    "remove": "removed; its heartbeats are ignored until the removal ends",
    "resync": "resynced; its blocks are forgotten and read again from its relay",
}
_FIRST_FIELDS = 9
"""Numbers of RegisterWorkerRequest's fields that routers know which answer without ranks."""


async def change_worker(
    action: str,
    worker_id: str,
    *,
    target: str,
    timeout_s: float,
    as_json: bool,
    tombstone_s: float | None = None,
) -> int:
    """Sends one of the commands of _EFFECTS, and prints its effect; returns the exit code."""
    async with dial(target) as client:
        try:
            match action:
                case "drain":
                    ranks = await client.drain_worker(worker_id, timeout_s=timeout_s)
                case "undrain":
                    ranks = await client.undrain_worker(worker_id, timeout_s=timeout_s)
                case "remove":
                    ranks = await client.remove_worker(
                        worker_id, tombstone_s=tombstone_s, timeout_s=timeout_s
                    )
                case _:
                    ranks = await client.resync_worker(worker_id, timeout_s=timeout_s)
        except KvRouteError as error:
            return complain(target, error)
    here = "none of its ranks is known here now" if not ranks else _ranks(ranks)
    effect = f"{_EFFECTS[action]} ({here}). All replicas were sent the command."
    _print(action, worker_id, ranks, effect, as_json)
    return 0


async def register_worker(
    worker_id: str, engine: Mapping[str, Any], *, target: str, timeout_s: float, as_json: bool
) -> int:
    """Registers an engine, given as keys of EngineSettings; returns the exit code."""
    async with dial(target) as client:
        try:
            ranks = await client.register_worker(worker_id, timeout_s=timeout_s, **engine)
        except KvRouteError as error:
            return complain(target, error)
    if not ranks and (ignored := _late_fields() & engine.keys()):
        flags = ", ".join(sorted(map(flag_of, ignored)))
        result = f"worker{worker_id} is registered, but this router's release is older than {flags}"
        advice = "remove the worker, and run `kvroute relay` beside the engine instead"
        click.echo(shown(f"kvroute: {target}: {result}: {advice}"), err=True)
        return 1
    followed = f" ({_ranks(ranks)})" if ranks else ""
    effect = f"registered; this router runs its relay{followed} until the router stops."
    _print("register", worker_id, ranks, effect, as_json)
    return 0


def _print(action: str, worker_id: str, ranks: int, effect: str, as_json: bool) -> None:
    if as_json:
        result = {"action": action, "worker_id": worker_id, "ranks": ranks}
        click.echo(msgspec.json.encode(result).decode())
    else:
        click.echo(shown(f"worker {worker_id} is {effect}"))


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _late_fields() -> set[str]:
    fields = RegisterWorkerRequest.DESCRIPTOR.fields
    return {field.name for field in fields if field.number > _FIRST_FIELDS}
