"""Byte for byte what SGLang 0.5.23 sent: the messages of a recorded engine."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from events.engines.events import BlocksRemoved, BlocksStored
from events.engines.sglang.events import decode
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.sglang_wire import encode_batch

RECORDED = Path(__file__).parents[1] / "golden" / "sglang-0.5.23"


def payloads(folder: str) -> Iterator[bytes]:
    for line in (RECORDED / folder / "frames.jsonl").read_text().splitlines():
        yield base64.b64decode(json.loads(line)["payload_b64"])


def pool_event(event: object, session: str | None) -> PoolEvent:
    """session: of the recorded event, which a relay does not read."""
    match event:
        case BlocksStored():
            return Stored(
                hashes=tuple(event.hashes),
                parent=event.parent,
                token_ids=tuple(event.token_ids),
                extra_keys=((event.cache_salt,),) if event.cache_salt else (),
                session_id=session,
            )
        case BlocksRemoved():
            return Removed(tuple(event.hashes))
        case _:
            return Cleared()


@pytest.mark.parametrize("folder", ["server-single", "radix-only/page16"])
def test_events_are_written_as_sglang_does(folder: str) -> None:
    kinds = set()
    for payload in payloads(folder):
        unix_s, events, rank = msgspec.msgpack.decode(payload)
        kinds |= {event["type"] for event in events}
        read = [
            pool_event(event, recorded.get("session_id"))
            for event, recorded in zip(decode(payload).events, events, strict=True)
        ]
        assert encode_batch(unix_s, read, 16, rank) == payload
    assert {"BlockStored", "BlockRemoved"} <= kinds


def test_salts_loras_and_sessions_are_read_again() -> None:
    stored = Stored(
        hashes=(1 << 63, 2),
        parent=None,
        token_ids=tuple(range(32)),
        extra_keys=(("ad", "mine"), ("ad",)),
        lora_name="ad",
        session_id="s",
    )
    [read] = decode(encode_batch(0.0, [stored], 16)).events
    assert isinstance(read, BlocksStored)
    assert (read.cache_salt, read.lora_name, list(read.hashes)) == ("mine", "ad", [1 << 63, 2])
