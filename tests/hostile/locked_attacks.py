"""Attacks on a server with TLS and keys: of strangers, and of a key with limits.

Each sends at least what made an earlier release stall, grow or refuse its other clients.
"""

import asyncio
import random
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from router.gateway.picker.calls import PROCESS
from tests.hostile.target import Peer, Target, again_and_again, send, until_left
from tests.stage.http2_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    RST,
    SETTINGS,
    WINDOW_UPDATE,
    call_head,
    frame,
    literal,
)

Attack: TypeAlias = Callable[[Target, random.Random], Iterable[Awaitable[None]]]

MIB = 1 << 20
BOMB_MIB = 2_000
"""What a bomb unpacks to; it has about 2 MiB."""
BOMBS = 60
HOARD = 200
"""Unary calls that wait for their end, on each of two connections."""
DRIPS = 33
ANNOUNCED = 40
UNSENT = 2_000
"""Connections with the head of a request and the first byte of its body."""
MUTES = 1_100
WAITING = 6_000
END_STREAM = 1
ROUTE = b"/kvroute.v1.Router/Route"
CHECK = b"/grpc.health.v1.Health/Check"
LIST = b"/kvroute.v1.Fleet/ListWorkers"
INITIAL_WINDOW = 4


def _bomb() -> bytes:
    """A gzip stream: one mebibyte, packed, again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(b'{"model":"stand-in","messages":[{"role":"user","content":"')
    start += packer.flush(zlib.Z_FULL_FLUSH)
    part = packer.compress(b"a" * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + part * BOMB_MIB


def _post(path: bytes, headers: bytes, body: bytes) -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\nHost: a\r\n" + headers + length + body


def _bearer(target: Target) -> bytes:
    return f"Authorization: Bearer {target.token}\r\n".encode()


def bombs(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Bodies of 2 MiB that unpack to 2 GiB: with a key, without one, at any path and port."""
    bomb = _bomb()
    packed = b"Content-Encoding: gzip\r\n"

    def posts(path: bytes, headers: bytes) -> Callable[[Peer], Awaitable[None]]:
        whole = _post(path, headers + packed, bomb)
        parts = [whole[at : at + 65_536] for at in range(0, len(whole), 65_536)]

        async def play(peer: Peer) -> None:
            await send(peer, *parts)
            await asyncio.sleep(1.0)

        return play

    chat = b"/v1/chat/completions"
    for _ in range(BOMBS // 2):
        yield again_and_again(target, "gateway", posts(chat, _bearer(target)))
        yield again_and_again(target, "gateway", posts(chat, b""))
    for name, path in (("gateway", b"/nowhere"), ("gateway", b"/health"), ("metrics", b"/metrics")):
        yield from (again_and_again(target, name, posts(path, b"")) for _ in range(4))


def hoards(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Unary calls of a stranger with a packed message each, which never end their requests."""
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    content = packed.compress(bytes(8 * MIB)) + packed.flush()
    message = b"\x01" + struct.pack(">I", len(content)) + content
    encoding = literal(b"grpc-encoding", b"gzip") + literal(b"grpc-timeout", b"1S")

    def hoard(path: bytes) -> Callable[[Peer], Awaitable[None]]:
        head = call_head(path) + encoding

        async def play(peer: Peer) -> None:
            await send(peer, PREFACE + frame(SETTINGS))
            for stream in range(1, 2 * HOARD, 2):
                await send(
                    peer,
                    frame(HEADERS, END_HEADERS, stream, head)
                    + frame(DATA, 0, stream, message[: 1 << 14]),
                )
            await asyncio.sleep(5.0)

        return play

    for _ in range(2):
        yield again_and_again(target, "grpc", hoard(ROUTE))
        yield again_and_again(target, "picker", hoard(PROCESS.encode()))


def handshakes(target: Target, rng: random.Random) -> Iterable[Awaitable[None]]:
    """TLS handshakes that fail, each in its own way."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"

    async def play(peer: Peer) -> None:
        kind = rng.randrange(4)
        if kind:
            await send(
                peer, (hello, b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n")[kind - 1]
            )
            await asyncio.sleep(rng.uniform(0.0, 0.3))

    for name in target.ports:
        yield from (again_and_again(target, name, play, plain=True) for _ in range(5))


def drips(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Bodies of one key that hardly come: chunked by the byte, announced, begun."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + _bearer(target)

    async def drip(peer: Peer) -> None:
        await send(peer, post + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        while True:
            await asyncio.sleep(0.5)
            await send(peer, b"1\r\n \r\n")

    def begun(length: int) -> Callable[[Peer], Awaitable[None]]:
        async def play(peer: Peer) -> None:
            await send(peer, post + b"Content-Length: %d\r\n\r\n{" % length)
            await until_left(peer)

        return play

    yield from (again_and_again(target, "gateway", drip) for _ in range(DRIPS))
    yield from (again_and_again(target, "gateway", begun(32 * MIB)) for _ in range(ANNOUNCED))
    yield from (again_and_again(target, "gateway", begun(9)) for _ in range(UNSENT))


def mutes(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Connections to the picker's port that say nothing, from the start or after TLS."""

    async def greets(peer: Peer) -> None:
        await send(peer, PREFACE + frame(SETTINGS))
        await until_left(peer)

    yield from (again_and_again(target, "picker", until_left, plain=True) for _ in range(MUTES))
    yield from (again_and_again(target, "picker", until_left) for _ in range(MUTES // 10))
    yield from (again_and_again(target, "picker", greets) for _ in range(MUTES // 10))


def unread_answers(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Small calls with large answers, of a client that opens no window."""
    key = literal(b"authorization", f"Bearer {target.token}".encode())

    async def play(peer: Peer) -> None:
        await send(peer, PREFACE + frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW, 0)))
        for first in range(1, 8_000, 100):
            calls = (
                frame(HEADERS, END_HEADERS, stream, call_head(LIST) + key)
                + frame(DATA, END_STREAM, stream, bytes(5))
                for stream in range(first, first + 100, 2)
            )
            await send(peer, b"".join(calls))
        await asyncio.sleep(5.0)

    return [again_and_again(target, "grpc", play) for _ in range(4)]


def control_frames(target: Target, rng: random.Random) -> Iterable[Awaitable[None]]:
    """Frames that cost more than their bytes: connection credit and settings while thousands of
    answers wait, and headers of streams that are over."""

    def play(head: bytes, flags: int, tail: bytes) -> Callable[[Peer], Awaitable[None]]:
        async def floods(peer: Peer) -> None:
            window = frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW, 0))
            await send(peer, PREFACE + window)
            for first in range(1, 2 * WAITING, 200):
                calls = (
                    frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, flags, stream, tail)
                    for stream in range(first, first + 200, 2)
                )
                await send(peer, b"".join(calls))
            await send(
                peer,
                rng.choice(
                    (
                        frame(WINDOW_UPDATE, payload=struct.pack(">I", 1)) * 10_000,
                        frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW, 1000) * 2730)
                        * 3,
                        frame(HEADERS, END_HEADERS, 1, head) * 2_000,
                        frame(RST, 0, 1, bytes(4)) * 5_000,
                        frame(0x55, 0, 0, b"") * 10_000,
                        frame(DATA, 0, 3, b"") * 10_000,
                    )
                ),
            )
            await asyncio.sleep(1.0)

        return floods

    yield again_and_again(target, "grpc", play(call_head(CHECK), END_STREAM, bytes(5)))
    yield again_and_again(target, "grpc", play(call_head(ROUTE), 0, b""))
    yield again_and_again(target, "picker", play(call_head(PROCESS.encode()), 0, b""))


def many_keys(target: Target, _rng: random.Random) -> Iterable[Awaitable[None]]:
    """Bodies of 17 MiB with 1.5 million keys at their top level, and a field that is patched."""
    body = b'{"model":"stand-in","priority":1,"messages":[{"role":"user","content":"a"}]'
    body += b"".join(b',"k%d":1' % i for i in range(1_500_000)) + b"}"
    whole = _post(b"/v1/chat/completions", _bearer(target), body)
    parts = [whole[at : at + MIB] for at in range(0, len(whole), MIB)]

    async def play(peer: Peer) -> None:
        await send(peer, *parts)
        await asyncio.sleep(1.0)

    return [again_and_again(target, "gateway", play) for _ in range(3)]


LOCKED: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        bombs,
        hoards,
        handshakes,
        drips,
        mutes,
        unread_answers,
        control_frames,
        many_keys,
    )
}
"""Attacks on a server with TLS and keys."""
