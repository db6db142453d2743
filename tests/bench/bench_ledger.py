"""How fast engine events become facts: what a relay does between decoding and sending."""

from typing import Any

from events.engines.events import BlocksRemoved, BlocksStored
from events.plane.facts import Epoch
from events.relay.ledger import Ledger
from events.relay.outbox import Outbox
from tests.bench.timing import rate

CHAINS = 40
CHAIN_TOKENS = 4096


def rows() -> list[dict[str, Any]]:
    """Engine blocks a second, stored and removed, for engine and canonical sizes."""
    return [
        _row("b64", 64, None),
        _row("b16", 16, None),
        _row("b64_split_to_16", 64, 16),
        _row("b1_merged_to_16", 1, 16),
    ]


def _row(what: str, size: int, wanted: int | None) -> dict[str, Any]:
    count = CHAIN_TOKENS // size
    stores = [
        BlocksStored(
            hashes=tuple(range(chain * count, (chain + 1) * count)),
            parent=None,
            token_ids=[(chain + 1) * i % 150_000 for i in range(CHAIN_TOKENS)],
            block_size=size,
        )
        for chain in range(CHAINS)
    ]
    removals = [BlocksRemoved(tuple(reversed(store.hashes))) for store in stores]
    ledger = Ledger(wanted)
    outbox = Outbox(Epoch(1, 1))

    def run() -> None:
        for event in (*stores, *removals):
            outbox.add(ledger.apply(event), 1.0)
        outbox.flush()

    return rate(f"ledger_{what}", run, 2 * CHAINS * count, "blocks/s")
