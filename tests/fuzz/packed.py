"""Readers of MessagePack: batches of engines, and the event plane's messages beside msgspec."""

from typing import Any

import msgspec

from events.engines.table import READINGS
from events.engines.wire import batch_time_s
from events.plane import facts
from events.relay.ledger import Ledger
from tests.fuzz.wire import Outcome, same

KINDS = (
    facts.Heartbeat,
    facts.SnapshotRequest,
    facts.SnapshotChunk,
    facts.Hello,
    facts.Control,
    facts.Warm,
    facts.Warmed,
)
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def by_msgspec(payload: bytes) -> tuple[bool, Any]:
    """Whether the payload is one value, and the value."""
    try:
        return True, msgspec.msgpack.decode(payload)
    except _BROKEN:
        return False, None
    except (ValueError, OverflowError, TypeError):  # a timestamp or a key that Python can't have
        return False, None


def engine(payload: bytes) -> Outcome:
    """An engine's batch: read and applied without an error, and its time is that of its first
    bytes."""
    outcome: list[Any] = []
    for name, reading in READINGS.items():
        batch = reading.decode(payload)
        if batch.malformed and batch.malformed[0].startswith("the batch: "):
            unread = (batch.events, batch.time_s, batch.removals_lost)
            same(unread, ((), 0.0, True), f"{name}: no batch")
            outcome.append("refused")
            continue
        same(batch_time_s(payload), batch.time_s, f"{name}: the time")
        *_, dropped = _held(batch.events)
        counts = len(batch.events), len(batch.malformed), len(batch.unknown_kinds)
        outcome.append((*counts, len(dropped)))
    return tuple(outcome)


def _held(events: Any) -> Any:
    ledger = Ledger(None)
    for event in events:
        ledger.apply(event)
    placed = [sorted(prefixes) for _, prefixes in ledger.placements()]
    return placed, ledger.digest(), set(ledger.dropped)


def plane(payload: bytes) -> Outcome:
    """Messages between relays and routers, snapshots among them: what is taken is what msgspec
    sees without a schema, and survives another writing and reading."""
    is_value, value = by_msgspec(payload)
    outcome: list[Any] = []
    for kind in KINDS:
        message = facts.decode(kind, payload)
        if isinstance(message, facts.Unreadable):
            outcome.append(message.reason)
            continue
        _check(message, payload, value if is_value else {})
        outcome.append("taken")
    message, dropped = facts.decode_stream(payload)
    if message is not None and not dropped:
        _check(message, payload, value if is_value else {})
    return (*outcome, type(message).__name__, len(dropped))


def _check(message: Any, payload: bytes, value: Any) -> None:
    """Fields that the payload has are the message's, and it can be sent on. value: empty where
    msgspec reads none, as of keys that are no UTF-8, which a schema skips."""
    same(bytes(msgspec.msgpack.decode(payload, type=msgspec.Raw)), payload, "one value")
    same(isinstance(value, dict), True, "a map")
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name, one in plain.items():
        if name in value and not isinstance(one, (list, tuple, dict)):
            theirs = value[name]
            if isinstance(one, float):
                theirs = float(theirs)
            same(repr(one), repr(theirs), name)  # a NaN is itself here
    encoded = facts.encode(message)
    if isinstance(message, facts.FactsMessage | facts.Beat):
        again, _ = facts.decode_stream(encoded)
    else:
        again = facts.decode(type(message), encoded)
    same(repr(again), repr(message), "read again")
