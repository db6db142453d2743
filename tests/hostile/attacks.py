"""Clients that hold, flood or break connections: python -m tests.hostile.attacks NAME SEED TARGET

TARGET is the JSON of a target.Target. Each attack goes on until its process's input ends; a
connection that the server closes is opened again.
"""

import asyncio
import random
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import msgspec

from router.gateway.picker.calls import PROCESS
from tests.hostile.locked_attacks import LOCKED
from tests.hostile.target import TURN_S, Peer, Target, again_and_again, opened, pin, send
from tests.stage.channel import lines, say
from tests.stage.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEAD,
    HEADERS,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    call_head,
    frame,
    literal,
)

INITIAL_WINDOW = 4
HTTP = ("gateway", "metrics", "probes")
"""Ports of HTTP/1.1."""
HTTP2 = {"grpc": HEAD, "picker": call_head(PROCESS.encode())}
"""Ports of HTTP/2, and the head of a call that goes on until its client ends it."""
SLOW_CONNECTIONS = 100
"""On each port."""
STREAMS = 10_000
STREAMS_A_CONNECTION = 5_000
PIPELINED = 1_000

Attack: TypeAlias = Callable[[Target, random.Random], Iterable[Awaitable[None]]]


def slow_heads(target: Target, rng: random.Random) -> Iterable[Awaitable[None]]:
    """Heads and prefaces that come a byte at a time."""

    async def play(peer: Peer) -> None:
        await send(peer, b"GET /health HTTP/1.1\r\nX-A: ")
        while True:
            await send(peer, b"a")
            await asyncio.sleep(rng.uniform(0.2, 0.6))

    async def preface(peer: Peer) -> None:
        for i in range(len(PREFACE)):
            await send(peer, PREFACE[i : i + 1])
            await asyncio.sleep(rng.uniform(0.2, 0.6))

    for _ in range(SLOW_CONNECTIONS):
        yield from (again_and_again(target, name, play) for name in HTTP)
        yield from (again_and_again(target, name, preface) for name in HTTP2)


def pings(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """HTTP/2 pings as fast as they are taken."""

    async def play(peer: Peer) -> None:
        await send(peer, PREFACE + frame(SETTINGS))
        while True:
            await send(peer, frame(PING, payload=bytes(8)) * 50)

    return [again_and_again(target, name, play) for name in HTTP2 for _ in range(4)]


def resets(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Streams that are opened and reset at once."""

    def reset(head: bytes) -> Callable[[Peer], Awaitable[None]]:
        async def play(peer: Peer) -> None:
            await send(peer, PREFACE + frame(SETTINGS))
            for first in range(1, 1 << 20, 40):
                streams = range(first, first + 40, 2)
                await send(
                    peer,
                    b"".join(
                        frame(HEADERS, END_HEADERS, stream, head) + frame(RST, 0, stream, bytes(4))
                        for stream in streams
                    ),
                )

        return play

    for name, head in HTTP2.items():
        yield from (again_and_again(target, name, reset(head)) for _ in range(2))


def giant_headers(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Headers without an end: one long one, many short ones, HTTP/2 continuations."""

    async def long(peer: Peer) -> None:
        await send(peer, b"GET /health HTTP/1.1\r\nX-A: ", *[b"a" * 16_384] * 64)

    async def many(peer: Peer) -> None:
        await send(peer, b"GET /health HTTP/1.1\r\n", *[b"X-A: b\r\n" * 1000] * 64)

    async def continued(peer: Peer) -> None:
        filler = literal(b"x", b"y" * 120) * 100
        await send(peer, PREFACE + frame(SETTINGS), frame(HEADERS, 0, 1, HEAD))
        await send(peer, *[frame(CONTINUATION, 0, 1, filler)] * 200)

    for name in HTTP:
        yield again_and_again(target, name, long)
        yield again_and_again(target, name, many)
    yield from (again_and_again(target, name, continued) for name in HTTP2)


def streams(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """10,000 calls on each port of HTTP/2 that stay open and say nothing."""

    def silent(head: bytes) -> Callable[[Peer], Awaitable[None]]:
        async def play(peer: Peer) -> None:
            await send(peer, PREFACE + frame(SETTINGS))
            for first in range(1, 2 * STREAMS_A_CONNECTION, 200):
                numbers = range(first, first + 200, 2)
                await send(peer, b"".join(frame(HEADERS, END_HEADERS, n, head) for n in numbers))
            while True:
                await asyncio.sleep(1.0)
                await send(peer, frame(SETTINGS, 1))

        return play

    count = STREAMS // STREAMS_A_CONNECTION
    for name, head in HTTP2.items():
        yield from (again_and_again(target, name, silent(head)) for _ in range(count))


def unread(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Requests whose answers are never read, pipelined where the protocol has that."""

    def piped(path: bytes) -> Callable[[Peer], Awaitable[None]]:
        async def play(peer: Peer) -> None:
            request = b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"
            await send(peer, *[request * 20] * (PIPELINED // 20))
            await asyncio.Event().wait()

        return play

    def windowless(head: bytes) -> Callable[[Peer], Awaitable[None]]:
        async def play(peer: Peer) -> None:
            settings = frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW, 0))
            await send(peer, PREFACE + settings)
            for stream in range(1, 200, 2):
                empty = b"\x00" + struct.pack(">I", 0)
                await send(
                    peer, frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, 0, stream, empty)
                )
            await asyncio.Event().wait()

        return play

    for name, path in (("gateway", b"/v1/models"), ("metrics", b"/metrics"), ("probes", b"/livez")):
        yield from (again_and_again(target, name, piped(path), reads=False) for _ in range(4))
    for name, head in HTTP2.items():
        yield from (again_and_again(target, name, windowless(head), reads=False) for _ in range(4))


def noise(target: Target, rng: random.Random) -> Iterable[Awaitable[None]]:
    """Random bytes, also after a right beginning."""

    async def play(peer: Peer) -> None:
        begin = rng.choice((b"", b"POST /v1/chat/completions HTTP/1.1\r\n", PREFACE))
        await send(peer, begin + rng.randbytes(rng.choice((1, 9, 24, 4000, 70_000))))
        await asyncio.sleep(rng.uniform(0.0, 0.2))

    for _ in range(4):
        yield from (again_and_again(target, name, play) for name in target.ports)


def connections(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Connections that are opened and left, hundreds a second."""

    async def play(peer: Peer) -> None:
        await asyncio.sleep(TURN_S)

    for _ in range(4):
        yield from (again_and_again(target, name, play) for name in target.ports)


PLAIN: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        slow_heads,
        pings,
        resets,
        giant_headers,
        streams,
        unread,
        noise,
        connections,
    )
}
"""Attacks on a server without TLS and keys."""
ATTACKS = PLAIN | LOCKED


async def run(name: str, seed: int, target: Target) -> int:
    pin(attacker=True)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_forever(work))
            for work in ATTACKS[name](target, random.Random(f"{seed}/{name}"))
        ]
        while not opened:  # noqa: ASYNC110  # a busy machine takes its time
            await asyncio.sleep(TURN_S)
        say(attacks=True)
        async for _ in lines():
            pass
        for task in tasks:
            task.cancel()
    say(opened=dict(opened))
    return 0


async def _forever(work: Awaitable[None]) -> None:
    await work


if __name__ == "__main__":
    _, attack_name, seed_text, target_text = sys.argv
    aimed = msgspec.json.decode(target_text, type=Target)
    sys.exit(asyncio.run(run(attack_name, int(seed_text), aimed)))
