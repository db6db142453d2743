"""Reads and writes the ZMQ multiparts of an engine's event publisher and its replay socket. Pure.

    live     [topic, sequence, payload]
    request  [b"", first sequence]
    replay   [b"", sequence, payload] ...          vLLM up to 0.25, SGLang up to 0.5.21
             [b"", topic, sequence, payload] ...   since then
             ... and last the same with sequence -1 and no payload

Sequences are 8 bytes, big-endian. A publisher is one rank, and counts from 0 since the start of its
process. The end marker comes last or is missing: the socket silently drops messages to a slow
reader.
"""

from collections.abc import Sequence
from typing import NamedTuple

SEQUENCE_BYTES = 8
SEQUENCE_LIMIT = 1 << 63
"""Sequences are below it, so that the end marker's -1 is no sequence."""


class LiveMessage(NamedTuple):
    """One batch of events, as the engine's PUB socket sends it."""

    topic: str
    sequence: int
    payload: bytes


class ReplayPart(NamedTuple):
    """One batch of events that was published earlier, as the replay socket sends it."""

    sequence: int
    payload: bytes


class ReplayEnd(NamedTuple):
    """The end marker: the engine has sent all messages that it still had."""


class Malformed(NamedTuple):
    """A message that does not belong on this socket; the reason is a sentence."""

    reason: str


def parse_live(parts: Sequence[bytes]) -> LiveMessage | Malformed:
    """Reads a multipart from the engine's PUB socket."""
    if len(parts) != 3:
        return Malformed(f"a live message of {len(parts)} parts, where 3 are expected")
    sequence = _sequence(parts[1])
    if sequence is None or sequence < 0:
        return Malformed(f"{_shown(parts[1])} is no sequence number of 8 bytes, 0 or more")
    # The subscription has checked the topic; a strange topic is no reason to lose the batch.
    return LiveMessage(parts[0].decode("utf-8", "replace"), sequence, parts[2])


def replay_request(first_sequence: int) -> list[bytes]:
    """A DEALER's request for every kept batch from `first_sequence` on, inclusive.

    The empty part is the delimiter that a REQ socket would add. Raises ValueError outside
    [0, 2^63). An engine that no longer keeps `first_sequence` answers from its oldest batch on,
    without saying so.
    """
    if not 0 <= first_sequence < SEQUENCE_LIMIT:
        raise ValueError(f"first_sequence is {first_sequence}, which is outside [0, 2^63)")
    return [b"", first_sequence.to_bytes(SEQUENCE_BYTES, "big")]


def parse_replay(parts: Sequence[bytes]) -> ReplayPart | ReplayEnd | Malformed:
    """Reads a multipart from the replay socket, from its end on so that both framings fit."""
    if not 2 <= len(parts) <= 4:
        return Malformed(f"a replay message of {len(parts)} parts, where 3 or 4 are expected")
    sequence = _sequence(parts[-2])
    payload = parts[-1]
    if sequence is None or sequence < -1:
        return Malformed(f"{_shown(parts[-2])} is no sequence number of 8 bytes, -1 or more")
    if sequence >= 0:
        return ReplayPart(sequence, payload)
    if payload:
        return Malformed(f"an end marker with {len(payload)} bytes of payload")
    return ReplayEnd()


def _sequence(part: bytes) -> int | None:
    if len(part) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(part, "big", signed=True)


def _shown(part: bytes) -> str:
    return f"0x{part[:16].hex()} ({len(part)} bytes)"
