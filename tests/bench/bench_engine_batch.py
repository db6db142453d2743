"""How long a relay applies one message of its engine, at the limits of a message.

Removals in EVENTS_MAX events of their own, and stores, a removal and a clear of as many blocks of
16 tokens as PAYLOAD_BYTES_MAX takes, and SGLang's pages of one token. A relay applies a message in
one turn of its event loop, so its beats, and those of the relays beside it, are late by that time.
CPU time of the loop's thread; the garbage collector is set as the command sets it.
"""

import gc
import time
from itertools import count
from random import Random
from typing import Any

import msgspec

from events.engines.wire import EVENTS_MAX, PAYLOAD_BYTES_MAX, TOKENS_MAX
from events.plane.facts import Epoch
from events.relay.rank import Rank
from router.app.cli.run import COLLECTED_AFTER
from tests.bench.timing import row

BLOCK_TOKENS = 16
TOKEN = 40_000
"""Three bytes in MessagePack, as most ids of a large vocabulary are."""
BLOCK_BYTES = 9 + 3 * BLOCK_TOKENS
BLOCKS = PAYLOAD_BYTES_MAX // BLOCK_BYTES - 1000
PAGES = TOKENS_MAX


def rows() -> list[dict[str, Any]]:
    """Milliseconds of CPU time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    try:
        return [*_of_blocks(), *_of_pages()]
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _of_blocks() -> list[dict[str, Any]]:
    hear = _Listener()
    names = _names(max(BLOCKS, EVENTS_MAX))
    removals = [["BlockRemoved", [name], "GPU"] for name in names[:EVENTS_MAX]]
    names = names[:BLOCKS]
    return [
        hear("store", _stored(names)),
        hear("removals", removals),
        hear("store_again", _stored(names)),
        hear("removal", [["BlockRemoved", names, "GPU"]]),
        hear("store_last", _stored(names)),
        hear("clear", [["AllBlocksCleared"]]),
    ]


def _of_pages() -> list[dict[str, Any]]:
    hear = _Listener()
    pages = _names(PAGES)
    return [
        hear("store_pages", _stored(pages, tokens=1)),
        hear("clear_pages", [["AllBlocksCleared"]]),
    ]


def _names(blocks: int) -> list[int]:
    """Engine hashes."""
    rng = Random(1)
    return [rng.getrandbits(63) for _ in range(blocks)]


def _stored(names: list[int], tokens: int = BLOCK_TOKENS) -> list[Any]:
    """A chain, in as many events as the bound on an event's tokens makes of it."""
    events = []
    step = TOKENS_MAX // tokens
    for at in range(0, len(names), step):
        part = names[at : at + step]
        token_ids = [TOKEN + i % 1000 for i in range(len(part) * tokens)]
        parent = names[at - 1] if at else None
        events.append(["BlockStored", part, parent, token_ids, tokens, None, "GPU"])
    return events


class _Listener:
    """A rank that hears one message after the other."""

    def __init__(self) -> None:
        self._rank = Rank("vllm", Epoch(1, 1), has_replay=False)
        self._seq = count()

    def __call__(self, kind: str, events: list[Any]) -> dict[str, Any]:
        rank = self._rank
        payload = msgspec.msgpack.encode([1.0, events, 0])
        events.clear()
        gc.freeze()  # what the benchmark made is not what a relay has
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise AssertionError(f"{kind}: {len(payload)} bytes")
        before = sum(rank.counts.values())
        started = time.thread_time()
        rank.on_message(next(self._seq), payload, 1.0)
        rank.flush()
        ms = (time.thread_time() - started) * 1e3
        if rank.counts["malformed"] or sum(rank.counts.values()) == before:
            raise AssertionError(f"{kind}: {rank.counts}")
        note = f"{len(payload) / (1 << 20):.1f} MiB"
        return row(f"engine_batch_{kind}_ms", round(ms), "ms", "less", note)
