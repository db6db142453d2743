"""How fast facts from NATS reach the index: what a router does for every relay of its fleet."""

from collections.abc import Callable
from typing import Any

import numpy as np

from events.feed.fleet_view import FleetView
from events.plane.facts import Epoch
from events.relay.ledger import Gone, Placed
from events.relay.outbox import Outbox
from indexer.identity import PrefixHash, Tier, WorkerKey
from indexer.index import BlockIndex
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from tests.bench.timing import rate, seconds_of

MESSAGES = 400
WORKER = WorkerKey("w", 0)
IMPLEMENTATIONS: dict[str, Callable[[], BlockIndex]] = {
    "native": NativeIndex,
    "reference": ReferenceIndex,
}


def rows() -> list[dict[str, Any]]:
    """Blocks a second, decoded, ordered and applied, by the blocks in one message."""
    return [
        _row(name, make, count) for name, make in IMPLEMENTATIONS.items() for count in (1, 16, 256)
    ]


def native_seconds_a_message(count: int) -> float:
    """Of a message with so many blocks: decoded, ordered and applied."""
    run, messages = _run(NativeIndex, count)
    return seconds_of(run) / messages


def _row(name: str, make: Callable[[], BlockIndex], count: int) -> dict[str, Any]:
    run, messages = _run(make, count)
    return rate(_row_name(name, count), run, messages * count, "blocks/s")


def _run(make: Callable[[], BlockIndex], count: int) -> tuple[Callable[[], None], int]:
    """What applies messages of `count` blocks each to a new view, and how many they are."""
    rng = np.random.default_rng(1)
    chains = [
        [PrefixHash(one) for one in rng.integers(0, 1 << 64, count, np.uint64).tolist()]
        for _ in range(MESSAGES // 2)
    ]
    outbox = Outbox(Epoch(1, 1))
    messages: list[bytes] = []
    for hashes in chains:
        outbox.add([Placed(Tier.DEVICE, None, hashes)], 1.0)
        messages += outbox.flush()
    for hashes in chains:
        outbox.add([Gone(Tier.DEVICE, hashes)], 1.0)
        messages += outbox.flush()

    def run() -> None:
        view = FleetView(make(), beat_timeout_s=3.0, forget_s=30.0, workers_max=10)
        for message in messages:
            view.on_stream(WORKER, message, 1.0)

    return run, len(messages)


def _row_name(name: str, count: int) -> str:
    if (name, count) == ("native", 16):
        return "ingest_blocks_per_s"  # beside nats_ingest_blocks_per_s of bench_nats.py
    return f"ingest_{count}_{name}"
