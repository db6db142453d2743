"""MessagePack's readers: ours beside msgspec."""

from collections import Counter
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from events.engines import skipping, skipping_reference
from events.engines.batch_reader import SLICE_UNITS, BatchReader, batch_time_s
from events.engines.decoding import DECODERS, SCHEMAS
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
_PARTLY = {"unknown_parent", "unhashable", "item_place_unknown"}
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def by_msgspec(payload: bytes) -> tuple[bool, Any]:
    """Whether the payload is one value, and the value."""
    try:
        return True, msgspec.msgpack.decode(payload)
    except _BROKEN:
        return False, None
    except (ValueError, OverflowError, TypeError):  # a timestamp or a key that Python can't have
        return False, None


def skip(payload: bytes) -> Outcome:
    """Values are skipped as the definition does, and where msgspec sees one value, it is one."""

    def skipped(of: Any, left: int, steps: int) -> Any:
        try:
            return of.skip(payload, 0, left, steps)
        except ValueError:
            return None

    for left, steps in ((1, 1 << 20), (2, 1), (3, 7), (len(payload), 1 << 20)):
        ours, theirs = (skipped(one, left, steps) for one in (skipping, skipping_reference))
        same(ours, theirs, f"{left} values in {steps} steps")
    whole = skipped(skipping, 1, 1 << 20)
    is_value, _ = by_msgspec(payload)
    if is_value:
        same(whole, (len(payload), 0), "one value")
    return ("skipped", whole is not None, is_value)


def engine(payload: bytes) -> Outcome:
    """An engine's batch: in slices as in one go; nothing raises."""
    outcome: list[Any] = []
    for name, decode in DECODERS.items():
        batch = decode(payload)
        counts: Counter[str] = Counter()
        reader = BatchReader(payload, SCHEMAS[name], counts)
        events = []
        for _ in range(10 + 10 * len(payload)):
            if reader.ended:
                break
            events += reader.read(SLICE_UNITS)
        same(reader.ended, True, f"{name}: an end")
        same(reader.digest, xxh3_64_intdigest(payload), f"{name}: the digest")
        batch_time_s(payload)
        if batch.malformed and batch.removals_lost and not batch.malformed[0].startswith("event "):
            # No batch at all; in slices, events before the broken part were read.
            lost = reader.malformed > 0 and reader.removals_lost
            same(lost, True, f"{name}: a broken batch is counted")
            outcome.append("refused")
            continue
        same(
            (reader.time_s, reader.dp_rank, reader.malformed, reader.removals_lost),
            (batch.time_s, batch.dp_rank, len(batch.malformed), batch.removals_lost),
            f"{name}: the batch",
        )
        kinds = Counter(type(event).__name__ for event in batch.events)
        kinds |= {"malformed": len(batch.malformed), "unknown": len(batch.unknown_kinds)}
        same(+counts, +kinds, f"{name}: counts")
        whole = _held(batch.events)
        if not reader.removals_lost and not whole[-1] & _PARTLY:
            same(_held(events), whole, f"{name}: what a ledger holds")
        outcome.append((len(batch.events), len(batch.malformed), len(batch.unknown_kinds)))
    return tuple(outcome)


def _held(events: Any) -> Any:
    ledger = Ledger(None)
    for event in events:
        ledger.apply(event)
    copies = {name: block.copies for name, block in ledger.blocks()}
    placed = [sorted(prefixes) for _, prefixes in ledger.placements()]
    return copies, placed, ledger.digest(), set(ledger.dropped)


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
    same(skipping_reference.skip(payload, 0, 1, 1 << 20), (len(payload), 0), "one value")
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
