"""The engines' half of bench_nats.py, in a process of its own.

    python -m tests.bench.nats_side fleet PORT ENGINES BLOCKS_PER_S BLOCKS
    python -m tests.bench.nats_side engine

Speaks in lines: one of JSON when it is ready, then an answer to each line that it reads.
"""

import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq

from events.plane import subjects
from events.plane.clock import unix_now
from events.plane.facts import Epoch
from events.relay.ledger import Placed
from events.relay.outbox import Outbox
from events.relay.stream_publisher import COALESCE_S
from indexer.identity import PrefixHash, Tier, WorkerKey
from simulator.engines.block_pool import Stored
from simulator.engines.vllm_wire import encode_batch, encode_sequence

EVENT_BLOCKS = 16
FLEET = "bench"
TOPIC = "kv-events"
_SLICE_S = 0.001


def fleet(port: int, engines: int, blocks_per_s: float, blocks: int) -> None:
    """Relays of so many engines, as far as NATS sees them.

    Each engine stores 16 new blocks at a time, all together so many a second. What goes out is what
    relays make of that: each its own numbered messages, gathered for 2 ms or 64 KiB, and a beat at
    the end. It is made in advance, so that only sending takes time here.
    "flood" sends all of it at once, "pace" when it is due, and "beat" a further beat of each, since
    a router takes streams for late while they flood. Answers with a line when all is sent.
    """
    streams: list[_Stream] = []
    told = list(_messages(engines, blocks_per_s, blocks, streams))
    told.sort(key=lambda one: one.at_s)
    commands = [_command(one.subject, one.payload) for one in told]
    facts = blocks // (EVENT_BLOCKS * engines) * engines
    _say({"messages": len(told), "facts": facts, "blocks": facts * EVENT_BLOCKS})
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1 << 16)
        connection.sendall(b'CONNECT {"verbose":false}\r\n')
        for line in sys.stdin:
            if line.strip() == "flood":
                connection.sendall(b"".join(commands))
            elif line.strip() == "beat":
                connection.sendall(b"".join(_command(one.subject, one.beat()) for one in streams))
            else:
                _pace(connection, [one.at_s for one in told], commands)
            connection.sendall(b"PING\r\n")
            while not connection.recv(1 << 16).endswith(b"PONG\r\n"):
                pass
            _say("sent")


@dataclass(frozen=True, slots=True)
class _Told:
    at_s: float
    subject: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Stream:
    subject: bytes
    outbox: Outbox
    blocks: int
    digest: int

    def beat(self) -> bytes:
        return self.outbox.beat(self.blocks, self.digest, True, unix_now())


def _command(subject: bytes, payload: bytes) -> bytes:
    return b"PUB %s %d\r\n%s\r\n" % (subject, len(payload), payload)


def _messages(
    engines: int, blocks_per_s: float, blocks: int, streams: list[_Stream]
) -> Iterator[_Told]:
    """streams: gets one for each engine."""
    rng = np.random.default_rng(1)
    events = blocks // (EVENT_BLOCKS * engines)
    gap_s = EVENT_BLOCKS * engines / blocks_per_s
    for engine in range(engines):
        subject = subjects.facts(FLEET, WorkerKey(f"engine-{engine}", 0)).encode()
        hashes = rng.integers(0, 1 << 64, (events, EVENT_BLOCKS), np.uint64)
        outbox = Outbox(Epoch(1, engine))
        first_s = rng.random() * gap_s
        flush_at_s: float | None = None
        for i, chain in enumerate(hashes.tolist()):
            at_s = first_s + i * gap_s
            if flush_at_s is not None and at_s >= flush_at_s:
                yield from (_Told(flush_at_s, subject, one) for one in outbox.flush())
                flush_at_s = None
            placed = Placed(Tier.DEVICE, None, [PrefixHash(one) for one in chain])
            yield from (_Told(at_s, subject, one) for one in outbox.add([placed], unix_now()))
            if flush_at_s is None:
                flush_at_s = at_s + COALESCE_S
        end_s = first_s + events * gap_s + COALESCE_S
        yield from (_Told(end_s, subject, one) for one in outbox.flush())
        digest = int(np.bitwise_xor.reduce(hashes.ravel()))
        streams.append(_Stream(subject, outbox, hashes.size, digest))
        yield _Told(end_s, subject, streams[-1].beat())


def _pace(connection: socket.socket, due_s: list[float], commands: list[bytes]) -> None:
    started_s = time.monotonic()
    sent = 0
    while sent < len(commands):
        now_s = time.monotonic() - started_s
        first = sent
        while sent < len(commands) and due_s[sent] <= now_s:
            sent += 1
        if sent > first:
            connection.sendall(b"".join(commands[first:sent]))
        time.sleep(_SLICE_S)


def engine() -> None:
    """An engine's publisher. "COUNT GAP_S" publishes so many events of 16 blocks, so far apart, and
    answers with the times (time.monotonic) at which it handed each to its socket."""
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    _say({"port": port})
    rng = random.Random(1)
    sequence = 0
    for line in sys.stdin:
        count, gap_s = line.split()
        times_s = []
        for _ in range(int(count)):
            payload = encode_batch(time.time(), [_stored(rng)], EVENT_BLOCKS)
            frames = (TOPIC.encode(), encode_sequence(sequence), payload)
            times_s.append(time.monotonic())
            publisher.send_multipart(frames)
            sequence += 1
            # Not in step with the router's or the relay's own timers.
            time.sleep(float(gap_s) * rng.uniform(0.5, 1.5))
        _say(times_s)
    context.destroy(linger=0)


def _stored(rng: random.Random) -> Stored:
    hashes = tuple(rng.getrandbits(63) for _ in range(EVENT_BLOCKS))
    tokens = tuple(rng.randrange(100_000) for _ in range(EVENT_BLOCKS * EVENT_BLOCKS))
    return Stored(hashes, None, tokens, (None,) * EVENT_BLOCKS)


def _say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "fleet":
        fleet(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        engine()
